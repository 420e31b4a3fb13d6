"""Codex CLI: rollout files of ``{timestamp, type, payload}`` lines, and the bare lines of before September 2025.

What the model saw and said are the ``response_item`` records, in order; ``event_msg`` records mirror them and are
not read. Neighbouring items of the model are one message, as they came from one answer. A compaction starts a
new conversation with what replaced the old one. Text that the tool puts into the user's mouth is left out.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from hintloop.replay.ingest.head import Head
from hintloop.replay.ingest.lines import Record, dumps, loads, read_records, reread
from hintloop.replay.ingest.report import Report
from hintloop.replay.ingest.trace import Message, ToolCall, ToolResult, Trace, Usage
from hintloop.replay.ingest.values import (
    IMAGE,
    arguments_of,
    dict_of,
    integer_of,
    joined,
    list_of,
    seconds_of,
    text_of,
    unix_time,
)

MAX_TRACE_BYTES = 64 << 20
"""Records of one conversation beyond this are left out; no context of a model is that long."""
_TYPES = frozenset(
    [
        "session_meta",
        "turn_context",
        "response_item",
        "event_msg",
        "compacted",
        "world_state",
        "inter_agent_communication",
    ]
)
_STATE_ONLY = _TYPES - {"session_meta", "turn_context", "response_item", "compacted"}
_CALLS = {"function_call": "arguments", "custom_tool_call": "input", "local_shell_call": "action",
          "tool_search_call": "arguments"}  # fmt: skip
"""Items that are calls, and the field with what was called."""
_ITEMS = frozenset(
    ["message", "reasoning", "web_search_call", *_CALLS, *(f"{name}_output" for name in _CALLS)]
)
_INJECTED = ("<environment_context>", "<user_instructions>", "<permissions instructions>", "<turn_context>")
_EXIT_CODE = re.compile(r"^(?:Exit code:|Process exited with code) (-?\d{1,5})\b", re.MULTILINE)
_WALL_TIME = re.compile(r"^Wall time: ([\d.]{1,12}) seconds", re.MULTILINE)
_HEADER_CHARS = 400


@dataclass(frozen=True, slots=True)
class Codex:
    """The format; see ``detect.Format``."""

    name: str = "codex"

    def sniff(self, head: Head) -> float:
        """Share of the first records that look like its own."""
        known = sum(_item_of(record) is not None for record in head.records)
        return known / len(head.records) if head.records else 0.0

    def read(self, stream: BinaryIO, report: Report) -> Iterator[Trace]:
        """As ``detect.Format``. The file is read twice: once to see whether it is sound."""
        places = array("q")
        for record, start, size in read_records(stream, report):
            if _is_used(record, report):
                places.extend((start, size))
        report.judge()
        yield from _Reader(self.name, report).read(
            reread(stream, places[at], places[at + 1]) for at in range(0, len(places), 2)
        )


def _item_of(record: Record) -> tuple[str, dict[str, Any]] | None:
    """Type and payload of a record in either layout; None for a record of another format."""
    kind = text_of(record.get("type"))
    if kind in _TYPES and isinstance(record.get("payload"), dict):
        return kind, record["payload"]
    if record.get("record_type") == "state":
        return "world_state", record
    if kind in _ITEMS and "payload" not in record and "message" not in record and "sessionId" not in record:
        return "response_item", record
    if not kind and isinstance(record.get("id"), str) and "timestamp" in record and "instructions" in record:
        return "session_meta", record
    return None


def _is_used(record: Record, report: Report) -> bool:
    """Whether a record is part of a conversation; counts it either way."""
    item = _item_of(record)
    if item is None:
        report.skip("unknown_type")
        return False
    kind, payload = item
    inner = text_of(payload.get("type"))
    if kind in _STATE_ONLY:
        report.ignore(f"{kind}:{inner}" if inner else kind)
    elif kind == "response_item" and inner not in _ITEMS:
        report.ignore(f"response_item:{inner or 'other'}")
    else:
        report.used += 1
        return True
    return False


@dataclass(slots=True)
class _Draft:
    """A message that is still growing."""

    role: str
    timestamp: float | None
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[_DraftCall] = field(default_factory=list)
    model: str = ""
    usage: Usage | None = None

    def message(self) -> Message:
        calls = tuple(ToolCall(c.call_id, c.name, c.arguments, c.result) for c in self.calls)
        return Message(
            self.role,
            joined(self.texts),
            calls,
            joined(self.thoughts),
            self.timestamp,
            self.model,
            self.usage,
        )


@dataclass(slots=True)
class _DraftCall:
    call_id: str
    name: str
    arguments: str
    result: ToolResult | None = None


class _Reader:
    """Turns the records of one file into conversations."""

    def __init__(self, source: str, report: Report) -> None:
        self._source, self._report = source, report
        self._session, self._model, self._segment, self._taken = "", "", 0, 0
        self._versions: dict[str, None] = {}
        self._drafts: list[_Draft] = []
        self._open: dict[str, _DraftCall] = {}

    def read(self, records: Iterable[Record]) -> Iterator[Trace]:
        for record in records:
            item = _item_of(record)
            assert item is not None, "only records that were recognised are read again"
            kind, payload = item
            timestamp = unix_time(record.get("timestamp"))
            if kind == "session_meta":
                self._start(payload, timestamp)
            elif kind == "turn_context":
                self._model = text_of(payload.get("model")) or self._model
            elif kind == "compacted":
                yield from self._finish()
                self._compacted(payload, timestamp)
            else:
                self._add(payload, timestamp)
        yield from self._finish()

    def _start(self, meta: dict[str, Any], timestamp: float | None) -> None:
        version = text_of(meta.get("cli_version"))
        if version:
            self._versions[version] = None
        if self._session:
            self._report.note("copied_from_another_session")  # a sub-agent's file starts with its parent's
            return
        self._session = text_of(meta.get("id"))
        if instructions := text_of(meta.get("instructions")):
            self._drafts.append(_Draft("system", timestamp, [instructions]))

    def _finish(self) -> Iterator[Trace]:
        messages = [draft.message() for draft in self._drafts]
        self._report.note(
            "call_without_result", sum(call.result is None for each in messages for call in each.calls)
        )
        self._drafts, self._taken = [], 0
        self._open.clear()
        kept = tuple(message for message in messages if message.text or message.calls)
        self._report.note("empty_message", len(messages) - len(kept))
        if any(message.role == "assistant" for message in kept):
            branch = f"part{self._segment}" if self._segment else "main"
            yield Trace(self._source, self._session, branch, kept, tuple(self._versions))
        elif kept:
            self._report.note("conversation_without_answer")

    def _compacted(self, payload: dict[str, Any], timestamp: float | None) -> None:
        self._segment += 1
        self._report.note("compaction")
        replaced = list_of(payload.get("replacement_history"))
        for item in map(dict_of, replaced):
            self._add(item, timestamp)
        if not replaced and (summary := text_of(payload.get("message"))):
            self._drafts.append(_Draft("user", timestamp, [summary]))

    def _add(self, item: dict[str, Any], timestamp: float | None) -> None:
        kind = text_of(item.get("type"))
        if self._taken > MAX_TRACE_BYTES:
            self._report.note("items_beyond_limit")
        elif kind == "message":
            self._add_message(item, timestamp)
        elif kind == "reasoning":
            self._report.note("thinking")
            self._answer(timestamp).thoughts.append(_texts(item.get("summary"), self._report))
        elif kind in _CALLS:
            self._add_call(kind, item, timestamp)
        elif kind.endswith("_output"):
            self._add_result(item)
        else:
            self._report.note(kind)  # a web search is run by the provider: no call that could be repeated

    def _answer(self, timestamp: float | None) -> _Draft:
        """The message of the model that is being written: a new one once a result or a user's word came."""
        last = self._drafts[-1] if self._drafts else None
        if last is None or last.role != "assistant" or any(call.result for call in last.calls):
            self._drafts.append(_Draft("assistant", timestamp, model=self._model))
        return self._drafts[-1]

    def _add_message(self, item: dict[str, Any], timestamp: float | None) -> None:
        role = {"developer": "system"}.get(text_of(item.get("role")), text_of(item.get("role")))
        text = _texts(item.get("content"), self._report)
        self._taken += len(text)
        if role == "assistant":
            self._answer(timestamp).texts.append(text)
        elif role in ("user", "system"):
            if text.lstrip().startswith(_INJECTED):
                self._report.note("injected_text")
            else:
                self._drafts.append(_Draft(role, timestamp, [text]))
        else:
            self._report.note("unknown_role")

    def _add_call(self, kind: str, item: dict[str, Any], timestamp: float | None) -> None:
        call_id = text_of(item.get("call_id")) or text_of(item.get("id"))
        given = item.get(_CALLS[kind])
        arguments = dumps({"input": given}) if kind == "custom_tool_call" else arguments_of(given)
        call = _DraftCall(call_id, text_of(item.get("name")) or kind.removesuffix("_call"), arguments)
        self._taken += len(arguments)
        self._answer(timestamp).calls.append(call)
        if call_id in self._open:
            self._report.note("repeated_call_id")
        self._open[call_id] = call

    def _add_result(self, item: dict[str, Any]) -> None:
        call = self._open.get(text_of(item.get("call_id")))
        if call is None:
            self._report.note("result_without_call")
        elif call.result is not None:
            self._report.note("repeated_result")
        else:
            call.result = _result(item.get("output"), self._report)
            self._taken += len(call.result.text)


