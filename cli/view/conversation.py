"""An episode as a conversation: each turn with its call, its tool error, and what was said of it afterwards.

A hint stands before the turn that it is about, because that is where the teacher reads it; a pair stands after
the turn, with what the agent did beside what the teachers would have done.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hintloop.cli.display import duration
from hintloop.cli.view.episodes import NotThere, Row
from hintloop.cli.view.text import as_arguments, clip, dollars, moment, name, number
from hintloop.replay.episode import NOT_SAMPLED, Episode, HintSite, PreferencePair, Turn
from hintloop.replay.export.chat import answers_to

TURNS = 100
"""Turns on one page."""
MAX_ARGUMENTS = 20
MAX_NOTES = 8
"""Hints, and pairs, of one turn that are shown."""
_CALL = re.compile(r"<tool_call>.*?(</tool_call>|$)", re.DOTALL)
_TAGS = re.compile(r"</?tool_call>|<\|im_end\|>|<\|im_start\|>")


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a call."""

    name: str
    value: str
    differs: bool = False
    """The other side of a pair has another value, or none."""

    @property
    def is_long(self) -> bool:
        """Needs lines of its own."""
        return "\n" in self.value or len(self.value) > 100


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call."""

    tool: str
    arguments: tuple[Argument, ...]
    differs: bool = False
    """The other side of a pair calls another tool."""


@dataclass(frozen=True, slots=True)
class Action:
    """What somebody did in a turn: a call when it can be read as one, and the text around it."""

    call: Call | None
    text: str


@dataclass(frozen=True, slots=True)
class Choice:
    """A preference pair."""

    chosen: Action
    rejected: Action
    teachers: str
    facts: str
    verified: bool


@dataclass(frozen=True, slots=True)
class Message:
    """One turn as it is shown."""

    number: int
    role: str
    action: Action
    raw: str
    """What was really said, where ``action`` is another way to say it."""
    error: tuple[str, str, str] | None
    """Kind, cause, message."""
    facts: tuple[str, ...]
    hints: tuple[tuple[str, str, str], ...]
    """Kind, text, and where it is put in."""
    pairs: tuple[Choice, ...]


def conversation(episode: Episode, group: Sequence[Row], *, here: int, start: int = 0) -> dict[str, Any]:
    """All that the template of an episode needs; ``group`` are the rows of its group, ``here`` its own number.

    Shows ``TURNS`` turns from ``start`` on. ``NotThere`` when the episode ends before that.
    """
    if start and start >= len(episode.turns):
        raise NotThere(f"this episode has {len(episode.turns)} turns, counted from 0")
    end = min(start + TURNS, len(episode.turns))
    return {
        "title": name(episode.episode_id),
        "task": name(episode.task_id),
        "outcome": str(episode.outcome),
        "reward": None if episode.reward is None else number(episode.reward),
        "reward_parts": [
            (name(part), number(value)) for part, value in list(episode.reward_parts.items())[:50]
        ],
        "facts": list(_facts(episode)),
        "counts": _counts(episode),
        "group": group,
        "here": here,
        "group_id": name(episode.group_id),
        "messages": [_message(episode, at) for at in range(start, end)],
        "earlier": max(start - TURNS, 0) if start else None,
        "later": end if end < len(episode.turns) else None,
        "num_turns": len(episode.turns),
        "start": start,
    }


def _facts(episode: Episode) -> Iterator[tuple[str, str]]:
    yield "played with", _versions(episode.policy_versions) or "no version of this run"
    yield "model", name(episode.model) or "unknown"
    yield "source", f"{name(episode.source)} ({name(episode.env)})" if episode.env else name(episode.source)
    yield "finished", f"{moment(episode.created_at)} UTC"
    yield "tokens", f"{len(episode.token_ids):,}, of which {sum(episode.loss_mask):,} sampled"


def _counts(episode: Episode) -> list[tuple[str, int]]:
    errors = sum(turn.error_kind is not None for turn in episode.turns)
    return [
        ("turns of the agent", sum(turn.role == "assistant" for turn in episode.turns)),
        ("tool errors", errors),
        ("hint sites", len(episode.hint_sites)),
        ("pairs", len(episode.pairs)),
    ]


def _message(episode: Episode, at: int) -> Message:
    turn = episode.turns[at]
    action = _action(turn)
    text = clip(turn.text)
    sites = [site for site in episode.hint_sites if site.turn == at][:MAX_NOTES]
    pairs = [pair for pair in episode.pairs if pair.turn == at][:MAX_NOTES]
    several = len(answers_to(episode.turns, at)) > 1
    error = None
    if turn.error_kind:
        error = name(turn.error_kind), name(turn.error_cause or "unknown"), clip(turn.error_message or "")
    return Message(
        number=at,
        role=name(turn.role),
        action=action,
        raw=text if action.call and turn.role == "assistant" else "",
        error=error,
        facts=tuple(_turn_facts(episode, turn)),
        hints=tuple((name(site.kind), clip(site.hint), _place(site)) for site in sites),
        pairs=tuple(_choice(turn, pair, several=several) for pair in pairs),
    )


def _action(turn: Turn) -> Action:
    if turn.tool_name is None:
        return Action(None, _without_tags(turn.text))
    call = _call(turn.tool_name, turn.tool_arguments)
    if turn.role != "assistant":
        return Action(call if turn.tool_arguments else None, clip(turn.text))
    around = _TAGS.sub("", _CALL.sub("", turn.text)).strip()
    return Action(call, "" if _is_json(around) else clip(around))


def _call(tool: str, arguments: str | None) -> Call:
    found = as_arguments(arguments)
    if found is None:
        return Call(name(tool), (Argument("arguments", clip(arguments or "")),))
    shown = list(found.items())[:MAX_ARGUMENTS]
    return Call(name(tool), tuple(Argument(name(key), clip(value)) for key, value in shown))


def _choice(turn: Turn, pair: PreferencePair, *, several: bool) -> Choice:
    """``several``: the turn made several calls, of which it knows but the first."""
    tool, _, arguments = pair.chosen_text.partition(" ")
    call = _call(tool, arguments) if arguments and as_arguments(arguments) is not None else None
    chosen = Action(call, "" if call else _without_tags(pair.chosen_text))
    rejected = _action(turn)
    if rejected.call is None or several:
        rejected = Action(None, _without_tags(pair.rejected_text))
    elif call is not None:
        chosen = Action(_marked(call, rejected.call), "")
        rejected = Action(_marked(rejected.call, call), rejected.text)
    cost = f", {dollars(pair.cost_usd)}" if pair.cost_usd else ""
    return Choice(
        chosen=chosen,
        rejected=rejected,
        teachers=name(", ".join(pair.teachers)) or "a teacher",
        facts="; ".join(
            (f"{pair.agreed} of {pair.asked} asked gave this action{cost}", *map(_without_tags, pair.others))
        ),
        verified=pair.verified,
    )


def _without_tags(text: str) -> str:
    return clip(_TAGS.sub("", text).strip())


def _marked(call: Call, other: Call) -> Call:
    """The call, with what differs from the other one marked, and in the order of names that both have."""
    values = {argument.name: argument.value for argument in other.arguments}
    marked = [
        Argument(each.name, each.value, differs=values.get(each.name) != each.value)
        for each in sorted(call.arguments, key=lambda each: (each.name not in values, each.name))
    ]
    return Call(call.tool, tuple(marked), differs=call.tool != other.tool)


def _turn_facts(episode: Episode, turn: Turn) -> Iterator[str]:
    if turn.exit_code is not None:
        yield f"exit code {turn.exit_code}"
    if turn.seconds >= 0.005:
        yield f"{turn.seconds:.2f} s" if turn.seconds < 60 else duration(turn.seconds)
    part = slice(max(turn.start, 0), max(turn.end, 0))
    mask = episode.loss_mask[part]
    if not any(mask):
        return
    yield f"{sum(mask)} tokens"
    scores = [score for score, bit in zip(episode.logprobs[part], mask, strict=True) if bit]
    yield f"mean log-prob {round(sum(scores) / len(scores), 2) + 0.0:.2f}"
    if versions := _versions(episode.policy_versions[part]):
        yield versions


def _versions(versions: Sequence[int]) -> str:
    found = sorted({version for version in versions if version != NOT_SAMPLED})
    if not found:
        return ""
    return f"version {found[0]}" + (f" to {found[-1]}" if len(found) > 1 else "")


def _place(site: HintSite) -> str:
    if not site.hint_ids:
        return ""
    return f"{len(site.hint_ids)} tokens at position {site.insert_at}, for the teacher only"


def _is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
