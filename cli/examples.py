"""Prints an episode so that a person can follow it: what was called, what went wrong, what the hint was."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hintloop.replay.episode import Episode, HintSite, Outcome, PreferencePair, Turn

MAX_LINES = 14
"""Lines of one message that are shown."""
_NAME = re.compile(r"(before|after)-v\d+-(.+-t.+)-(\d+)\.json")


def describe(episode: Episode) -> str:
    """The episode as text, turn by turn."""
    sites = {site.turn: site for site in episode.hint_sites}
    pairs = {pair.turn: pair for pair in episode.pairs}
    versions = sorted({version for version in episode.policy_versions if version >= 0})
    played = (
        "version " + (f"{versions[0]}" if len(versions) == 1 else f"{versions[0]} to {versions[-1]}")
        if versions
        else ""
    )
    lines = [
        f"{episode.episode_id}: task {episode.task_id}, {played}, {episode.outcome}, reward {episode.reward}"
    ]
    for index, turn in enumerate(episode.turns):
        lines += _turn(turn, sites.get(index), pairs.get(index))
    return "\n".join(lines)


def changed_examples(folder: Path) -> tuple[Episode, Episode] | None:
    """Two attempts at one held-out task, failed before and solved after the run; None when none is kept."""
    found: dict[tuple[str, str], dict[str, Path]] = {}
    for path in sorted(folder.glob("*.json")):
        if match := _NAME.fullmatch(path.name):
            found.setdefault((match[2], match[3]), {})[match[1]] = path
    for both in found.values():
        if len(both) == 2:
            before, after = load_episode(both["before"]), load_episode(both["after"])
            if _tells(before, after):
                return before, after
    return None


def load_episode(path: Path) -> Episode:
    """An episode that was written as JSON. ``ValueError`` or ``TypeError`` when it is none."""
    raw: dict[str, Any] = json.loads(path.read_text())
    raw["turns"] = tuple(Turn(**turn) for turn in raw["turns"])
    raw["hint_sites"] = tuple(HintSite(**site) for site in raw["hint_sites"])
    raw["pairs"] = tuple(PreferencePair(**pair) for pair in raw["pairs"])
    raw["outcome"] = Outcome(raw["outcome"])
    return Episode(**raw)


def _tells(before: Episode, after: Episode) -> bool:
    """Whether the two show something: an error that got a hint, and success in the end."""
    same = before.task_id == after.task_id
    return (
        same
        and bool(before.hint_sites)
        and before.outcome is not Outcome.SOLVED
        and after.outcome is Outcome.SOLVED
    )


def _turn(turn: Turn, site: HintSite | None, pair: PreferencePair | None) -> Iterator[str]:
    if turn.role != "assistant":
        yield from _block(f"  {turn.role}: ", turn.text)
        return
    yield from _block("  agent: ", _call(turn))
    if turn.error_kind:
        yield f"    ! tool error {turn.error_kind} (cause: {turn.error_cause})"
    if site is not None:
        yield f"    > hint before this turn, for the teacher's eyes only: {' '.join(site.hint.split())}"
    if pair is not None:
        said = ", ".join(pair.teachers)
        yield from _block(f"    > {said} would rather: ", _without_tags(pair.chosen_text))


def _call(turn: Turn) -> str:
    if turn.tool_name is None:
        return _without_tags(turn.text)
    try:
        arguments = json.loads(turn.tool_arguments or "{}")
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        return f"{turn.tool_name}({turn.tool_arguments})"
    return f"{turn.tool_name}({', '.join(f'{name}={value!r}' for name, value in arguments.items())})"


def _without_tags(text: str) -> str:
    return re.sub(r"</?tool_call>|<\|im_end\|>", "", text).strip()


def _block(head: str, text: str) -> Iterator[str]:
    """Text after a head, further lines indented to it, long ones cut in the middle."""
    lines = text.strip().splitlines() or [""]
    if len(lines) > MAX_LINES:
        cut = MAX_LINES // 2
        lines = [*lines[:cut], f"... {len(lines) - 2 * cut} more lines ...", *lines[-cut:]]
    indent = " " * len(head)
    for number, line in enumerate(lines):
        yield (head if number == 0 else indent) + line
