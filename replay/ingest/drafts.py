"""A conversation while it is put together: messages in order, results with the calls that they answer."""

from __future__ import annotations

from dataclasses import dataclass, field

from hintloop.replay.ingest.report import Report
from hintloop.replay.ingest.trace import Failure, Message, ToolCall, ToolResult, Usage
from hintloop.replay.ingest.values import joined

MAX_TRACE_CHARS = 64 << 20
"""Messages of one conversation beyond this are left out; no context of a model is that long."""


@dataclass(slots=True, eq=False)
class DraftCall:
    """A call that may still get its result."""

    call_id: str
    name: str
    arguments: str
    result: ToolResult | None = None


@dataclass(slots=True, eq=False)
class Draft:
    """A message that is still growing."""

    role: str
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[DraftCall] = field(default_factory=list)
    timestamp: float | None = None
    model: str = ""
    usage: Usage | None = None
    copied: bool = False
    failure: Failure | None = None

    def message(self) -> Message:
        """The finished message."""
        return Message(
            role=self.role,
            text=joined(self.texts),
            calls=tuple(ToolCall(c.call_id, c.name, c.arguments, c.result) for c in self.calls),
            thinking=joined(self.thoughts),
            timestamp=self.timestamp,
            model=self.model,
            usage=self.usage,
            copied=self.copied,
            failure=self.failure,
        )


class Drafts:
    """The messages of one conversation. A result and its call may come in any order."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._messages: list[Draft] = []
        self._open: list[DraftCall] = []
        self._early: dict[str, list[ToolResult]] = {}
        self._answered: set[str] = set()
        self._chars = 0
        self.taken = 0
        """Records that went into the conversation; for the caller to count."""

    @property
    def waiting(self) -> list[DraftCall]:
        """Calls without a result, the oldest first."""
        return self._open

    def add(self, draft: Draft) -> Draft:
        """Append a message, or leave it out when the conversation is too long for it; the same message."""
        self._chars += sum(map(len, draft.texts))
        if self._chars > MAX_TRACE_CHARS:
            self._report.note("messages_beyond_limit")
            return draft
        self._messages.append(draft)
        return draft

    def say(self, role: str, text: str, timestamp: float | None = None, *, copied: bool = False) -> Draft:
        """Append a message of plain text."""
        return self.add(Draft(role, [text], timestamp=timestamp, copied=copied))

    def call(self, draft: Draft, call_id: str, name: str, arguments: str) -> DraftCall:
        """Append a call to a message. A result that came before it is taken now."""
        made = DraftCall(call_id, name, arguments)
        draft.calls.append(made)
        self._chars += len(arguments)
        if not name:
            self._report.note("call_without_name")
        if call_id and any(call.call_id == call_id for call in self._open):
            self._report.note("repeated_call_id")
        early = self._early.get(call_id)
        if early:
            made.result = early.pop(0)
            self._answered.add(call_id)
        else:
            self._open.append(made)
        return made

    def answer(self, call_id: str, result: ToolResult) -> None:
        """Give a result to the oldest call of that id that has none."""
        call = next((call for call in self._open if call.call_id == call_id), None) if call_id else None
        if call is not None:
            self.answer_call(call, result)
        elif call_id and call_id in self._answered:
            self._report.note("repeated_result")
        elif call_id:
            self._early.setdefault(call_id, []).append(result)
        else:
            self._report.note("result_without_call")

    def answer_call(self, call: DraftCall, result: ToolResult) -> None:
        """Give a result to one of the ``waiting`` calls."""
        call.result = result
        self._answered.add(call.call_id)
        self._open.remove(call)
        self._chars += len(result.text)

    def finish(self) -> tuple[Message, ...]:
        """The messages that say or do something; none when the model is not among them. Counts ``taken``."""
        made = [draft.message() for draft in self._messages]
        kept = tuple(each for each in made if each.text or each.calls or each.failure)
        report = self._report
        report.note("empty_message", len(made) - len(kept))
        report.note("result_without_call", sum(map(len, self._early.values())))
        report.note("call_without_result", len(self._open))
        if any(message.role == "assistant" for message in kept):
            report.used += self.taken
            return kept
        report.note("conversation_without_answer", int(bool(kept)))
        if self.taken:
            report.ignored["conversation_without_answer"] += self.taken
        return ()
