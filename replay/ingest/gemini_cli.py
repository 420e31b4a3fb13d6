"""Gemini CLI: a session as one JSON document, or in newer versions as lines that change it.

Of the lines, a message may be written again (the last one counts), ``$rewindTo`` takes messages back, and ``$set``
changes the metadata or puts a new list in the place of all messages. What was taken back or replaced is a
conversation of its own, as the model has seen it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from hintloop.replay.ingest.chat import content_text
from hintloop.replay.ingest.document import records_of, share, whole
from hintloop.replay.ingest.drafts import Draft, Drafts
from hintloop.replay.ingest.head import Head
from hintloop.replay.ingest.lines import Record, dumps, read_records
from hintloop.replay.ingest.report import Report
from hintloop.replay.ingest.trace import Message, ToolResult, Trace, Usage
from hintloop.replay.ingest.values import (
    arguments_of,
    dict_of,
    integer_of,
    joined,
    list_of,
    text_of,
    unix_time,
)

MAX_TRACE_BYTES = 64 << 20
_SPOKEN = frozenset(["user", "gemini"])
_NOTICES = frozenset(["info", "error", "warning"])
_FOREIGN = ("message", "payload", "uuid", "sessionId", "source", "role")
_INJECTED = ("<session_context>", "<hook_context>", "/", "?")
"""How text begins that the user did not send to the model."""
_EXIT_CODE = re.compile(r"^Exit Code: (-?\d{1,5})\s*$", re.MULTILINE)
_RAN = frozenset(["success", "error", "cancelled"])
"""States of calls that came to an end."""


@dataclass(frozen=True, slots=True)
class GeminiCli:
    """The format; see ``detect.Format``."""

    name: str = "gemini_cli"

    def sniff(self, head: Head) -> float:
        """1 for a session document, else the share of the first records that look like its own."""
        if isinstance(head.document, dict) and _is_session(head.document):
            return 1.0
        return share(head.records, _is_line)

    def read(self, stream: BinaryIO, report: Report) -> Iterator[Trace]:
        """As ``detect.Format``. One session is held in memory."""
        session = _Session(report)
        found = whole(stream)
        if found is not None and isinstance(found[0], dict) and _is_session(found[0]):
            report.note(found[1], int(bool(found[1])))
            session.open(found[0])
        else:
            for record, _, size in read_records(stream, report):
                session.line(record, size)
        yield from session.traces(self.name)


def _is_session(value: Record) -> bool:
    messages = value.get("messages")
    if not isinstance(messages, list) or not isinstance(value.get("sessionId"), str):
        return False
    return "projectHash" in value or share(messages, _is_message) > 0.5


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict) or any(name in value for name in _FOREIGN):
        return False
    kind = text_of(value.get("type"))
    return (kind in _SPOKEN or kind in _NOTICES) and ("content" in value or "toolCalls" in value)


def _is_line(value: Record) -> bool:
    opens = isinstance(value.get("sessionId"), str) and isinstance(value.get("projectHash"), str)
    changes = isinstance(value.get("$set"), dict) or isinstance(value.get("$rewindTo"), str)
    return opens or changes or (isinstance(value.get("id"), str) and _is_message(value))


@dataclass(slots=True, eq=False)
class _Entry:
    """A message of the session; ``counted`` when it is a record of its own."""

    record: Record
    size: int
    counted: bool = True
    used: bool = False


class _Session:
    """The state that the lines change, and the conversations that were left on the way."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._messages: dict[str, _Entry] = {}
        self._all: list[_Entry] = []
        self._parts: list[tuple[str, list[_Entry]]] = []
        self._numbers: Counter[str] = Counter()
        self._meta: Record = {}
        self._kept = 0

    def open(self, session: Record) -> None:
        """A whole document, or the line that begins a session."""
        self._meta.update({name: value for name, value in session.items() if name != "messages"})
        for number, message in enumerate(records_of(session.get("messages"), self._report)):
            self._message(message, text_of(message.get("id")) or f"#{number}", 0)

    def line(self, record: Record, size: int) -> None:
        """One record; counts it unless it is a message."""
        changes = record.get("$set")
        if isinstance(record.get("$rewindTo"), str):
            self._rewind(record["$rewindTo"])
        elif isinstance(record.get("id"), str) and record.get("type") is not None:
            self._message(record, record["id"], size)
        elif isinstance(changes, dict):
            self._change(changes)
        elif isinstance(record.get("sessionId"), str):
            self._report.ignore("session")
            self.open(record)
        elif _is_message(record):
            self._message(record, f"#{len(self._all)}", size)
        else:
            self._report.skip("unknown_type")

    def traces(self, source: str) -> Iterator[Trace]:
        """The conversations, the last state of the session at the end."""
        self._leave("side" if self._meta.get("kind") == "subagent" else "main", number=False)
        seen: set[str] = set()
        found = []
        for branch, entries in self._parts:
            messages = _conversation(entries, seen, self._report)
            if messages:
                found.append(Trace(source, text_of(self._meta.get("sessionId")), branch, messages))
                for entry in entries:
                    entry.used = True
            seen.update(text_of(entry.record.get("id")) for entry in entries if entry.record.get("id"))
        for entry in self._all:
            self._count(entry)
        self._report.judge()
        yield from found

    def _message(self, record: Record, key: str, size: int) -> None:
        old = self._messages.get(key)
        if old is not None and not any(old in entries for _, entries in self._parts[-1:]):
            self._kept -= old.size
            old.record = {"type": "rewritten"}
        self._kept += size
        entry = _Entry(record if self._kept <= MAX_TRACE_BYTES else {"type": "beyond_limit"}, size)
        self._messages[key] = entry
        self._all.append(entry)

    def _rewind(self, to: str) -> None:
        self._report.ignore("$rewindTo")
        keys = list(self._messages)
        at = keys.index(to) if to in self._messages else 0
        gone = [self._messages[key] for key in keys[at:]]
        if any(entry.record.get("type") == "gemini" for entry in gone):
            self._leave("rewound")
        for key in keys[at:]:
            del self._messages[key]

    def _change(self, changes: dict[str, Any]) -> None:
        self._meta.update({name: value for name, value in changes.items() if name != "messages"})
        if not isinstance(changes.get("messages"), list):
            self._report.ignore("$set")
            return
        self._report.used += 1
        self._report.note("messages_replaced")
        self._leave("before_change")
        self._messages.clear()
        for number, message in enumerate(each for each in changes["messages"] if isinstance(each, dict)):
            key = text_of(message.get("id")) or f"$set#{len(self._all)}.{number}"
            self._messages[key] = _Entry(message, 0, counted=False)

    def _leave(self, branch: str, *, number: bool = True) -> None:
        """Keep the conversation as it is now."""
        self._numbers[branch] += 1
        name = f"{branch}{self._numbers[branch]}" if number else branch
        self._parts.append((name, list(self._messages.values())))

    def _count(self, entry: _Entry) -> None:
        kind = text_of(entry.record.get("type"))
        if kind in _NOTICES or kind in ("rewritten", "beyond_limit"):
            self._report.ignore(kind)
        elif kind not in _SPOKEN or not _is_sound(entry.record):
            self._report.skip("malformed_message" if kind in _SPOKEN else "unknown_type")
        elif entry.used:
            self._report.used += 1
        else:
            self._report.ignore("conversation_without_answer")


