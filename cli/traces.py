"""``hintloop traces``: recordings of other agents into a journal, and from there to a learner."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hintloop.cli.errors import UserError
from hintloop.cli.options import AsJson
from hintloop.cli.recordings import JournalUri, segments
from hintloop.cli.traces_replay import replay_traces
from hintloop.cli.traces_show import grep, show_trace

if TYPE_CHECKING:
    from hintloop.replay.episode import Episode
    from hintloop.replay.ingest.report import Report

app = typer.Typer(no_args_is_help=True, help="Recorded traces of other agents.")
app.command("show")(show_trace)
app.command()(grep)
app.command("replay")(replay_traces)

MAX_NAME_CHARS = 20
GC_THRESHOLD = 10_000
"""New objects between two collections while recordings are taken in."""
EXIT_REFUSED = 1


class ExportFormat(StrEnum):
    """What ``export`` writes."""

    HF = "hf"
    ATIF = "atif"


@app.command("ingest")
def ingest_traces(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Files, or folders to walk.")],
    journal: JournalUri,
    keep_secrets: Annotated[
        bool, typer.Option("--keep-secrets", help="Store keys, tokens and passwords as they are.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Take recorded traces into a journal; what it has already is left out.

    The format is told by content: Claude Code (sub-agents included), Codex CLI, Gemini CLI, OpenHands, SWE-agent,
    mini-swe-agent, ATIF, OpenAI-style messages and OpenEnv. The exit status is 1 when a trace file was refused.
    Example: `hintloop traces ingest ~/.claude/projects --journal runs/recorded`
    """
    from hintloop.cli.output import show, show_json
    from hintloop.replay.ingest.event_log import size_of
    from hintloop.replay.ingest.ingest import find_files, ingest
    from hintloop.replay.journal import Journal

    # What is loaded by now stays, and records make no circles: passing over both costs a sixth of the time.
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    files = find_files(paths)
    named = {str(path) for path in paths}
    with _progress(sum(map(size_of, files))) as advance:
        reports = list(ingest(files, Journal(journal), keep_secrets=keep_secrets, progress=advance))
    if as_json:
        show_json([report.plain() for report in reports])
    else:
        strangers = sum(_is_stranger(report) and report.path not in named for report in reports)
        known = [report for report in reports if not _is_stranger(report) or report.path in named]
        show([_row(report) for report in known], as_json=False)
        typer.echo(_summary(known, strangers))
    if any(report.refused and (report.format or report.path in named) for report in reports):
        raise typer.Exit(EXIT_REFUSED)


@app.command()
def tokenize(
    journal: JournalUri,
    student: Annotated[
        str, typer.Option(metavar="MODEL", help="student-tiny, a model folder, or owner/name on the hub.")
    ],
    to: Annotated[str, typer.Option("--to", metavar="URI", help="Journal for `hintloop learn`.")],
    hint_role: Annotated[str, typer.Option(help="Role of the message that holds a hint.")] = "system",
    as_json: AsJson = False,
) -> None:
    """Write recorded episodes as tokens of a model, with hints at the turns that failed and the teachers' pairs.

    A recording has neither reward nor log-probabilities: it trains by its hints and by pairs from `traces replay`.
    What the target has already is left out, so the same command takes up what is new.
    Example: `hintloop traces tokenize --journal runs/recorded --student student-tiny --to runs/tokens`
    """
    from hintloop.agent.policy import load_renderer
    from hintloop.agent.recorded import NotRendered, tokenise
    from hintloop.cli.model import find_model
    from hintloop.cli.output import show
    from hintloop.replay.journal import Journal

    source, target = Journal(journal), Journal(to)
    if source.uri == target.uri:
        raise UserError("--to must be another journal: one holds text, the other tokens")
    chat, done, writer = load_renderer(find_model(student)), target.episode_ids(), target.writer("tokenize")
    counts: Counter[str] = Counter(episodes=0, known_already=0, tokens=0, sites=0, pairs=0)
    for episodes in segments(source):
        made = []
        for episode in episodes:
            if episode.token_ids or episode.episode_id in done:
                counts["known_already" if episode.episode_id in done else "not_recorded"] += 1
                continue
            try:
                result = tokenise(episode, chat, hint_role=hint_role)
            except NotRendered as error:
                counts[f"not rendered: {error}"] += 1
                continue
            made.append(result.episode)
            counts.update({f"no site: {reason}": count for reason, count in result.dropped.items()})
            counts["tokens"] += len(result.episode.token_ids)
            counts.update({f"no pair: {reason}": count for reason, count in result.dropped_pairs.items()})
            counts["sites"] += len(result.episode.hint_sites)
            counts["pairs"] += len(result.episode.pairs)
        if made:
            writer.append(made)
        counts["episodes"] += len(made)
    show([{"what": what, "count": count} for what, count in counts.items()], as_json=as_json)


