"""OpenHands before version 1: actions and observations, in an exported trajectory or the rows of ``output.jsonl``.

An observation names the action that it answers as its ``cause``. The oldest rows have neither ids nor causes: there,
an observation answers the action before it. Calls of one answer share the id of the model's response.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from hintloop.replay.ingest.chat import content_text
from hintloop.replay.ingest.document import share, values_of
from hintloop.replay.ingest.drafts import Draft, DraftCall, Drafts
from hintloop.replay.ingest.event_log import read_log
from hintloop.replay.ingest.head import Head
from hintloop.replay.ingest.lines import Record
from hintloop.replay.ingest.report import Report
from hintloop.replay.ingest.trace import Message, ToolResult, Trace, Usage
from hintloop.replay.ingest.values import arguments_of, dict_of, integer_of, list_of, text_of, unix_time

_SILENT_ACTIONS = frozenset(
    ["recall", "change_agent_state", "condensation_request", "start", "stop", "pause", "resume"]
)
"""Actions of the tool itself, which the model has not called."""
_SILENT = frozenset(["agent_state_changed", "null", "recall", "condense", "loop_detection", "loop_recovery"])
_NOT_ARGUMENTS = frozenset(
    ["thought", "security_risk", "confirmation_state", "is_confirmed", "hidden", "cwd"]
)
_CONDENSATION = "condensation"


@dataclass(frozen=True, slots=True)
class OpenHandsV0:
    """The format; see ``detect.Format``."""

    name: str = "openhands_v0"

    def sniff(self, head: Head) -> float:
        """Share of the first values that are events, or rows with events."""
        values = values_of(head)
        return share(values, lambda value: _is_event(value) or _is_row(value))

    def read(self, stream: BinaryIO, report: Report) -> Iterator[Trace]:
        """As ``detect.Format``. One log is held in memory."""
        return read_log(stream, report, self._convert)

    def _convert(self, events: list[Record], row: Record, report: Report) -> list[Trace]:
        numbers = ["instance_id", "sid", "id"]
        session = next((text_of(row[name]) for name in numbers if isinstance(row.get(name), str)), "")
        report.note("success_not_verified", int("success" in row))
        model = text_of(dict_of(dict_of(row.get("metadata")).get("llm_config")).get("model"))
        found = _Reader(report, model).read(events, text_of(row.get("instruction")))
        return [Trace(self.name, session, branch, messages) for branch, messages in found]


def _is_event(value: Any) -> bool:
    if not isinstance(value, dict) or "kind" in value or "role" in value:
        return False
    acts = isinstance(value.get("action"), str) and isinstance(value.get("args"), dict)
    return acts != (isinstance(value.get("observation"), str) and "content" in value)


def _is_row(value: Any) -> bool:
    row = dict_of(value)
    history = list_of(row.get("history")) or list_of(row.get("trajectory"))
    flat = [each for part in history[:40] for each in (part if isinstance(part, list) else [part])]
    return share(flat, _is_event) >= 0.5


class _Reader:
    """Turns the events of one log into conversations."""

    def __init__(self, report: Report, model: str) -> None:
        self._report, self._model = report, model
        self._calls: dict[Any, DraftCall] = {}
        self._answer: tuple[str, Draft] | None = None

    def read(self, events: list[Record], instruction: str) -> list[tuple[str, tuple[Message, ...]]]:
        """A condensation ends a conversation; the next begins with what it kept."""
        view: list[tuple[Record, bool]] = []
        found: list[tuple[str, tuple[Message, ...]]] = []
        seen: set[str] = set()
        for event in events:
            event_id = event.get("id")
            if isinstance(event_id, (str, int)):
                if str(event_id) in seen:
                    self._report.ignore("duplicate_id")
                    continue
                seen.add(str(event_id))
            if event.get("action") == _CONDENSATION:
                self._report.ignore(_CONDENSATION)
                found += self._conversation(view, f"part{len(found)}", instruction)
                view = _condensed(view, dict_of(event.get("args")))
            elif self._is_spoken(event):
                view.append((event, False))
        return found + self._conversation(view, "main", instruction)

    def _is_spoken(self, event: Record) -> bool:
        """Whether the model said or saw this; counts what it did not."""
        action, seen = text_of(event.get("action")), text_of(event.get("observation"))
        if not action and not seen:
            self._report.skip("unknown_type")
        elif (action and not isinstance(event.get("args"), dict)) or (
            seen and not isinstance(event.get("content"), (str, list))
        ):
            self._report.skip("malformed_event")
        elif action in _SILENT_ACTIONS or seen in _SILENT:
            self._report.ignore(action or seen)
        elif action and action != "message" and event.get("source") == "user":
            self._report.ignore("action_of_the_user")
        else:
            return True
        return False

    def _conversation(
        self, view: list[tuple[Record, bool]], branch: str, instruction: str
    ) -> list[tuple[str, tuple[Message, ...]]]:
        copies = any(copied for _, copied in view)
        drafts = Drafts(Report() if copies else self._report)
        self._calls, self._answer = {}, None
        if instruction and not any(_is_users(event) for event, _ in view):
            drafts.say("user", instruction)
        for event, copied in view:
            self._add(drafts, event, copied)
        messages = drafts.finish()
        own = sum(not copied for _, copied in view)
        if messages:
            self._report.used += own
        elif own:
            self._report.ignored["conversation_without_answer"] += own
        return [(branch, messages)] if messages else []

    def _add(self, drafts: Drafts, event: Record, copied: bool) -> None:
        report = Report() if copied else self._report
        action, at = text_of(event.get("action")), unix_time(event.get("timestamp"))
        args = dict_of(event.get("args"))
        if not action:
            self._observe(drafts, event, report)
        elif action == "system":
            report.note("tool_definitions", int(bool(args.get("tools"))))
            drafts.say("system", text_of(args.get("content")), at, copied=copied)
        elif (action == "message" and event.get("source") != "agent") or action == "summary":
            drafts.say("user", text_of(args.get("content")), at, copied=copied)
        else:
            self._act(drafts, event, action, args, copied)

    def _act(self, drafts: Drafts, event: Record, action: str, args: dict[str, Any], copied: bool) -> None:
        meta = dict_of(event.get("tool_call_metadata"))
        response = dict_of(meta.get("model_response"))
        thought = args.get("content" if action == "message" else "thought")
        text = text_of(dict_of(thought).get("text") if isinstance(thought, dict) else thought)
        draft = self._draft(drafts, event, response, "" if action == "think" else text, copied)
        if action == "message":
            return
        call_id = text_of(meta.get("tool_call_id"))
        name = text_of(meta.get("function_name")) or action
        call = drafts.call(draft, call_id, name, _arguments(response, call_id, args, action))
        if isinstance(event.get("id"), (int, str)):
            self._calls[event["id"]] = call

    def _draft(
        self, drafts: Drafts, event: Record, response: dict[str, Any], text: str, copied: bool
    ) -> Draft:
        """The message that an action is part of: actions of one answer repeat its text."""
        own = text_of(response.get("id"))
        if own and self._answer is not None and self._answer[0] == own:
            draft = self._answer[1]
            draft.texts += [] if text in draft.texts else [text]
            return draft
        draft = drafts.add(
            Draft("assistant", [text], timestamp=unix_time(event.get("timestamp")), copied=copied)
        )
        draft.model = text_of(response.get("model")) or self._model
        usage = dict_of(response.get("usage"))
        counts = [integer_of(usage.get(name)) or 0 for name in ("prompt_tokens", "completion_tokens")]
        draft.usage = Usage(*counts) if usage else None
        self._answer = (own, draft)
        return draft

    def _observe(self, drafts: Drafts, event: Record, report: Report) -> None:
        result = _result(event, report)
        cause, meta = event.get("cause"), dict_of(event.get("tool_call_metadata"))
        call = self._calls.get(cause) if isinstance(cause, (int, str)) else None
        waiting = drafts.waiting
        if call is None and cause is None and "id" not in event and waiting:
            call = waiting[0]
        if call is not None and call in waiting:
            drafts.answer_call(call, result)
        elif call is not None:
            report.note("repeated_result")
        else:
            drafts.answer(text_of(meta.get("tool_call_id")), result)


def _is_users(event: Record) -> bool:
    return event.get("action") == "message" and event.get("source") != "agent"


def _condensed(view: list[tuple[Record, bool]], args: dict[str, Any]) -> list[tuple[Record, bool]]:
    """What a condensation leaves, with its summary."""
    gone = {each for each in list_of(args.get("forgotten_event_ids")) if isinstance(each, (int, str))}
    first, last = (integer_of(args.get(f"forgotten_events_{end}_id")) for end in ("start", "end"))
    kept = []
    for event, _ in view:
        event_id = event.get("id")
        in_range = (
            type(event_id) is int and first is not None and last is not None and first <= event_id <= last
        )
        if not in_range and not (isinstance(event_id, (int, str)) and event_id in gone):
            kept.append((event, True))
    offset = integer_of(args.get("summary_offset"))
    if isinstance(args.get("summary"), str) and offset is not None and offset >= 0:
        kept.insert(offset, ({"action": "summary", "args": {"content": args["summary"]}}, True))
    return kept


def _arguments(response: dict[str, Any], call_id: str, args: dict[str, Any], action: str) -> str:
    """What the model wrote as the arguments of a call; without its message, what became of them."""
    choices = list_of(response.get("choices"))
    message = dict_of(dict_of(choices[0] if choices else None).get("message"))
    for call in map(dict_of, list_of(message.get("tool_calls"))):
        if call_id and call.get("id") == call_id:
            return arguments_of(dict_of(call.get("function")).get("arguments"))
    kept = {name: value for name, value in args.items() if name not in _NOT_ARGUMENTS or action == "think"}
    return arguments_of(kept)


def _result(event: Record, report: Report) -> ToolResult:
    seen, extras = text_of(event.get("observation")), dict_of(event.get("extras"))
    code = integer_of(dict_of(extras.get("metadata")).get("exit_code"))
    code = integer_of(extras.get("exit_code")) if code is None else code
    failed = seen == "error" or (event.get("success") is False and code in (None, 0))
    return ToolResult(
        content_text(event.get("content"), report),
        is_error=True if failed else None,
        exit_code=code,
        refused=seen == "user_rejected",
    )
