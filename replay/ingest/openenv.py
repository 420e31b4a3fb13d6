"""OpenEnv: collected episodes (``results.jsonl``), training traces, and the documents of its capture proxy.

An episode has chat messages, a trace of its tool calls that says which failed, and a reward. A training trace and a
captured rollout have model calls, each with all the messages that it was sent: a call that was sent the whole of
another one and its answer goes on with that conversation, any other begins a new one. Token ids are of a tokenizer
that the file does not name, so only the text is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO

from hintloop.replay.episode import Outcome
from hintloop.replay.ingest.chat import add_message, content_text, is_message
from hintloop.replay.ingest.document import Unusable, converted, read_documents, records_of, share, values_of
from hintloop.replay.ingest.drafts import Drafts
from hintloop.replay.ingest.head import Head
from hintloop.replay.ingest.lines import Record, dumps, loads
from hintloop.replay.ingest.report import Report
from hintloop.replay.ingest.trace import Grade, Message, ToolCall, Trace
from hintloop.replay.ingest.values import dict_of, list_of, text_of

_SOLVED = 1.0
"""Reward from which an episode counts as solved, as in a live one."""
_MAX_MESSAGES = 200_000
"""All model calls of a document together may have been sent this many messages."""


@dataclass(frozen=True, slots=True)
class OpenEnv:
    """The format; see ``detect.Format``."""

    name: str = "openenv"

    def sniff(self, head: Head) -> float:
        """Share of the first values that are episodes, traces, captured rollouts, or model calls."""
        values = values_of(head)
        return max(share(values, lambda v: _is_episode(v) or _is_trace(v)), share(values, _is_call))

    def read(self, stream: BinaryIO, report: Report) -> Iterator[Trace]:
        """As ``detect.Format``."""
        return read_documents(stream, report, self._convert)

    def _convert(self, value: Any, report: Report) -> list[Trace]:
        if isinstance(value, list) and share(value, _is_call) >= 0.5:
            return self._calls(value, {}, report)
        if isinstance(value, list):
            return [t for row in records_of(value, report) for t in converted(row, self._convert, report)]
        if _is_episode(value):
            return self._episode(value, report)
        if _is_trace(value):
            return self._calls(value["turns"], value, report)
        if _is_call(value):
            return self._calls([value], {}, report)
        raise Unusable("unknown_type")

    def _episode(self, row: Record, report: Report) -> list[Trace]:
        drafts = Drafts(report)
        for message in records_of(row["messages"], report):
            add_message(drafts, message, report)
        messages = _with_errors(drafts.finish(), list_of(row.get("tool_trace")), report)
        session = text_of(row.get("episode_id"))
        return [Trace(self.name, session, "main", messages, grade=_grade(row))] if messages else []

    def _calls(self, values: Any, row: Record, report: Report) -> list[Trace]:
        session = text_of(row.get("session_id"))
        traces = []
        for number, thread in enumerate(_threads(values, _auxiliary(row), report)):
            drafts = Drafts(report)
            for message, copied in zip(thread.messages, thread.copied, strict=True):
                draft = add_message(drafts, message, Report(), copied=copied)
                if draft is not None and message.get("role") == "assistant":
                    draft.model = draft.model or thread.model
            drafts.taken = 0  # the records are the calls
            if made := drafts.finish():
                branch = f"root{number}" if number else "main"
                traces.append(Trace(self.name, session, branch, made, grade=thread.grade))
        return traces


def _auxiliary(row: Record) -> set[str]:
    """Ids of the calls that were no work on the task, such as making up a title."""
    sequences = [dict_of(each) for each in list_of(row.get("sequences"))]
    nodes = [
        n for each in sequences if each.get("role") == "auxiliary" for n in list_of(each.get("node_ids"))
    ]
    return {node for node in nodes if isinstance(node, str)}


def _threads(values: Any, auxiliary: set[str], report: Report) -> list[_Thread]:
    """The conversations that the calls make; counts each call."""
    threads: list[_Thread] = []
    sent = 0
    for value in records_of(values, report):
        call = _call_of(value)
        sent += len(call.messages) if call else 0
        if call is None:
            report.skip("call_without_messages")
        elif value.get("discarded") is True:
            report.ignore("discarded")
        elif text_of(value.get("node_id")) in auxiliary:
            report.ignore("auxiliary")
        elif sent > _MAX_MESSAGES:
            report.ignore("messages_beyond_limit")
        else:
            report.used += 1
            report.note("token_ids", int(call.trained is not None))
            _place(threads, call)
    return threads


def _is_episode(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("messages"), list):
        return False
    return isinstance(value.get("tool_trace"), list) and "reward" in value and "episode_id" in value


def _is_trace(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and "steps" not in value
        and share(list_of(value.get("turns")), _is_call) >= 0.5
    )


def _is_call(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    traced = isinstance(value.get("request"), dict) and isinstance(value.get("response"), dict)
    captured = isinstance(value.get("request_messages"), list) and isinstance(
        value.get("response_message"), dict
    )
    return captured or (traced and ("loss_mask" in value or "completion_token_ids" in value))


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of the model."""

    messages: list[Record]
    answer: Record
    model: str
    trained: bool | None
    """Whether any of its tokens may be trained; None where it is not said."""
    grade: Grade | None


