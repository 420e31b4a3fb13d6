"""The command that shows a run in the browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hintloop.cli.options import ReadyFile


def view(
    run: Annotated[
        Path | None, typer.Argument(metavar="RUN", help="Folder of a run; none: the --journal alone.")
    ] = None,
    journal: Annotated[
        str | None, typer.Option("--journal", metavar="URI", help="Episodes; default: RUN/journal.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; nobody is asked who he is.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8010,
    only_names: Annotated[
        list[str] | None,
        typer.Option("--name", help="Beside loopback's, the only name browsers may call it by; repeatable."),
    ] = None,
    ready_file: ReadyFile = None,
) -> None:
    """Show a run in the browser, live: its curves, who waits for whom, and every episode as a conversation.

    Example: `hintloop view runs/laptop-20260101-120000`
    """
    from hintloop.cli.view.server import open_pages, serve

    pages = open_pages(run, journal)
    names = tuple(only_names or ())
    serve(pages, host=host, port=port, names=names, ready_file=ready_file, say=typer.echo)
