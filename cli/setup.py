"""``hintloop setup``: the folder of a run whose parts are started one by one, such as services in containers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hintloop.cli.errors import UserError
from hintloop.cli.options import Assignments, ConfigFile, Preset, TaskSource, tasks_setting

if TYPE_CHECKING:
    from hintloop.cli.config import Config


def setup(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run, made when it is missing.")],
    preset: Preset = None,
    config: ConfigFile = None,
    assignments: Assignments = None,
    task_source: TaskSource = None,
) -> None:
    """Make the folder of a run, with its settings and its model, for parts that are started one by one.

    A run that is there goes on with the settings that it was started with.
    Example: `hintloop setup runs/one --preset laptop`
    """
    from hintloop.cli.config import load_config
    from hintloop.cli.model import prepare_student
    from hintloop.cli.runfolder import RunFolder, append_line, write_text

    folder = RunFolder(run)
    settings = load_config(
        preset=preset, file=config, assignments=assignments or (), values=tasks_setting(task_source)
    )
    if folder.is_run():
        kept = load_config(file=folder.config)
        typer.echo(f"{run} holds a run, which goes on")
        for line in _differences(settings, kept):
            typer.echo(f"not taken over: {line}")
        settings = kept
    else:
        try:
            (run / "status").mkdir(parents=True, exist_ok=True)
            prepare_student(settings.student, folder.student)
            write_text(folder.config, settings.to_toml())  # last: it marks the folder as a run
        except OSError as error:
            raise UserError(f"cannot write to {run}: {error.strerror}") from error
        typer.echo(f"{run} is ready for a new run of {settings.student.model}")
    append_line(folder.plays, seed=settings.run.seed)


def _differences(given: Config, kept: Config) -> Iterator[str]:
    """What was asked for and is otherwise in the run."""
    for section, values in _plain(kept).items():
        for name, value in values.items():
            asked = _plain(given)[section][name]
            if asked != value:
                yield f"{section}.{name}={asked}; the run has {value}"


def _plain(config: Config) -> dict[str, dict[str, Any]]:
    return config.model_dump(mode="json")