@app.command()
def export(
    journal: JournalUri,
    to: Annotated[str, typer.Option("--to", metavar="FOLDER", help="Folder that gets the files.")],
    format: Annotated[ExportFormat, typer.Option("--format", help="A data set for TRL, or trajectories.")],
    push: Annotated[
        str | None, typer.Option("--push", metavar="REPO", help="Then push it to this data set of the hub.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a journal's episodes as a Hugging Face data set (hf) or as ATIF 1.8 trajectories (atif).

    The data set has a card and two subsets: `sft` (prompt and completion) and `preference` (chosen and rejected).
    Example: `hintloop traces export --journal runs/recorded --to runs/dataset --format hf`
    """
    from hintloop.cli.output import show
    from hintloop.replay.export.atif import export_atif
    from hintloop.replay.export.hf import export_hf
    from hintloop.replay.journal import Journal

    episodes = segments(Journal(journal))
    counts = export_hf(episodes, Path(to)) if format is ExportFormat.HF else export_atif(episodes, to)
    show([{"what": what, "count": count} for what, count in counts.items()], as_json=as_json)
    if push is not None:
        _push(Path(to), push)


@app.command("push")
def push_export(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="What `export` wrote.")],
    repo: Annotated[str, typer.Argument(metavar="REPO", help="owner/name on the hub.")],
) -> None:
    """Push an exported folder to the Hugging Face Hub, as a data set; a new one is private.

    The token is taken from the environment variable HF_TOKEN.
    Example: `hintloop traces push runs/dataset me/my-traces`
    """
    _push(folder, repo)


@app.command()
def stats(journal: JournalUri, as_json: AsJson = False) -> None:
    """Count a journal's episodes by source and outcome, and their errors by cause and kind.

    Example: `hintloop traces stats --journal runs/recorded --json`
    """
    from hintloop.cli.output import show, show_json
    from hintloop.replay.journal import Journal
    from hintloop.replay.supplement import is_supplement

    groups: dict[tuple[str, str], Counter[str]] = {}
    errors: Counter[tuple[str, str, str]] = Counter()
    for episodes in segments(Journal(journal)):
        for episode in episodes:
            groups.setdefault((episode.source, str(episode.outcome)), Counter()).update(_numbers(episode))
            failed = [] if is_supplement(episode) else [turn for turn in episode.turns if turn.error_kind]
            errors.update((episode.source, turn.error_cause or "", turn.error_kind or "") for turn in failed)
    rows = [
        {"source": source, "outcome": outcome, **counts}
        for (source, outcome), counts in sorted(groups.items())
    ]
    failures = [
        {"source": source, "cause": cause, "error": kind, "count": count}
        for (source, cause, kind), count in sorted(errors.items())
    ]
    if as_json:
        show_json({"episodes": rows, "errors": failures})
        return
    show(rows, as_json=False)
    show(failures, as_json=False)


def _push(folder: Path, repo: str) -> None:
    from hintloop.replay.export.hub import push

    typer.echo(f"pushed to {push(folder, repo)}", err=True)


def _numbers(episode: Episode) -> dict[str, int]:
    return {
        "episodes": 1,
        "turns": sum(turn.role == "assistant" for turn in episode.turns),
        "calls": sum(turn.role == "tool" for turn in episode.turns),
        "tokens": len(episode.token_ids),
        "sites": len(episode.hint_sites),
        "pairs": len(episode.pairs),
    }


def _is_stranger(report: Report) -> bool:
    """A file that is no trace at all."""
    return bool(report.refused) and not report.format


def _row(report: Report) -> dict[str, Any]:
    name = Path(report.path).name
    return {
        "file": name if len(name) <= MAX_NAME_CHARS else f"{name[:MAX_NAME_CHARS]}…",
        "format": report.format,
        "records": report.read,
        "skipped": sum(report.skipped.values()),
        "traces": report.traces,
        "new": report.episodes,
        "sites": report.sites,
    }


def _summary(reports: list[Report], strangers: int) -> str:
    def total(name: str) -> str:
        counts: Counter[str] = sum((getattr(report, name) for report in reports), Counter())
        return ", ".join(f"{count} {what}" for what, count in counts.most_common()) or "none"

    parts = [f"{name}: {total(name)}" for name in ("errors", "notes", "ignored", "skipped", "secrets")]
    parts += [f"refused: {report.path}: {report.refused}" for report in reports if report.refused]
    return "\n".join([*parts, *([f"{strangers} other files are no traces"] if strangers else [])])


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr when that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    bar = Progress(BarColumn(), DownloadColumn(), TimeRemainingColumn(), console=Console(stderr=True))
    with bar:
        task = bar.add_task("", total=total)
        yield lambda count: bar.advance(task, count)
