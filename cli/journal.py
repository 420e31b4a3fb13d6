"""``hintloop journal``: look after the files of a journal."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

import typer

from hintloop.cli.errors import UserError
from hintloop.cli.options import AsJson

app = typer.Typer(no_args_is_help=True, help="The files of a journal: list, check, merge, copy.")

Uri = Annotated[str, typer.Argument(metavar="URI", help="The journal: a folder, or any fsspec URI.")]
EXIT_DAMAGED = 1
COPIER = "copy"


@app.command("list")
def list_writers(uri: Uri, as_json: AsJson = False) -> None:
    """List who wrote a journal, and how many segments in how many files. Opens no file.

    Example: `hintloop journal list runs/one/journal`
    """
    from hintloop.cli.output import show
    from hintloop.replay.journal import Journal

    segments: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for file in Journal(uri).files():
        segments[file.writer] += file.last - file.first + 1
        files[file.writer] += 1
    rows = [{"writer": name, "segments": segments[name], "files": files[name]} for name in sorted(files)]
    show(rows, as_json=as_json)


@app.command()
def check(uri: Uri, as_json: AsJson = False) -> None:
    """Read every file of a journal, and name those that are damaged; readers leave these out.

    The exit status is 1 when there are any.
    Example: `hintloop journal check s3://bucket/journal`
    """
    from hintloop.cli.output import show_json
    from hintloop.replay.journal import Journal

    files, episodes, damaged = 0, 0, {}
    for name, count, damage in Journal(uri).check():
        files += 1
        episodes += count
        if damage:
            damaged[name] = damage
    if as_json:
        show_json({"files": files, "episodes": episodes, "damaged": damaged})
    else:
        typer.echo(f"{episodes} episodes in {files} files, {len(damaged)} of them damaged")
        for name, reason in damaged.items():
            typer.echo(f"{name}: {reason}")
    if damaged:
        raise typer.Exit(EXIT_DAMAGED)


@app.command()
def compact(uri: Uri, as_json: AsJson = False) -> None:
    """Merge small files, so that there are few to list and to open.

    Writers, readers and learners may go on meanwhile; it may be stopped at any moment.
    Example: `hintloop journal compact runs/one/journal`
    """
    from hintloop.cli.output import show_json
    from hintloop.replay.journal import Journal

    done = Journal(uri).compact()
    if as_json:
        show_json({"merged": done.merged, "made": done.made, "left": done.left})
    else:
        typer.echo(f"{done.merged} files merged into {done.made}")
        for name, reason in done.left.items():
            typer.echo(f"left as it is: {name}: {reason}")


@app.command()
def copy(
    uri: Uri,
    to: Annotated[str, typer.Option("--to", metavar="URI", help="The journal that gets the episodes.")],
    source: Annotated[list[str] | None, typer.Option(help="Only of this source; may be repeated.")] = None,
    outcome: Annotated[
        list[str] | None, typer.Option(help="Only with this outcome; may be repeated.")
    ] = None,
    task: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Only tasks like `bugfix/*`; may be repeated.")
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Only models like this; may be repeated.")
    ] = None,
    newest: Annotated[
        int | None, typer.Option(metavar="VERSION", help="What --max-lag counts from.", min=0)
    ] = None,
    max_lag: Annotated[
        int | None,
        typer.Option(help="Only episodes all of whose tokens are at most so many versions older.", min=0),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Copy a journal's episodes, or some of them, into another journal; what that has already is left out.

    The copy is of the newest schema version. A copy that was stopped goes on when it is started again.
    Example: `hintloop journal copy runs/one/journal --to runs/solved --outcome solved --task 'bugfix/*'`
    """
    from hintloop.cli.output import show_json
    from hintloop.replay.episode import Outcome
    from hintloop.replay.journal import Filter, Journal

    wrong = set(outcome or ()) - set(Outcome)
    if wrong:
        raise UserError(f"no outcome {wrong.pop()!r}; there are {', '.join(Outcome)}")
    if (newest is None) != (max_lag is None):
        raise UserError("--max-lag and --newest belong together")
    only = Filter(
        sources=tuple(source or ()),
        outcomes=tuple(outcome or ()),
        tasks=tuple(task or ()),
        models=tuple(model or ()),
        max_lag=max_lag,
    )
    origin, target = Journal(uri), Journal(to)
    if origin.uri == target.uri:
        raise UserError("--to must be another journal")
    reader, done, writer = origin.reader(only=only), target.episode_ids(), target.writer(COPIER)
    counts = Counter(copied=0, known_already=0)
    while segment := reader.poll_segment(newest):
        new = [episode for episode in segment.episodes if episode.episode_id not in done]
        if new:
            writer.append(new)
        counts.update(copied=len(new), known_already=len(segment.episodes) - len(new))
    if as_json:
        show_json({**counts, "damaged": reader.damaged})
    else:
        typer.echo(f"{counts['copied']} episodes copied, {counts['known_already']} were there already")
