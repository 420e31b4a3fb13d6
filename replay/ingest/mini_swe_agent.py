"""mini-swe-agent: ``.traj.json`` files, and the bare message lists of version 1.

Calls are tool calls, or one fenced block of shell in the text; such a block becomes a call, and leaves the text.
What the tool could not read as a call is a failure of the model, kept in a conversation of its own where the
recording has it outside of the messages, since what followed never saw it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

from hintloop.replay.ingest.chat import add_call, add_message, content_text, is_message
from hintloop.replay.ingest.classify import INFRA, MODEL, said_so
from hintloop.replay.ingest.document import Unusable, read_documents, records_of
from hintloop.replay.ingest.drafts import Draft, Drafts
from hintloop.replay.ingest.head import Head
from hintloop.replay.ingest.lines import Record, dumps
from hintloop.replay.ingest.report import Report
from hintloop.replay.ingest.trace import Failure, Message, ToolResult, Trace
from hintloop.replay.ingest.values import dict_of, integer_of, list_of, text_of

_FORMAT = "mini-swe-agent"
_BLOCK = re.compile(r"```(?:mswea_bash_command|bash)[ \t]*\n(.*?)\n?```", re.DOTALL)
_OWN_BLOCK = "```mswea_bash_command"
_RETURNED = re.compile(r"\s*<returncode>(-?\d{1,5})</returncode>")
_SUBMITS = ("COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT", "MINI_SWE_AGENT_FINAL_OUTPUT")
_NOT_EXECUTED = "action was not executed"
_TOOL = "bash"


@dataclass(frozen=True, slots=True)
class MiniSweAgent:
    """The format; see ``detect.Format``."""

    name: str = "mini_swe_agent"

    def sniff(self, head: Head) -> float:
        """1 for a document that names the format, or a message list with its marks."""
        values = head.records if head.document is None else [head.document]
        return 1.0 if values and all(map(_is_document, values)) else 0.0

    def read(self, stream: BinaryIO, report: Report) -> Iterator[Trace]:
        """As ``detect.Format``."""
        return read_documents(stream, report, self._convert)

    def _convert(self, value: Any, report: Report) -> list[Trace]:
        if not _is_document(value):
            raise Unusable("unknown_type")
        document = {"messages": value} if isinstance(value, list) else value
        info = dict_of(document.get("info"))
        config = dict_of(info.get("config"))
        session = text_of(document.get("instance_id")) or text_of(info.get("instance_id"))
        version = text_of(info.get("mini_version"))
        model = text_of(dict_of(config.get("model")).get("model_name"))
        found = _Reader(report, model).read(list(records_of(document["messages"], report)))
        if status := text_of(info.get("exit_status")):
            report.note(f"exit:{status}")
        return [
            Trace(self.name, session, branch, messages, (version,) if version else ())
            for branch, messages in found
        ]


def looks_like_mini(values: Sequence[Any]) -> bool:
    """Whether a bare message list has the marks of version 1: its shell blocks, and return codes in angle brackets."""
    if not values or not all(map(is_message, values)) or any(value.get("tool_calls") for value in values):
        return False
    texts = [(value["role"], text_of(value.get("content"))) for value in values]
    return any(
        _OWN_BLOCK in text if role == "assistant" else role == "user" and _RETURNED.match(text) is not None
        for role, text in texts
    )


def _is_document(value: Any) -> bool:
    if isinstance(value, list):
        return looks_like_mini(value)
    if not isinstance(value, dict) or not isinstance(value.get("messages"), list):
        return False
    named = text_of(value.get("trajectory_format")).startswith(_FORMAT)
    return named or isinstance(dict_of(value.get("info")).get("mini_version"), str)


class _Reader:
    """Turns the messages of one run into conversations."""

    def __init__(self, report: Report, model: str) -> None:
        self._report, self._model = report, model
        self._drafts = Drafts(report)
        self._sides: list[tuple[list[Draft], Draft, str]] = []
        self._so_far: list[Draft] = []

    def read(self, records: Sequence[Record]) -> list[tuple[str, tuple[Message, ...]]]:
        for number, record in enumerate(records):
            self._read(record, last=number == len(records) - 1)
        main = self._drafts.finish()
        sides = [self._side(*side) for side in self._sides]
        found = [(f"format_error{number}", side) for number, side in enumerate(sides, 1)]
        return [*found, *([("main", main)] if main else [])]

    def _read(self, record: Record, *, last: bool) -> None:
        role, extra = text_of(record.get("role")), dict_of(record.get("extra"))
        if role == "exit":
            self._report.ignore("exit")
        elif record.get("object") == "response":
            self._drafts.taken += 1
            self._response(record)
        elif role == "user" and extra.get("interrupt_type") == "FormatError":
            self._drafts.taken += 1
            self._format_error(record, extra)
        elif role == "assistant":
            if (draft := add_message(self._drafts, record, self._report)) is not None:
                self._own(draft, extra)
        elif role == "tool" or self._is_observation(record, extra, last=last):
            self._drafts.taken += 1
            self._observation(record, extra)
        else:
            self._other(record, extra)

    def _other(self, record: Record, extra: dict[str, Any]) -> None:
        for kind in [text_of(extra.get("interrupt_type")), "human_command" if extra.get("actions") else ""]:
            self._report.note(kind, int(bool(kind)))
        if "interrupt_type" not in extra and self._is_format_complaint():
            self._fail(self._so_far[-1], content_text(record.get("content"), Report()))
        self._keep(add_message(self._drafts, record, self._report))

    def _keep(self, draft: Draft | None) -> None:
        if draft is not None:
            self._so_far.append(draft)

    def _own(self, draft: Draft, extra: dict[str, Any]) -> None:
        """The calls of a message of the model that has none as ``tool_calls``."""
        draft.model = self._model
        self._keep(draft)
        if draft.calls:
            return
        text = "\n".join(draft.texts)
        commands = [action.get("command") for action in map(dict_of, list_of(extra.get("actions")))]
        found = [block.strip() for block in _BLOCK.findall(text)]
        if not commands and "actions" not in extra and len(found) == 1:
            commands = list(found)
        for command in commands:
            if isinstance(command, str):
                self._drafts.call(draft, "", _TOOL, dumps({"command": command}))
        draft.texts = [_BLOCK.sub(lambda m: "" if m[1].strip() in commands else m[0], text).strip()]

    def _is_observation(self, record: Record, extra: dict[str, Any], *, last: bool) -> bool:
        if record.get("type") == "function_call_output":
            return True
        if text_of(record.get("role")) != "user" or not self._drafts.waiting:
            return False
        if "returncode" in extra or "raw_output" in extra:
            return True
        text = content_text(record.get("content"), Report())
        submits = any(word in self._drafts.waiting[0].arguments for word in _SUBMITS)
        return _RETURNED.match(text) is not None or (last and submits)

    def _observation(self, record: Record, extra: dict[str, Any]) -> None:
        text = content_text(record.get("content", record.get("output")), self._report)
        code, told = integer_of(extra.get("returncode")), _RETURNED.match(text)
        if code is None and told:
            code = int(told[1])
        result = ToolResult(text, exit_code=code)
        info = text_of(extra.get("exception_info"))
        if info == _NOT_EXECUTED or _NOT_EXECUTED in text[-200:]:
            result = replace(result, refused=True)
            self._report.note("not_executed")
        elif (
            code == -1
            and info
            and "timed out" not in info
            and "Timeout" not in text_of(extra.get("exception_type"))
        ):
            result = replace(result, failure=Failure("runtime_error", INFRA, info[:2000]))
        call_id = text_of(record.get("tool_call_id")) or text_of(record.get("call_id"))
        if not call_id and self._drafts.waiting:
            self._drafts.answer_call(self._drafts.waiting[0], result)
        else:
            self._drafts.answer(call_id, result)

    def _is_format_complaint(self) -> bool:
        """Version 1 keeps an answer that it cannot use, and complains in the next message."""
        last = self._so_far[-1] if self._so_far else None
        if last is None or last.role != "assistant" or last.calls:
            return False
        return len(_BLOCK.findall("\n".join(last.texts))) != 1

    def _fail(self, draft: Draft, text: str) -> None:
        kind, cause = said_so(text) or ("json_decode", MODEL)
        draft.failure = Failure(kind, cause, text[:2000])

    def _format_error(self, record: Record, extra: dict[str, Any]) -> None:
        text = content_text(record.get("content"), self._report)
        self._report.note("FormatError")
        if self._is_format_complaint():
            self._fail(self._so_far[-1], text)
        elif (draft := self._unread(extra)) is not None:
            self._fail(draft, text)
            self._sides.append((list(self._so_far), draft, text))
        else:
            self._report.note("failed_message_not_recorded")
        self._keep(self._drafts.say("user", text))

    def _unread(self, extra: dict[str, Any]) -> Draft | None:
        """The answer that was no call, from where the complaint holds it."""
        choices = list_of(dict_of(extra.get("response")).get("choices"))
        message = dict_of(dict_of(choices[0] if choices else None).get("message"))
        text = text_of(extra.get("model_response")) or content_text(message.get("content"), Report())
        draft = Draft("assistant", [text], model=self._model)
        aside = Drafts(Report())
        for call in list_of(message.get("tool_calls")):
            add_call(aside, draft, call, Report())
        return draft if text or draft.calls else None

    def _side(self, before: list[Draft], failed: Draft, complaint: str) -> tuple[Message, ...]:
        context = [replace(draft.message(), copied=True) for draft in before]
        return (*context, failed.message(), Message("user", complaint))

    def _response(self, record: Record) -> None:
        """A message in the form of the Responses API."""
        draft = Draft("assistant", model=self._model)
        for item in map(dict_of, list_of(record.get("output"))):
            kind = item.get("type")
            if kind == "message":
                draft.texts.append(content_text(item.get("content"), self._report))
            elif kind == "function_call":
                call = {**item, "id": item.get("call_id")}
                add_call(self._drafts, draft, call, self._report)
            else:
                self._report.note("thinking" if kind == "reasoning" else "unknown_block")
        self._keep(self._drafts.add(draft))