def _is_sound(message: Record) -> bool:
    """Whether content and calls are of a form that can be read."""
    content, calls = message.get("content"), message.get("toolCalls")
    return (content is None or isinstance(content, (str, list, dict))) and (
        calls is None or isinstance(calls, list)
    )


def _conversation(entries: Sequence[_Entry], seen: set[str], report: Report) -> tuple[Message, ...]:
    copies = [text_of(entry.record.get("id")) in seen for entry in entries]
    drafts = Drafts(report if not any(copies) else Report())
    for entry, copied in zip(entries, copies, strict=True):
        if text_of(entry.record.get("type")) in _SPOKEN and _is_sound(entry.record):
            _add(drafts, entry.record, copied, Report() if copied else report)
    return drafts.finish()


def _add(drafts: Drafts, record: Record, copied: bool, report: Report) -> None:
    parts = record.get("content")
    parts = parts if isinstance(parts, list) else [parts]
    text = joined(_part_text(part, report) for part in parts)
    for part in map(dict_of, parts):
        if answer := dict_of(part.get("functionResponse")):
            drafts.answer(text_of(answer.get("id")), ToolResult(_response_text(answer)[0]))
    if record.get("type") == "user":
        if text.strip().startswith(_INJECTED):
            report.note("injected_text")
        elif text:
            drafts.say("user", text, unix_time(record.get("timestamp")), copied=copied)
        return
    draft = drafts.add(
        Draft("assistant", [text], timestamp=unix_time(record.get("timestamp")), copied=copied)
    )
    draft.model = text_of(record.get("model"))
    draft.usage = _usage(record.get("tokens"))
    thoughts = [dict_of(each) for each in list_of(record.get("thoughts"))]
    draft.thoughts = [
        joined([text_of(each.get("subject")), text_of(each.get("description"))]) for each in thoughts
    ]
    report.note("thinking", int(bool(thoughts)))
    _add_calls(drafts, draft, record, parts, report)


