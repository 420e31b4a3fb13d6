"""``hintloop traces show`` and ``grep``: recorded conversations, read turn by turn and searched."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hintloop.cli.errors import UserError
from hintloop.cli.options import AsJson
from hintloop.cli.recordings import JournalUri, segments

if TYPE_CHECKING:
    from hintloop.replay.episode import Episode, Turn

MAX_SHOWN_CHARS = 600
EXIT_NO_MATCH = 1
_COLOURS = {"system": "magenta", "user": "blue", "assistant": "cyan", "tool": "white"}


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
    from hintloop.replay.supplement import is_supplement

    try:
        wanted = re.compile(pattern)
    except re.error as error:
        raise UserError(f"{pattern!r} is no regular expression: {error}") from error
    matched = False
    for episodes in segments(Journal(journal)):
        own = [episode for episode in episodes if not is_supplement(episode)]
        for found in (match for episode in own for match in _matches(episode, wanted)):
            matched = True
            shown = f"{found['episode_id']}:{found['turn']}: {_short(found['line'])}"
            typer.echo(json.dumps(found) if as_json else shown)
    if not matched:
        raise typer.Exit(EXIT_NO_MATCH)


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
    """Show a recorded conversation turn by turn, with its errors, hint sites and pairs marked.

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


def _matches(episode: Episode, wanted: re.Pattern[str]) -> Iterator[dict[str, Any]]:
    for number, turn in enumerate(episode.turns):
        for text in (_recorded_arguments(episode, turn), turn.text):
            for line in text.splitlines():
                if wanted.search(line):
                    yield {"episode_id": episode.episode_id, "turn": number, "role": turn.role, "line": line}


def _recorded_arguments(episode: Episode, turn: Turn) -> str:
    """Arguments that are in no text: those of a recorded call, on its tool turn."""
    return (turn.tool_arguments or "") if turn.role == "tool" and not episode.token_ids else ""


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
    found = [e for episodes in segments(Journal(uri)) for e in episodes if e.episode_id == what]
    if not found:
        is_empty = next(segments(Journal(uri)), None) is None
        raise UserError(f"{uri} has no episode {what}" + (": there is no journal" if is_empty else ""))
    return found


def _lines(episode: Episode, *, full: bool) -> Iterator[str]:
    sites = {site.turn: site for site in episode.hint_sites}
    about = f"{episode.model or 'unknown model'}, {episode.outcome}, {len(sites)} hint sites"
    yield typer.style(f"{episode.episode_id}: {about}, {len(episode.pairs)} pairs", bold=True)
    for number, turn in enumerate(episode.turns):
        called = f" {turn.tool_name}" if turn.tool_name else ""
        exited = "" if turn.exit_code is None else f" (exit {turn.exit_code})"
        yield "\n" + typer.style(
            f"[{number}] {turn.role}{called}{exited}", fg=_COLOURS.get(turn.role), bold=True
        )
        for text in (_recorded_arguments(episode, turn), turn.text):
            if text:
                yield text if full else _short(text)
        if turn.error_kind:
            site = sites.get(number)
            hint = f"; hint site: {site.hint or 'no hint yet'}" if site else ""
            yield typer.style(
                f"!! {turn.error_cause}/{turn.error_kind}{hint}", fg="red" if site else "yellow"
            )
        for pair in episode.pairs:
            if pair.turn == number:
                action = pair.chosen_text if full else _short(pair.chosen_text)
                yield typer.style(f">> {', '.join(pair.teachers)} would rather: {action}", fg="green")
                for said in pair.others:
                    yield typer.style(f">> another said: {said if full else _short(said)}", dim=True)
    yield ""


def _short(text: str) -> str:
    left = len(text) - MAX_SHOWN_CHARS
    return text if left <= 0 else f"{text[:MAX_SHOWN_CHARS]} [... {left} characters more]"