@dataclass(slots=True)
class _Thread:
    """A conversation that calls go on with."""

    messages: list[Record] = field(default_factory=list)
    copied: list[bool] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    model: str = ""
    grade: Grade | None = None


def _call_of(value: Record) -> _Call | None:
    """What a model call was sent and gave; None where either is missing."""
    if isinstance(value.get("request_messages"), list):
        sent, answer = value["request_messages"], dict_of(value.get("response_message"))
    else:
        choices = list_of(dict_of(value.get("response")).get("choices"))
        sent = list_of(dict_of(value.get("request")).get("messages"))
        answer = dict_of(dict_of(choices[0] if choices else None).get("message"))
    messages = [message for message in sent if is_message(message)]
    answer = {"role": "assistant", **answer}
    if not messages or not is_message(answer) or answer["role"] != "assistant":
        return None
    mask = value.get("loss_mask")
    model = text_of(dict_of(value.get("metadata")).get("model")) or text_of(
        dict_of(value.get("request")).get("model")
    )
    trained = any(bit == 1 for bit in mask) if isinstance(mask, list) else None
    return _Call(messages, answer, model, trained, _grade(value) if "reward" in value else None)


def _place(threads: list[_Thread], call: _Call) -> None:
    """Append a call to the conversation that it goes on with, or begin one."""
    keys = [_key(message) for message in call.messages]
    body = [key for key in keys if not key.startswith('["system"')]
    for thread in threads:
        own = [key for key in thread.keys if not key.startswith('["system"')]
        if len(body) >= len(own) and body[: len(own)] == own:
            new = call.messages[len(call.messages) - (len(body) - len(own)) :] if len(body) > len(own) else []
            break
    else:
        thread, new = _Thread(), call.messages
        threads.append(thread)
    # An answer in what was sent, of which there is no call here, was made elsewhere.
    for message in new:
        thread.messages.append(message)
        thread.copied.append(message.get("role") == "assistant")
        thread.keys.append(_key(message))
    thread.messages.append(call.answer)
    thread.copied.append(call.trained is False)
    thread.keys.append(_key(call.answer))
    thread.model = call.model or thread.model
    thread.grade = call.grade or thread.grade


def _key(message: Record) -> str:
    """What tells messages apart: providers and harnesses write the same message with other fields."""
    calls = []
    for call in map(dict_of, list_of(message.get("tool_calls"))):
        function = dict_of(call.get("function"))
        calls.append([text_of(function.get("name")), _canonical(function.get("arguments"))])
    text = content_text(message.get("content"), Report()).strip()
    return dumps([text_of(message.get("role")), text, calls])


def _canonical(arguments: Any) -> str:
    try:
        value = loads(arguments) if isinstance(arguments, str) else arguments
        return dumps(dict(sorted(value.items())) if isinstance(value, dict) else value)
    except (ValueError, RecursionError):
        return str(arguments)


def _with_errors(messages: tuple[Message, ...], trace: Sequence[Any], report: Report) -> tuple[Message, ...]:
    """The messages with what the trace of the calls says of errors; the two are in the same order."""
    entries = [dict_of(entry) for entry in trace]
    calls = [call for message in messages for call in message.calls if call.result is not None]
    names = [text_of(entry.get("tool_name")) for entry in entries]
    if [call.name for call in calls] != names:
        report.note("tool_trace_does_not_match", int(bool(entries or calls)))
        return messages
    flags = iter([dict_of(entry.get("result")).get("error") for entry in entries])

    def flagged(call: ToolCall) -> ToolCall:
        if call.result is None:
            return call
        error = next(flags)
        text = call.result.text
        if error and text in ("", "null"):
            text = error if isinstance(error, str) else dumps(error)
        return replace(call, result=replace(call.result, text=text, is_error=bool(error)))

    return tuple(replace(m, calls=tuple(flagged(call) for call in m.calls)) for m in messages)


def _grade(row: Record) -> Grade | None:
    """The grade of an episode; None when nobody graded it, which is not 0."""
    given = row.get("reward")
    if not isinstance(given, (int, float)) or isinstance(given, bool) or not abs(given) < 1e9:
        return None
    outcome = Outcome.SOLVED if given >= _SOLVED else Outcome.FAILED
    if row.get("done") is False:
        outcome = Outcome.TRUNCATED
    return Grade(outcome, float(given))
