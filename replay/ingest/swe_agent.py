"""SWE-agent: ``.traj`` files, one JSON document each.

``history`` is what the model saw. ``trajectory`` mirrors it step by step and gives times; it alone has the answers
that were taken back because no command could be read from them, each with the complaint in the ``query`` of the
next step: these become conversations of their own. No step says whether it failed: see ``terminal``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

from hintloop.replay.ingest.chat import add_message, content_text
from hintloop.replay.ingest.classify import MODEL, USER, said_so
from hintloop.replay.ingest.document import Unusable, read_documents, records_of
from hintloop.replay.ingest.drafts import Draft, Drafts
from hintloop.replay.ingest.head import Head
from hintloop.replay.ingest.lines import Record, dumps
from hintloop.replay.ingest.report import Report
from hintloop.replay.ingest.terminal import went_wrong, without_prompt
from hintloop.replay.ingest.trace import Failure, Message, ToolResult, Trace
from hintloop.replay.ingest.values import dict_of, list_of, seconds_of, text_of

_HISTORY_MARKS = ("agent", "message_type", "thought", "action", "is_demo", "tool_call_ids")
_GIVING_UP = ("Exit due to", "Exiting due to")
_SYNTAX = re.compile(r"syntax errors?\b", re.IGNORECASE)
_BLOCKED = re.compile(r"is not supported by this environment|not allowed|blocked", re.IGNORECASE)
_TOOL = "bash"


@dataclass(frozen=True, slots=True)
class SweAgent:
    """The format; see ``detect.Format``."""

    name: str = "swe_agent"

    def sniff(self, head: Head) -> float:
        """1 for a document with its history or its steps."""
        values = head.records if head.document is None else [head.document]
        return 1.0 if values and all(map(_is_document, values)) else 0.0

    def read(self, stream: BinaryIO, report: Report) -> Iterator[Trace]:
        """As ``detect.Format``."""
        return read_documents(stream, report, self._convert)

    def _convert(self, value: Any, report: Report) -> list[Trace]:
        if not _is_document(value):
            raise Unusable("unknown_type")
        history = list(records_of(value.get("history"), report))
        steps = list(records_of(value.get("trajectory"), report))
        info = dict_of(value.get("info"))
        if status := text_of(info.get("exit_status")):
            report.note(f"exit:{status}")
        version = text_of(info.get("swe_agent_version"))
        session = text_of(value.get("instance_id")) or text_of(value.get("environment"))
        main = _Reader(report, steps).read(history)
        taken_back = _taken_back(steps, report if history else Report())
        parts = [(f"taken_back{number}", part) for number, part in enumerate(taken_back, 1)]
        if main:
            parts.append(("main", main))
        return [
            Trace(self.name, session, branch, part, (version,) if version else ()) for branch, part in parts
        ]


def _is_document(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    return any(map(_is_step, list_of(value.get("trajectory"))[:4])) or any(
        map(_is_history, list_of(value.get("history"))[:4])
    )


def _is_step(value: Any) -> bool:
    return isinstance(value, dict) and "action" in value and "observation" in value and "args" not in value


def _is_history(value: Any) -> bool:
    return isinstance(value, dict) and "role" in value and any(name in value for name in _HISTORY_MARKS)


class _Reader:
    """Turns a history into messages; where there is none, the steps."""

    def __init__(self, report: Report, steps: Sequence[Record]) -> None:
        self._report, self._steps, self._at = report, steps, 0
        self._drafts = Drafts(report)

    def read(self, history: Sequence[Record]) -> tuple[Message, ...]:
        own = next((text_of(item.get("agent")) for item in history if item.get("agent")), "")
        for item in history:
            if item.get("agent") and item["agent"] != own:
                self._report.ignore("other_agent")
            elif _is_giving_up(item):
                self._report.ignore("giving_up")
            else:
                self._read(item)
        if history:
            self._last_result()
        else:
            self._only_steps()
        return self._drafts.finish()

    def _read(self, item: Record) -> None:
        role, demo = item.get("role"), item.get("is_demo") is True
        self._report.note("demonstration", int(demo))
        if role == "assistant":
            draft = add_message(self._drafts, item, self._report, copied=demo)
            if draft is not None:
                self._own(draft, item)
        elif role == "tool" or (role == "user" and self._drafts.waiting and not demo):
            self._drafts.taken += 1
            self._observation(item)
        else:
            add_message(self._drafts, item, self._report, copied=demo)

    def _own(self, draft: Draft, item: Record) -> None:
        action = text_of(item.get("action")).strip()
        if draft.calls or not action:
            return
        if isinstance(item.get("thought"), str):
            draft.texts = [item["thought"].strip()]
        self._drafts.call(draft, "", _TOOL, dumps({"command": action}))

    def _observation(self, item: Record) -> None:
        ids = [each for each in list_of(item.get("tool_call_ids")) if isinstance(each, str)]
        call_id = ids[0] if ids else text_of(item.get("tool_call_id"))
        waiting = self._drafts.waiting
        text = content_text(item.get("content"), self._report)
        found = next((call for call in waiting if call.call_id == call_id), None) if call_id else None
        call = found or (waiting[0] if waiting and not call_id else None)
        step = self._step_of(text) if call is not None else {}
        result = _result(text, seconds_of(step.get("execution_time")))
        if call is not None:
            self._drafts.answer_call(call, result)
        else:
            self._drafts.answer(call_id, result)

    def _step_of(self, text: str) -> Record:
        """The step that gave this text: the next one whose observation it shows."""
        for at in range(self._at, len(self._steps)):
            seen = text_of(self._steps[at].get("observation")).strip()
            if (seen and seen[:2000] in text) or (not seen and "did not produce any output" in text):
                self._at = at + 1
                return self._steps[at]
        return {}

    def _last_result(self) -> None:
        """Older histories end before the last result, which the last step has."""
        if not self._steps or len(self._drafts.waiting) != 1:
            return
        (call,), step = self._drafts.waiting, self._steps[-1]
        action = text_of(step.get("action")).strip()
        if action and dumps({"command": action}) == call.arguments:
            text = text_of(step.get("observation"))
            self._drafts.answer_call(call, _result(text, seconds_of(step.get("execution_time"))))

    def _only_steps(self) -> None:
        for number, step in enumerate(self._steps):
            for item in (
                [each for each in list_of(step.get("query")) if isinstance(each, dict)] if not number else []
            ):
                add_message(self._drafts, item, Report())
            if _is_giving_up({"role": "assistant", "content": step.get("response"), **step}):
                continue
            thought = text_of(step.get("thought")) or text_of(step.get("response"))
            draft = self._drafts.say("assistant", thought.strip())
            if action := text_of(step.get("action")).strip():
                call = self._drafts.call(draft, "", _TOOL, dumps({"command": action}))
                text = text_of(step.get("observation"))
                self._drafts.answer_call(call, _result(text, seconds_of(step.get("execution_time"))))
        self._drafts.taken = len(self._steps)


def _is_giving_up(item: Record) -> bool:
    """A message that the tool wrote in the model's place, before it handed in what there was."""
    said = text_of(item.get("content"))
    return item.get("role") == "assistant" and not item.get("action") and said.startswith(_GIVING_UP)


