"""Chat messages in the style of OpenAI's API, as several recordings hold them.

Content is a string or a list of parts; calls are ``tool_calls``, or one ``function_call`` in older ones; a result is
a message of the role ``tool`` or ``function``.
"""

from __future__ import annotations

import re
from typing import Any

from hintloop.replay.ingest.drafts import Draft, Drafts
from hintloop.replay.ingest.lines import Record, dumps, loads
from hintloop.replay.ingest.report import Report
from hintloop.replay.ingest.trace import ToolResult
from hintloop.replay.ingest.values import (
    IMAGE,
    arguments_of,
    dict_of,
    integer_of,
    list_of,
    text_of,
    unix_time,
)

ROLES = frozenset(["system", "developer", "user", "assistant", "tool", "function"])
_SYSTEM = {"developer": "system"}
_PLACES = {"image": IMAGE, "audio": "[audio]", "file": "[file]", "document": "[document]", "video": "[video]"}
_EXIT_CODES = ("exit_code", "returncode", "return_code")
_ERROR = re.compile(r"\s*(?:error|ERROR|Error)\b ?[:(]|\s*Traceback \(most recent call last\):")
"""How a result begins that is an error without a flag."""


def is_message(value: Any) -> bool:
    """Whether a value looks like a chat message."""
    if not isinstance(value, dict) or text_of(value.get("role")) not in ROLES:
        return False
    return "content" in value or "tool_calls" in value or "function_call" in value


def add_message(drafts: Drafts, message: Record, report: Report, *, copied: bool = False) -> Draft | None:
    """Add one message, or the result that it is; None for a result and for what is no message (a skip).

    A message that its author gave the weight 0 is context only.
    """
    role = text_of(message.get("role"))
    content = message.get("content")
    if role not in ROLES or not (content is None or isinstance(content, (str, list))):
        report.skip("malformed_message" if role in ROLES else "unknown_role")
        return None
    drafts.taken += 1
    text = content_text(content, report)
    if role in ("tool", "function"):
        add_result(drafts, message, tool_result(text))
        return None
    draft = drafts.add(
        Draft(
            _SYSTEM.get(role, role),
            [text],
            timestamp=unix_time(message.get("timestamp")),
            copied=copied or (message.get("weight") == 0 and role == "assistant"),
        )
    )
    if role == "assistant":
        _add_own(drafts, draft, message, report)
    return draft


def add_result(drafts: Drafts, message: Record, result: ToolResult) -> None:
    """The result to the call whose id it names; without an id, to the oldest waiting call of its name."""
    call_id, name = text_of(message.get("tool_call_id")), text_of(message.get("name"))
    waiting = [call for call in drafts.waiting if not name or call.name == name]
    if not call_id and waiting:
        drafts.answer_call(waiting[0], result)
    else:
        drafts.answer(call_id, result)


def content_text(content: Any, report: Report) -> str:
    """The text of a message's content; what is no text leaves its kind in brackets."""
    if isinstance(content, str):
        return content
    parts = []
    for part in list_of(content):
        kind = text_of(dict_of(part).get("type"))
        place = next((place for what, place in _PLACES.items() if what in kind), None)
        if isinstance(part, str):
            parts.append(part)
        elif place is not None:
            report.note(place.strip("[]"))
            parts.append(place)
        elif isinstance(dict_of(part).get("text"), str):
            parts.append(part["text"])
        elif kind == "refusal":
            parts.append(text_of(part.get("refusal")))
        else:
            report.note("unknown_block")
    return "\n".join(part for part in parts if part)


def tool_result(text: str) -> ToolResult:
    """A result that is text alone: JSON with an exit code or an error in it says how it went."""
    found: dict[str, Any] = {}
    if text.startswith("{"):
        try:
            found = dict_of(loads(text))
        except ValueError:
            found = {}
    codes = [integer_of(found.get(name)) for name in _EXIT_CODES]
    failed = True if found.get("error") or found.get("is_error") is True else None
    if not found and _ERROR.match(text):
        failed = True
    return ToolResult(
        text, is_error=failed, exit_code=next((code for code in codes if code is not None), None)
    )


def _add_own(drafts: Drafts, draft: Draft, message: Record, report: Report) -> None:
    """What only a message of the model has: calls, thoughts."""
    draft.thoughts += [
        text_of(message.get("reasoning_content")) or text_of(message.get("reasoning")),
        *(text_of(block.get("thinking")) for block in map(dict_of, list_of(message.get("thinking_blocks")))),
    ]
    report.note("thinking", int(any(draft.thoughts)))
    draft.model = text_of(message.get("model"))
    for call in list_of(message.get("tool_calls")):
        add_call(drafts, draft, call, report)
    if old := dict_of(message.get("function_call")):
        drafts.call(draft, "", text_of(old.get("name")), arguments_of(old.get("arguments")))


def add_call(drafts: Drafts, draft: Draft, call: Any, report: Report) -> None:
    """One element of ``tool_calls``."""
    call = dict_of(call)
    function, custom = dict_of(call.get("function")), dict_of(call.get("custom"))
    if custom:
        given = dumps({"input": custom.get("input")})
    elif function or "name" in call:
        function = function or call
        given = arguments_of(function.get("arguments", function.get("args", {})))
    else:
        report.note("unknown_block")
        return
    name = text_of((function or custom).get("name"))
    drafts.call(draft, text_of(call.get("id")), name, given)
