"""A recorded episode as a teacher is shown it: chat messages, tools, and the turns that are worth a question.

A recording does not say what tools there were, so they are told from the calls in it. What a teacher is asked
depends on that one episode alone: the same recording gives the same questions wherever it is stored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hintloop.envs.models import ToolCall
from hintloop.replay.episode import Episode, Turn
from hintloop.replay.export.chat import answers_to, arguments_object
from hintloop.replay.ingest.episodes import NO_RESULT
from hintloop.replay.supplement import state_keys
from hintloop.rollout.asking import AskRule, Reason, Uncertainty, planned

SYSTEM_PROMPT = (
    "You are a coding agent in the middle of a task. You see the transcript so far. Make the next tool call: the one "
    "that brings the task forward best."
)
"""Opens the messages of a recording that has no system prompt of its own."""
CHARS_PER_TOKEN = 4
CountTokens = Callable[[str], int]
_TYPES = (
    (bool, "boolean"),
    (int, "integer"),
    (float, "number"),
    (str, "string"),
    (list, "array"),
    (dict, "object"),
)
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]")
_NAME_CHARS = 64
_CALL = "call_"


@dataclass(frozen=True, slots=True)
class State:
    """A recorded turn to ask about."""

    turn: int
    """Index into ``Episode.turns``."""
    key: str
    reason: Reason


class Recording:
    """One recorded episode, which has text and no tokens; ``system_prompt`` is for one that has none."""

    def __init__(self, episode: Episode, *, system_prompt: str | None = SYSTEM_PROMPT) -> None:
        self.episode = episode
        self._system_prompt = system_prompt
        names = {turn.tool_name for turn in episode.turns if turn.role == "tool" and turn.tool_name}
        self._safe = _safe_names(names)
        self._recorded = {safe: name for name, safe in self._safe.items()}
        self.tools = _tools(episode.turns, self._safe)
        """Plain function specs: ``{"name", "description", "parameters"}``."""

    def states(self, rule: AskRule) -> list[State]:
        """The turns with a call that ``rule`` asks about; an error is one that is a hint site.

        ``ValueError`` for a rule by uncertainty: a recording has no log-probabilities.
        """
        if rule.ask == "uncertain":
            raise ValueError(
                "teachers.ask is uncertain, but a recording has no log-probabilities; errors or all"
            )
        keys, failed = state_keys(self.episode.turns), {site.turn for site in self.episode.hint_sites}
        found, uncertainty = list[State](), Uncertainty()
        for number, turn in enumerate(keys):
            plan = planned(rule, uncertainty, self.episode.episode_id, number, ())
            reason = Reason.ERROR if turn in failed else plan
            if reason is not None and len(found) < rule.max_asks and self.calls(turn):
                found.append(State(turn, keys[turn], reason))
        return found

    def calls(self, turn: int) -> list[ToolCall]:
        """What the agent did in an assistant turn."""
        answers = answers_to(self.episode.turns, turn)
        return [
            ToolCall(name=each.tool_name, arguments=_arguments(each)) for each in answers if each.tool_name
        ]

    def messages(self, turn: int) -> list[dict[str, Any]]:
        """The transcript before a turn in the OpenAI chat form; every call in it has its result behind it."""
        turns, prompt = self.episode.turns, self._system_prompt
        own = prompt is None or any(each.role == "system" for each in turns[:turn])
        told = [] if own else [_said("system", prompt or "")]
        for number, each in enumerate(turns[:turn]):
            if each.role == "assistant":
                told += self._assistant(number)
            elif each.role != "tool":
                told.append(_said(each.role, each.text))
        return told

    def recorded_call(self, call: ToolCall) -> ToolCall:
        """A teacher's call with the tool's name as it was recorded."""
        return call.model_copy(update={"name": self._recorded.get(call.name, call.name)})

    def _assistant(self, number: int) -> Iterator[dict[str, Any]]:
        turn, answers = self.episode.turns[number], answers_to(self.episode.turns, number)
        named = [each for each in answers if each.tool_name]
        calls = [
            {
                "id": f"{_CALL}{number}_{place}",
                "type": "function",
                "function": {
                    "name": self._safe[each.tool_name or ""],
                    "arguments": json.dumps(_arguments(each)),
                },
            }
            for place, each in enumerate(named)
        ]
        if turn.text or calls:
            yield {**_said("assistant", turn.text), **({"tool_calls": calls} if calls else {})}
        for call, each in zip(calls, named, strict=True):
            text = NO_RESULT if each.error_message == NO_RESULT else each.text
            yield {"role": "tool", "tool_call_id": call["id"], "content": text}
        # The result of what could not be read as a call; a tool message needs one.
        yield from (_said("user", each.text) for each in answers if not each.tool_name and each.text)


def turn_of(message: Mapping[str, Any]) -> int | None:
    """Which turn of its episode a message with calls is."""
    calls = message.get("tool_calls")
    return int(calls[0]["id"].removeprefix(_CALL).partition("_")[0]) if calls else None


def cut_history(
    messages: Sequence[dict[str, Any]], max_tokens: int | None, count: CountTokens | None = None
) -> list[dict[str, Any]] | None:
    """At most ``max_tokens`` of a transcript: its opening, and as many of the last messages as fit.

    The opening is all before the first assistant message, and stays whole; so do a call and its results. None when
    not even the opening and the last of these fit. ``count`` gives the tokens of a text; without it four characters
    are one.
    """
    if max_tokens is None:
        return list(messages)
    measure = count or (lambda text: -(-len(text) // CHARS_PER_TOKEN))
    sizes = [_size(each, measure) for each in messages]
    first = next((at for at, each in enumerate(messages) if each["role"] == "assistant"), len(messages))
    left, kept = max_tokens - sum(sizes[:first]), len(messages)
    for start in range(len(messages) - 1, first - 1, -1):
        if messages[start]["role"] != "tool":
            left -= sum(sizes[start:kept])
            if left < 0:
                break
            kept = start
    if left < 0 and kept == len(messages):
        return None
    return [*messages[:first], *messages[kept:]]


def _size(message: Mapping[str, Any], measure: CountTokens) -> int:
    calls = message.get("tool_calls")
    return measure(str(message["content"])) + (measure(json.dumps(calls)) if calls else 0)


def _said(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def _arguments(turn: Turn) -> dict[str, Any]:
    return arguments_object(turn.tool_arguments)


def _safe_names(names: set[str]) -> dict[str, str]:
    """Names that chat APIs take, by recorded name; no two are the same."""
    safe: dict[str, str] = {}
    for name in sorted(names):
        plain, number = _UNSAFE.sub("_", name)[:_NAME_CHARS], 1
        made = plain
        while made in safe.values():
            number += 1
            made = f"{plain[: _NAME_CHARS - 4]}_{number}"
        safe[name] = made
    return safe


def _tools(turns: Sequence[Turn], names: Mapping[str, str]) -> list[dict[str, Any]]:
    """A spec for each tool: all arguments that it was ever given; those of every call that worked are required."""
    given: dict[str, dict[str, set[str]]] = {name: {} for name in names}
    worked: dict[str, list[set[str]]] = {name: [] for name in names}
    for number, turn in enumerate(turns):
        if turn.role != "assistant":
            continue
        for call in answers_to(turns, number):
            if not call.tool_name:
                continue
            arguments = _arguments(call)
            for argument, value in arguments.items():
                given[call.tool_name].setdefault(argument, set()).add(_type_of(value))
            if turn.error_kind is None:
                worked[call.tool_name].append(set(arguments))
    return [
        {
            "name": safe,
            "description": f"The agent's tool {name}.",
            "parameters": {
                "type": "object",
                "properties": {argument: _schema(types) for argument, types in sorted(given[name].items())},
                "required": sorted(set.intersection(*worked[name])) if worked[name] else [],
            },
        }
        for name, safe in sorted(names.items())
    ]


def _type_of(value: Any) -> str:
    return next((name for kind, name in _TYPES if isinstance(value, kind)), "null")


def _schema(types: set[str]) -> dict[str, Any]:
    known = types - {"null"}
    if len(known) != 1:
        return {}
    (name,) = known
    return {"type": name, "items": {}} if name == "array" else {"type": name}