def _result(output: Any, report: Report) -> ToolResult:
    """A result in any of its forms: plain text, JSON in a string, an object or a list of parts."""
    if isinstance(output, str) and output.startswith("{") and '"metadata"' in output:
        try:
            parsed = dict_of(loads(output))
        except ValueError:
            parsed = {}
        if isinstance(parsed.get("output"), str):
            meta = dict_of(parsed.get("metadata"))
            return ToolResult(
                parsed["output"],
                exit_code=integer_of(meta.get("exit_code")),
                seconds=seconds_of(meta.get("duration_seconds")),
            )
    flag = None
    if isinstance(output, dict):
        flag = False if output.get("success") is True else True if output.get("success") is False else None
        output = output.get("content")
    text = output if isinstance(output, str) else _texts(output, report)
    header = text[:_HEADER_CHARS].split("\nOutput:", 1)[0]
    code, wall = _EXIT_CODE.search(header), _WALL_TIME.search(header)
    return ToolResult(
        text,
        is_error=flag,
        exit_code=int(code[1]) if code else None,
        seconds=float(wall[1]) if wall and wall[1].count(".") < 2 else 0.0,
    )


def _texts(content: Any, report: Report) -> str:
    """The text in a string or in a list of parts."""
    if isinstance(content, str):
        return content
    parts = []
    for part in list_of(content):
        kind = text_of(dict_of(part).get("type"))
        if "text" in kind:
            parts.append(text_of(part.get("text")))
        elif "image" in kind:
            report.note("image")
            parts.append(IMAGE)
        else:
            report.note("unknown_block")
    return joined(parts)