def _result(text: str, seconds: float) -> ToolResult:
    failed = went_wrong(without_prompt(text))
    return ToolResult(text, is_error=True if failed else None, seconds=seconds, failure=failed)


def _taken_back(steps: Sequence[Record], report: Report) -> list[tuple[Message, ...]]:
    """Conversations that end in answers which were taken back; counts the steps."""
    found = []
    for number, step in enumerate(steps):
        query = [each for each in list_of(step.get("query")) if isinstance(each, dict)]
        after = steps[number + 1].get("query") if number + 1 < len(steps) else None
        goes_on = len(list_of(after)) > len(query) and any(map(_is_taken_back, list_of(after)[len(query) :]))
        if not any(map(_is_taken_back, query)) or goes_on:
            report.ignore("step")
            continue
        drafts, failed = Drafts(Report()), False
        for item, following in zip(query, [*query[1:], {}], strict=True):
            draft = add_message(drafts, item, Report(), copied=not failed and not _is_taken_back(item))
            if draft is not None and _is_taken_back(item):
                failed = True
                draft.failure = _complaint(content_text(following.get("content"), Report()))
        made = tuple(replace(m, copied=m.copied or m.failure is None) for m in drafts.finish())
        report.note("taken_back", sum(m.failure is not None for m in made))
        if made:
            report.used += 1
            found.append(made)
        else:
            report.ignore("step")
    return found


def _is_taken_back(item: Any) -> bool:
    return (
        isinstance(item, dict) and item.get("role") == "assistant" and item.get("message_type") == "assistant"
    )


def _complaint(text: str) -> Failure:
    """What the tool had against an answer."""
    if (said := said_so(text)) is not None:
        return Failure(*said, text[:2000])
    kind, cause = ("syntax_error", MODEL) if _SYNTAX.search(text[:400]) else ("json_decode", MODEL)
    if _BLOCKED.search(text[:400]):
        kind, cause = "permission_denied", USER
    return Failure(kind, cause, text[:2000])
