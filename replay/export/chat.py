"""The turns of an episode as chat messages."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from hintloop.replay.episode import Episode, Turn

ChatMessage = dict[str, Any]


def messages_of(episode: Episode) -> list[ChatMessage | None]:
    """A message for each turn; None for the turn of a call that got no result.

    Text with tokens is what the model wrote, with its calls inside of it. In a recording the calls stand in the
    tool turns, and become ``tool_calls``; arguments that are no object become one with the field ``input``.
    """
    recorded = not episode.token_ids
    found: list[ChatMessage | None] = []
    for number, turn in enumerate(episode.turns):
        if turn.role == "tool" and recorded and turn.tool_name and turn.error_message is not None:
            found.append(None)
            continue
        message: ChatMessage = {"role": turn.role, "content": turn.text}
        if turn.role == "assistant" and recorded and (calls := _calls(episode.turns, number)):
            message["tool_calls"] = calls
        elif turn.role == "tool" and turn.tool_name:
            message["name"] = turn.tool_name
        found.append(message)
    return found


def answers_to(turns: Sequence[Turn], number: int) -> Sequence[Turn]:
    """The tool turns behind an assistant turn."""
    end = number + 1
    while end < len(turns) and turns[end].role == "tool":
        end += 1
    return turns[number + 1 : end]


def arguments_object(text: str | None) -> dict[str, Any]:
    """Arguments of a call as an object; what is no JSON object is its field ``input``."""
    try:
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite) if text else {}
    except (ValueError, RecursionError):
        value = text
    return value if isinstance(value, dict) else {"input": value}


def actions_of(text: str) -> list[tuple[str, dict[str, Any]]] | None:
    """Tools and arguments of a turn as pairs hold it: for each call a line with the name, a blank, and a JSON object.
    None for other text."""
    found = [_action_of(line) for line in text.split("\n")]
    known = [action for action in found if action is not None]
    return known if len(known) == len(found) else None


def _action_of(text: str) -> tuple[str, dict[str, Any]] | None:
    name, _, given = text.partition(" {")
    try:
        arguments = json.loads(f"{{{given}") if name else None
    except (ValueError, RecursionError):
        return None
    return (name, arguments) if isinstance(arguments, dict) else None


def _refuse(name: str) -> float:
    """NaN and infinity are not JSON, though Python reads them."""
    raise ValueError(name)


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse(text)


def text_message(text: str) -> ChatMessage:
    """What the model says, as a message."""
    return {"role": "assistant", "content": text}


def calls_message(actions: Sequence[tuple[str, dict[str, Any]]]) -> ChatMessage:
    """Calls of the model, tool and arguments each, as a message."""
    return {"role": "assistant", "content": "", "tool_calls": [_call(*action) for action in actions]}


def _calls(turns: Sequence[Turn], number: int) -> list[dict[str, Any]]:
    return [
        _call(turn.tool_name, arguments_object(turn.tool_arguments))
        for turn in answers_to(turns, number)
        if turn.tool_name
    ]


def _call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}