def _add_calls(drafts: Drafts, draft: Draft, record: Record, parts: Sequence[Any], report: Report) -> None:
    known: set[str] = set()
    for call in list_of(record.get("toolCalls")):
        if not isinstance(call, dict):
            report.note("unknown_block")
            continue
        known.add(text_of(call.get("id")))
        name = text_of(call.get("name"))
        made = drafts.call(draft, text_of(call.get("id")), name, arguments_of(call.get("args")))
        result = _result(call, report)
        if result is not None and made.result is None:
            drafts.answer_call(made, result)
    for part in map(dict_of, parts):
        given = dict_of(part.get("functionCall"))
        if given and text_of(given.get("id")) not in known:
            drafts.call(
                draft, text_of(given.get("id")), text_of(given.get("name")), arguments_of(given.get("args"))
            )


def _result(call: Record, report: Report) -> ToolResult | None:
    """What a call gave; None while it had not come to an end."""
    status, given = text_of(call.get("status")), call.get("result")
    if status == "success" and not given:
        report.note("result_not_recorded")
        return None
    if status not in _RAN and not given:
        return None
    texts, failed = [], status == "error"
    for part in given if isinstance(given, list) else [given]:
        response = dict_of(dict_of(part).get("functionResponse"))
        text, is_error = _response_text(response) if response else (_part_text(part, report), False)
        texts.append(text)
        failed |= is_error
    text = joined(texts)
    codes = _EXIT_CODE.findall(text) if "shell" in text_of(call.get("name")) else []
    return ToolResult(
        text,
        is_error=True if failed else False if status == "success" else None,
        exit_code=int(codes[-1]) if codes else None,
        refused=status == "cancelled",
    )


def _response_text(response: dict[str, Any]) -> tuple[str, bool]:
    """The text of a ``functionResponse``, and whether it is an error."""
    given = dict_of(response.get("response"))
    for name in ("error", "output"):
        if name in given:
            value = given[name]
            return (value if isinstance(value, str) else dumps(value)), name == "error" and bool(value)
    return dumps(given) if given else "", False


def _part_text(part: Any, report: Report) -> str:
    """The text of one part of a content; thoughts and calls are none."""
    if isinstance(part, str):
        return part
    part = dict_of(part)
    if part.get("thought") or "functionCall" in part or "functionResponse" in part or not part:
        return ""
    if "inlineData" in part or "fileData" in part:
        return content_text([{"type": "image"}], report)
    return content_text([part], report)


def _usage(value: Any) -> Usage | None:
    tokens = dict_of(value)
    output = (integer_of(tokens.get("output")) or 0) + (integer_of(tokens.get("thoughts")) or 0)
    return Usage(integer_of(tokens.get("input")) or 0, output) if tokens else None
