"""``hintloop traces``: recordings of other agents into a journal, and from there to a learner."""

from __future__ import annotations

import gc
import json
import re
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

if TYPE_CHECKING:
    from hintloop.replay.episode import Episode, Turn
    from hintloop.replay.ingest.report import Report
    from hintloop.replay.journal import Journal

app = typer.Typer(no_args_is_help=True, help="Recorded traces of other agents.")

JournalUri = Annotated[str, typer.Option("--journal", metavar="URI", help="Journal of recorded episodes.")]
MAX_SHOWN_CHARS = 600
MAX_NAME_CHARS = 20
EXIT_REFUSED = 1
EXIT_NO_MATCH = 1


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

    gc.freeze()  # what is loaded by now stays; passing over it again and again costs a tenth of the time
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
    """Write recorded episodes as tokens of a model, with hints at the turns that failed.

    A recording has neither reward nor log-probabilities: it trains by its hints alone.
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
    counts: Counter[str] = Counter(episodes=0, known_already=0, tokens=0, sites=0)
    for episodes in _segments(source):
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
            counts["sites"] += len(result.episode.hint_sites)
        if made:
            writer.append(made)
        counts["episodes"] += len(made)
    show([{"what": what, "count": count} for what, count in counts.items()], as_json=as_json)


@app.command()
def export(
    journal: JournalUri,
    to: Annotated[str, typer.Option("--to", metavar="FOLDER", help="Folder that gets the files.")],
    format: Annotated[ExportFormat, typer.Option("--format", help="A data set for TRL, or trajectories.")],
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

    segments = _segments(Journal(journal))
    counts = export_hf(segments, Path(to)) if format is ExportFormat.HF else export_atif(segments, to)
    show([{"what": what, "count": count} for what, count in counts.items()], as_json=as_json)


@app.command()
def grep(
    pattern: Annotated[str, typer.Argument(metavar="PATTERN", help="Regular expression of Python.")],
    journal: JournalUri,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object per line.")] = False,
) -> None:
    """Search the texts of all turns, and the arguments of recorded calls, line by line.

    Prints episode, turn and the line. The exit status is 1 when nothing matches.
    Example: `hintloop traces grep "command not found" --journal runs/recorded`
    """
    from hintloop.replay.journal import Journal

    try:
        wanted = re.compile(pattern)
    except re.error as error:
        raise UserError(f"{pattern!r} is no regular expression: {error}") from error
    matched = False
    for episodes in _segments(Journal(journal)):
        for found in (match for episode in episodes for match in _matches(episode, wanted)):
            matched = True
            shown = f"{found['episode_id']}:{found['turn']}: {_short(found['line'])}"
            typer.echo(json.dumps(found) if as_json else shown)
    if not matched:
        raise typer.Exit(EXIT_NO_MATCH)


@app.command("show")
def show_trace(
    what: Annotated[str, typer.Argument(metavar="EPISODE|FILE", help="An episode's id, or a trace file.")],
    journal: Annotated[
        str | None, typer.Option("--journal", metavar="URI", help="Journal of the episode.")
    ] = None,
    keep_secrets: Annotated[
        bool, typer.Option("--keep-secrets", help="Of a file, show secrets too.")
    ] = False,
    full: Annotated[bool, typer.Option("--full", help="Do not shorten long texts.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show a recorded conversation turn by turn, with its errors and hint sites.

    Example: `hintloop traces show session.jsonl`
    """
    from hintloop.cli.output import show_json

    found = _episodes_of(what, journal, keep_secrets=keep_secrets)
    if as_json:
        show_json([episode.plain() for episode in found])
        return
    for episode in found:
        for line in _lines(episode, full=full):
            typer.echo(line)


@app.command()
def stats(journal: JournalUri, as_json: AsJson = False) -> None:
    """Count a journal's episodes by source and outcome, and their errors by cause and kind.

    Example: `hintloop traces stats --journal runs/recorded --json`
    """
    from hintloop.cli.output import show, show_json
    from hintloop.replay.journal import Journal

    groups: dict[tuple[str, str], Counter[str]] = {}
    errors: Counter[tuple[str, str, str]] = Counter()
    for episodes in _segments(Journal(journal)):
        for episode in episodes:
            groups.setdefault((episode.source, str(episode.outcome)), Counter()).update(_numbers(episode))
            failed = [turn for turn in episode.turns if turn.error_kind]
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


def _matches(episode: Episode, wanted: re.Pattern[str]) -> Iterator[dict[str, Any]]:
    for number, turn in enumerate(episode.turns):
        for text in (_recorded_arguments(episode, turn), turn.text):
            for line in text.splitlines():
                if wanted.search(line):
                    yield {"episode_id": episode.episode_id, "turn": number, "role": turn.role, "line": line}


def _recorded_arguments(episode: Episode, turn: Turn) -> str:
    """Arguments that are in no text: those of a recorded call, on its tool turn."""
    return (turn.tool_arguments or "") if turn.role == "tool" and not episode.token_ids else ""


def _numbers(episode: Episode) -> dict[str, int]:
    return {
        "episodes": 1,
        "turns": sum(turn.role == "assistant" for turn in episode.turns),
        "calls": sum(turn.role == "tool" for turn in episode.turns),
        "tokens": len(episode.token_ids),
        "sites": len(episode.hint_sites),
    }


def _segments(journal: Journal) -> Iterator[list[Episode]]:
    """The segments that can be read; the journal warns of others."""
    reader = journal.reader()
    while segment := reader.poll_segment():
        yield segment.episodes


def _episodes_of(what: str, uri: str | None, *, keep_secrets: bool) -> list[Episode]:
    from hintloop.replay.ingest.episodes import to_episode
    from hintloop.replay.ingest.ingest import read_traces
    from hintloop.replay.ingest.report import Report
    from hintloop.replay.journal import Journal

    if Path(what).is_file():
        report, seen = Report(path=what), set[bytes]()
        traces = read_traces(Path(what), report, keep_secrets=keep_secrets)
        return [to_episode(trace, seen, report) for trace in traces]
    if uri is None:
        raise UserError(f"there is no file {what}; an episode needs the --journal that it is in")
    found = [e for episodes in _segments(Journal(uri)) for e in episodes if e.episode_id == what]
    if not found:
        raise UserError(f"{uri} has no episode {what}")
    return found


def _lines(episode: Episode, *, full: bool) -> Iterator[str]:
    sites = {site.turn: site for site in episode.hint_sites}
    yield f"{episode.episode_id}: {episode.model or 'unknown model'}, {episode.outcome}, {len(sites)} hint sites"
    for number, turn in enumerate(episode.turns):
        called = f" {turn.tool_name}" if turn.tool_name else ""
        yield f"\n[{number}] {turn.role}{called}{'' if turn.exit_code is None else f' (exit {turn.exit_code})'}"
        for text in (_recorded_arguments(episode, turn), turn.text):
            if text:
                yield text if full else _short(text)
        if turn.error_kind:
            site = sites.get(number)
            hint = f"; hint site: {site.hint or 'no hint yet'}" if site else ""
            yield f"!! {turn.error_cause}/{turn.error_kind}{hint}"
    yield ""


def _short(text: str) -> str:
    left = len(text) - MAX_SHOWN_CHARS
    return text if left <= 0 else f"{text[:MAX_SHOWN_CHARS]} [... {left} characters more]"


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
