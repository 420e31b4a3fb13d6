"""OpenHands from version 1 on: events of the agent SDK.

Events form a tree, which a conversation that went back has branches in. Calls of one answer share its id. A
condensation forgets events and puts a summary in their place, so that a new conversation begins there. A flag on an
observation says that the tool refused the call; a command that failed has only an exit code.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from hintloop.replay.ingest.chat import content_text
from hintloop.replay.ingest.classify import INFRA, MODEL, said_so
from hintloop.replay.ingest.document import share, values_of
from hintloop.replay.ingest.drafts import Draft, Drafts
from hintloop.replay.ingest.event_log import MISSING, read_log
from hintloop.replay.ingest.head import Head
from hintloop.replay.ingest.lines import Record
from hintloop.replay.ingest.report import Report
from hintloop.replay.ingest.trace import Failure, Message, ToolResult, Trace
from hintloop.replay.ingest.values import (
    arguments_of,
    dict_of,
    integer_of,
    joined,
    list_of,
    text_of,
    unix_time,
)

_ACTION, _MESSAGE, _SYSTEM, _SUMMARY = "ActionEvent", "MessageEvent", "SystemPromptEvent", "summary"
_OBSERVATION, _ERROR, _REJECTED = "ObservationEvent", "AgentErrorEvent", "UserRejectObservation"
_CONDENSATION = "Condensation"
_SPOKEN = frozenset([_ACTION, _MESSAGE, _SYSTEM, _OBSERVATION, _ERROR, _REJECTED])
_ROOT = "__root__"
_PATHS_FACTOR = 20
"""Branches share their beginnings; all of them together may have this many times the events."""
_NETWORK = frozenset(["auth", "quota", "rate_limit", "transient"])


@dataclass(frozen=True, slots=True)
class OpenHands:
    """The format; see ``detect.Format``."""

    name: str = "openhands"

    def sniff(self, head: Head) -> float:
        """Share of the first values that are events, or rows with events."""
        return share(values_of(head), lambda value: _is_event(value) or _is_row(value))

    def read(self, stream: BinaryIO, report: Report) -> Iterator[Trace]:
        """As ``detect.Format``. One log is held in memory."""
        return read_log(stream, report, self._convert)

    def _convert(self, events: list[Record], row: Record, report: Report) -> list[Trace]:
        log = _Log(events, report)
        session = text_of(row.get("instance_id")) or text_of(log.state.get("id"))
        parts = [part for path in log.paths() for part in _parts(path, log.events)]
        seen: set[int] = set()
        traces = []
        for number, (part, branch) in enumerate(parts):
            if part and seen.issuperset(part):
                continue
            messages = _messages(part, log.events, seen, log.model, report)
            if messages:
                seen.update(part)
                name = branch if number < len(parts) - 1 else "main"
                traces.append(Trace(self.name, session, name, messages))
        log.count(seen)
        return traces


def _is_event(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    if _is_state(value) or value.get("kind") == MISSING:
        return True
    return all(isinstance(value.get(name), str) for name in ("kind", "id", "source")) and "role" not in value


def _is_state(value: Record) -> bool:
    return isinstance(value.get("agent"), dict) and "execution_status" in value


def _is_row(value: Any) -> bool:
    history = list_of(dict_of(value).get("history"))
    flat = [each for part in history[:40] for each in (part if isinstance(part, list) else [part])]
    return share(flat, _is_event) >= 0.5


@dataclass(slots=True)
class _Log:
    """The events with their places in the tree."""

    events: list[Record]
    report: Report
    state: Record = field(default_factory=dict)
    _up: list[int] = field(default_factory=list)
    _known: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        previous = -1
        for number, event in enumerate(self.events):
            self._up.append(-1)
            if _is_state(event):
                self.state = event
            elif event.get("kind") == MISSING:
                self.report.note(MISSING, integer_of(event.get("count")) or 0)
            elif isinstance(event.get("id"), str) and self._known.setdefault(event["id"], number) == number:
                self._up[number] = self._parent(event, previous)
                previous = number

    @property
    def model(self) -> str:
        """The model that the state names."""
        return text_of(dict_of(dict_of(self.state.get("agent")).get("llm")).get("model"))

    def _parent(self, event: Record, previous: int) -> int:
        """A parent comes before its children, so there are no circles; older events have none and follow each other."""
        named = event.get("parent_id")
        if named == _ROOT:
            return -1
        if isinstance(named, str) and named in self._known and self._known[named] < self._known[event["id"]]:
            return self._known[named]
        self.report.note("parent_missing", int(isinstance(named, str)))
        return previous

    def paths(self) -> list[list[int]]:
        """From the root to each leaf, the active branch last."""
        numbers = list(self._known.values())
        leaves = sorted(set(numbers) - {self._up[number] for number in numbers})
        budget = _PATHS_FACTOR * len(numbers)
        found = []
        for leaf in reversed(leaves):
            path = [leaf]
            while self._up[path[-1]] >= 0 and len(path) <= budget:
                path.append(self._up[path[-1]])
            budget -= len(path)
            if budget < 0:
                self.report.note("branches_beyond_limit")
                break
            found.append(path[::-1])
        return found[::-1]

    def count(self, used: set[int]) -> None:
        """Say of each event what became of it."""
        for number, event in enumerate(self.events):
            kind, event_id = text_of(event.get("kind")), event.get("id")
            if number in used:
                self.report.used += 1
            elif _is_state(event) or kind == MISSING:
                self.report.ignore("state" if kind != MISSING else MISSING)
            elif not kind or not isinstance(event_id, str):
                self.report.skip("unknown_type")
            elif self._known[event_id] != number:
                self.report.ignore("duplicate_id")
            elif kind not in _SPOKEN:
                self.report.ignore(kind)
            elif not _is_sound(event):
                self.report.skip("malformed_event")
            else:
                self.report.ignore("conversation_without_answer")


def _is_sound(event: Record) -> bool:
    kind = event.get("kind")
    if kind == _ACTION:
        return isinstance(event.get("tool_call_id"), str) and isinstance(event.get("tool_name"), str)
    if kind == _MESSAGE:
        return isinstance(event.get("llm_message"), dict)
    if kind == _SYSTEM:
        return isinstance(event.get("system_prompt"), dict)
    return isinstance(event.get("tool_call_id"), str) or isinstance(event.get("action_id"), str)


def _parts(path: Sequence[int], events: Sequence[Record]) -> Iterator[tuple[list[int], str]]:
    """What the model saw along a path, one after the other, each up to a condensation or the end.

    A summary is in it as the number of its condensation.
    """
    view: list[int] = []
    for number in path:
        event = events[number]
        kind = text_of(event.get("kind"))
        if kind in _SPOKEN and _is_sound(event):
            view.append(number)
        elif kind == _CONDENSATION:
            yield list(view), f"until-{text_of(event.get('id'))[:8]}"
            gone = {each for each in list_of(event.get("forgotten_event_ids")) if isinstance(each, str)}
            view = [each for each in view if text_of(events[each].get("id")) not in gone]
            offset = integer_of(event.get("summary_offset"))
            if isinstance(event.get("summary"), str) and offset is not None and offset >= 0:
                view.insert(offset, number)
    yield view, f"branch-{text_of(events[path[-1]].get('id'))[:8]}"


def _messages(
    part: Sequence[int], events: Sequence[Record], seen: set[int], model: str, report: Report
) -> tuple[Message, ...]:
    copies = [number in seen for number in part]
    reader = _Reader(Drafts(Report() if any(copies) else report), model)
    for number, copied in zip(part, copies, strict=True):
        reader.read(events[number], copied, Report() if copied else report)
    return reader.drafts.finish()


@dataclass(slots=True)
class _Reader:
    """Turns the events of one conversation into messages."""

    drafts: Drafts
    model: str
    _calls: dict[str, str] = field(default_factory=dict)
    """Call ids by the ids of their events."""
    _answer: tuple[str, Draft] | None = None
    """Id and message of the answer that actions may still be part of."""

    def read(self, event: Record, copied: bool, report: Report) -> None:
        kind, at = event["kind"], unix_time(event.get("timestamp"))
        if kind == _ACTION:
            self._act(event, copied, report)
            return
        if kind in (_OBSERVATION, _ERROR, _REJECTED):
            named = text_of(event.get("tool_call_id")) or self._calls.get(text_of(event.get("action_id")), "")
            self.drafts.answer(named, _result(event, report))
            return
        self._answer = None
        if kind == _MESSAGE:
            self._say(event, copied, report)
        elif kind == _SYSTEM:
            report.note("tool_definitions", int(bool(event.get("tools"))))
            text = [dict_of(event.get(name)).get("text") for name in ("system_prompt", "dynamic_context")]
            self.drafts.say("system", joined(map(text_of, text)), at, copied=copied)
        else:
            self.drafts.say("user", text_of(event.get("summary")), at, copied=copied)

    def _act(self, event: Record, copied: bool, report: Report) -> None:
        own, text = text_of(event.get("llm_response_id")), content_text(event.get("thought"), report)
        if own and self._answer is not None and self._answer[0] == own:
            draft = self._answer[1]
            draft.texts.append(text)
        else:
            at = unix_time(event.get("timestamp"))
            draft = self.drafts.add(Draft("assistant", [text], timestamp=at, model=self.model, copied=copied))
            self._answer = (own, draft)
        thoughts = [text_of(event.get("reasoning_content"))]
        thoughts += [text_of(dict_of(each).get("thinking")) for each in list_of(event.get("thinking_blocks"))]
        draft.thoughts += thoughts
        report.note("thinking", int(any(thoughts)))
        given = dict_of(event.get("tool_call")).get("arguments")
        if given is None:
            given = {name: value for name, value in dict_of(event.get("action")).items() if name != "kind"}
        call_id = text_of(event.get("tool_call_id"))
        self.drafts.call(draft, call_id, text_of(event.get("tool_name")), arguments_of(given))
        self._calls[text_of(event.get("id"))] = call_id

    def _say(self, event: Record, copied: bool, report: Report) -> None:
        message = dict_of(event.get("llm_message"))
        parts = [message.get("content"), event.get("extended_content")]
        role = text_of(message.get("role"))
        if role not in ("system", "user", "assistant"):
            role = "assistant" if event.get("source") == "agent" else "user"
        text = joined(content_text(part, report) for part in parts)
        draft = self.drafts.say(role, text, unix_time(event.get("timestamp")), copied=copied)
        if role == "assistant":
            draft.model = self.model
            draft.thoughts.append(text_of(message.get("reasoning_content")))


def _result(event: Record, report: Report) -> ToolResult:
    if event["kind"] == _REJECTED:
        return ToolResult(f"Action rejected: {text_of(event.get('rejection_reason'))}", refused=True)
    if event["kind"] == _ERROR:
        text = text_of(event.get("error"))
        kind = text_of(dict_of(event.get("classification")).get("kind"))
        return ToolResult(text, is_error=True, failure=_agent_error(text, kind))
    seen = dict_of(event.get("observation"))
    text = joined(content_text(part, report) for part in (seen.get("content"), event.get("extended_content")))
    flag, code = seen.get("is_error"), integer_of(seen.get("exit_code"))
    return ToolResult(text, is_error=flag if isinstance(flag, bool) else None, exit_code=code)


def _agent_error(text: str, kind: str) -> Failure:
    """An error of the scaffold; what it does not classify is the model's only where its text says so."""
    said = said_so(text)
    if kind == "agent_action":
        found = said or ("type_error", MODEL)
    elif kind in _NETWORK:
        found = ("connection_error", INFRA)
    else:
        found = said if said and kind in ("", "unknown") else ("runtime_error", INFRA)
    return Failure(*found, text[:2000])
