"""A scripted expert for the bugfix set: it knows the reference of every function and says the next right call.

It stands in for a stronger model where none can be reached. It sees only the chat transcript, as a real
teacher would, and keeps no state: the file is rebuilt from the tool results in the transcript.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hintloop.envs.models import ToolCall
from hintloop.envs.tasksets.bugfix.functions import Function
from hintloop.envs.tasksets.bugfix.mutations import (
    SPELLINGS,
    first_difference,
    rename,
    tokens,
    unique_fragment,
)
from hintloop.envs.tasksets.bugfix.taskset import PATH, load

_INSTRUCTION = re.compile(r": (\w+) should give: (.+)")
_NUMBERED = re.compile(r"^\d+: ?", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class _Known:
    """What the transcript shows: the file as it is now, and whether its tests passed since the last edit."""

    text: str | None = None
    passed: bool = False


def next_call(messages: Sequence[dict[str, Any]]) -> ToolCall | None:
    """The expert's next call for an OpenAI-style chat transcript; None when the task is none of this set."""
    function = _function_of(messages)
    if function is None:
        return None
    known = _Known()
    for name, arguments, output in _calls(messages):
        known = _observe(known, name, arguments, output)
    if known.text is None:
        return ToolCall(name="read_file", arguments={"path": PATH})
    fix = next_fix(known.text, "\n".join(rename(function.lines, _spelling(function, known.text))))
    return fix or ToolCall(name="submit" if known.passed else "run_tests")


def next_fix(text: str, wanted: str) -> ToolCall | None:
    """The edit that mends the first wrong line of ``text``; None when it equals ``wanted``."""
    return next(iter(fixes(text, wanted)), None)


def fixes(text: str, wanted: str) -> list[ToolCall]:
    """One call per wrong line of ``text``, in the order of lines; a single rewrite where lines do not match up."""
    current, reference = text.rstrip("\n").split("\n"), wanted.split("\n")
    rewrite = [ToolCall(name="write_file", arguments={"path": PATH, "content": wanted})]
    if len(current) != len(reference):
        return rewrite
    calls = []
    for number, (have, want) in enumerate(zip(current, reference, strict=True), 1):
        if have != want:
            mutation = first_difference(have, want)
            old, new = unique_fragment(have, mutation) if mutation else (have, want)
            if not old:
                return rewrite
            calls.append(edit_call(number, old, new))
    return calls


def edit_call(line: int, old: str, new: str) -> ToolCall:
    """An ``edit_file`` call with its arguments in the order in which the student writes them."""
    return ToolCall(name="edit_file", arguments={"path": PATH, "line": line, "old": old, "new": new})


def _function_of(messages: Sequence[dict[str, Any]]) -> Function | None:
    for message in messages:
        match = _INSTRUCTION.search(message.get("content") or "") if message["role"] == "user" else None
        if match:
            wanted = (match[1], match[2].strip())
            return next((f for f in load().functions.values() if (f.name, f.intent) == wanted), None)
    return None


def _calls(messages: Sequence[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Every call of the transcript with its arguments and its result."""
    pending: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "assistant":
            pending = [call["function"] for call in message.get("tool_calls") or []]
        elif message["role"] == "tool" and pending:
            call = pending.pop(0)
            try:
                arguments = json.loads(call["arguments"])
            except ValueError:
                continue
            if isinstance(arguments, dict):
                yield call["name"], arguments, message.get("content") or ""


def _observe(known: _Known, name: str, arguments: dict[str, Any], output: str) -> _Known:
    if output.startswith("error: "):
        return known
    if name == "read_file" and arguments.get("path") == PATH:
        return replace(known, text=_NUMBERED.sub("", output))
    if name == "write_file" and arguments.get("path") == PATH:
        return _Known(text=str(arguments.get("content", "")))
    if name == "edit_file" and known.text is not None:
        return _Known(text=_edited(known.text, arguments))
    if name == "run_tests":
        return replace(known, passed="FAIL" not in output)
    return known


def _edited(text: str, arguments: dict[str, Any]) -> str:
    old, new, line = str(arguments.get("old", "")), str(arguments.get("new", "")), arguments.get("line")
    if line is None:
        return text.replace(old, new, 1)
    lines = text.split("\n")
    if isinstance(line, int) and 1 <= line <= len(lines):
        lines[line - 1] = lines[line - 1].replace(old, new, 1)
    return "\n".join(lines)


def _spelling(function: Function, text: str) -> dict[str, str]:
    """How the variables of ``function`` are spelled in ``text``."""
    used = {token.text for line in function.lines for token in tokens(line)}
    present = {token.text for line in text.split("\n") for token in tokens(line)}
    return {
        name: next((spelling for spelling in choices if spelling in present), name)
        for name, choices in SPELLINGS.items()
        if name in used
    }
