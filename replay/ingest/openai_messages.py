"""Message lists in the style of OpenAI's API: one conversation or many, as JSON or as lines of JSON.

A conversation is a list of messages, or an object with ``messages`` (as fine-tuning files have it, often with
``tools``); a file of lines has a conversation or one message on each. Who recorded it is not known.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from hintloop.replay.ingest.chat import add_message, is_message
from hintloop.replay.ingest.document import (
    Unusable,
    converted,
    read_documents,
    records_of,
    share,
    values_of,
    whole,
)
from hintloop.replay.ingest.drafts import Drafts
from hintloop.replay.ingest.head import Head
from hintloop.replay.ingest.lines import Record, read_records, reread
from hintloop.replay.ingest.mini_swe_agent import looks_like_mini
from hintloop.replay.ingest.report import Report
from hintloop.replay.ingest.trace import Trace
from hintloop.replay.ingest.values import list_of, text_of

MAX_TRACE_BYTES = 64 << 20
_FOREIGN = ("trajectory_format", "tool_trace", "sessionId", "payload", "uuid", "request", "history", "steps")
"""Fields of recordings that hold ``messages`` and more, each a format of its own."""
_TYPED = ("type", "kind", "object")
_IDS = ("id", "conversation_id", "session_id", "episode_id", "instance_id")


@dataclass(frozen=True, slots=True)
class OpenAiMessages:
    """The format; see ``detect.Format``."""

    name: str = "openai_messages"

    def sniff(self, head: Head) -> float:
        """Share of the first values that are conversations, or messages."""
        if isinstance(head.document, list) and looks_like_mini(head.document):
            return 0.0
        values = values_of(head)
        return max(share(values, _is_row), share(values, _is_bare_message))

    def read(self, stream: BinaryIO, report: Report) -> Iterator[Trace]:
        """As ``detect.Format``. Lines are read twice."""
        first = (each.record for each in read_records(stream, Report()))
        if whole(stream) is None and share(first, _is_bare_message) >= 0.5:
            return self._read_messages(stream, report)
        return read_documents(stream, report, self._convert)

    def _read_messages(self, stream: BinaryIO, report: Report) -> Iterator[Trace]:
        """One conversation, a message on each line."""
        places, taken = array("q"), 0
        for record, start, size in read_records(stream, report):
            taken += size
            if taken > MAX_TRACE_BYTES:
                report.ignore("messages_beyond_limit")
            elif is_message(record):
                places.extend((start, size))
            else:
                report.skip("unknown_type")
        report.judge()
        messages = [reread(stream, places[at], places[at + 1]) for at in range(0, len(places), 2)]
        yield from self._traces(messages, {}, report)

    def _convert(self, value: Any, report: Report) -> list[Trace]:
        if isinstance(value, list) and not any(map(_is_bare_message, value)):
            return [
                trace for row in records_of(value, report) for trace in converted(row, self._convert, report)
            ]
        row = {"messages": value} if isinstance(value, list) else value
        if not isinstance(row.get("messages"), list) or any(name in row for name in _FOREIGN):
            raise Unusable("unknown_type")
        report.note("tool_definitions", int(bool(row.get("tools") or row.get("functions"))))
        return self._traces(list(records_of(row["messages"], report)), row, report)

    def _traces(self, messages: list[Record], row: Record, report: Report) -> list[Trace]:
        drafts = Drafts(report)
        for message in messages:
            add_message(drafts, message, report)
        made = drafts.finish()
        session = next((row[name] for name in _IDS if isinstance(row.get(name), str)), "")
        return [Trace(self.name, session, "main", made)] if made else []


def _is_bare_message(value: Any) -> bool:
    return is_message(value) and not any(
        name in value for name in (*_FOREIGN, *_TYPED, "message_type", "extra")
    )


def _is_row(value: Any) -> bool:
    if not isinstance(value, dict) or any(name in value for name in _FOREIGN):
        return False
    messages = list_of(value.get("messages"))[:40]
    return bool(messages) and share(messages, is_message) >= 0.5 and not text_of(value.get("type"))
