"""Command-line options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Preset = Annotated[str | None, typer.Option(help="Bundled settings to start from.", metavar="NAME")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="TOML file with settings.")]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="One setting; may be repeated. Wins over files."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
TaskSource = Annotated[
    str | None,
    typer.Option(
        "--tasks", metavar="SET|PATH", help="Task set, folder of tasks, or Python file; sets env.tasks."
    ),
]
ReadyFile = Annotated[Path | None, typer.Option(help="File that gets the URL once connections are accepted.")]


def tasks_setting(source: str | None) -> dict[str, str]:
    """The setting that ``--tasks`` stands for."""
    return {} if source is None else {"env.tasks": source}
