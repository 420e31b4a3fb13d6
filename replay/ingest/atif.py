"""ATIF (Agent Trajectory Interchange Format) 1.0 to 1.8: one trajectory per document, or one per line.

A step of the agent holds its calls and their results. Trajectories of sub-agents are conversations of their own, and
so are the steps that a converter marked as a side chain. Steps that were copied from an earlier trajectory, or that
no model produced, are context only. The format has no place for errors: flags, exit codes and verdicts are ``extra``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from hintloop.replay.episode import Outcome
from hintloop.replay.ingest.chat import content_text, tool_result
from hintloop.replay.ingest.document import Unusable, converted, read_documents, records_of, share, values_of
from hintloop.replay.ingest.drafts import Draft, Drafts
from hintloop.replay.ingest.head import Head
from hintloop.replay.ingest.lines import Record, parse
from hintloop.replay.ingest.report import Report
from hintloop.replay.ingest.trace import Failure, Grade, ToolResult, Trace, Usage
from hintloop.replay.ingest.values import (
    arguments_of,
    dict_of,
    integer_of,
    list_of,
    seconds_of,
    text_of,
    unix_time,
)

EXTRA = "hintloop"
"""Name of the object in ``extra`` that holds what an export of ours adds."""
_VERSION = re.compile(r"ATIF-v1\.[0-8]")
_ROLES = {"system": "system", "user": "user", "agent": "assistant"}
_STEP = frozenset(
    ["step_id", "timestamp", "source", "model_name", "reasoning_effort", "message", "reasoning_content",
     "tool_calls", "observation", "metrics", "is_copied_context", "llm_call_count", "extra"]
)  # fmt: skip
_FLAGS = ("tool_result_is_error", "is_error")


@dataclass(frozen=True, slots=True)
class Atif:
    """The format; see ``detect.Format``."""

    name: str = "atif"

    def sniff(self, head: Head) -> float:
        """Share of the first values that are trajectories."""
        return share(values_of(head), _is_trajectory)

    def read(self, stream: BinaryIO, report: Report) -> Iterator[Trace]:
        """As ``detect.Format``. A trajectory of another version is skipped."""
        return read_documents(stream, report, self._convert)

    def _convert(self, value: Any, report: Report) -> list[Trace]:
        if isinstance(value, list):
            return [t for row in records_of(value, report) for t in converted(row, self._convert, report)]
        if not _is_trajectory(value):
            raise Unusable("unknown_type")
        if _VERSION.fullmatch(text_of(value.get("schema_version"))) is None:
            raise Unusable("schema_version_not_known")
        return self._trajectory(value, "", report)

    def _trajectory(self, value: Record, branch: str, report: Report) -> list[Trace]:
        agent = dict_of(value.get("agent"))
        report.note("tool_definitions", int(bool(agent.get("tool_definitions"))))
        report.note("continued_elsewhere", int(bool(value.get("continued_trajectory_ref"))))
        steps = list(records_of(value.get("steps"), report))
        report.note(
            "step_id_out_of_order", int([s.get("step_id") for s in steps] != list(range(1, len(steps) + 1)))
        )
        main = [step for step in steps if not _is_aside(step)]
        aside = [step for step in steps if _is_aside(step)]
        version = " ".join(filter(None, [text_of(agent.get("name")), text_of(agent.get("version"))]))
        grade = _grade(dict_of(dict_of(value.get("extra")).get(EXTRA)))
        session = text_of(value.get("session_id")) or text_of(value.get("trajectory_id"))
        traces = []
        for name, part in ((branch or "main", main), (f"{branch}side", aside)):
            messages = _Reader(report, text_of(agent.get("model_name"))).read(part)
            if messages:
                own = grade if part is main else None
                traces.append(Trace(self.name, session, name, messages, (version,) if version else (), own))
        for number, sub in enumerate(records_of(value.get("subagent_trajectories"), report), 1):
            if not _is_trajectory(sub):
                report.skip("unknown_type")
                continue
            report.used += 1
            traces += self._trajectory(sub, f"{branch}{text_of(sub.get('trajectory_id')) or number}/", report)
        return traces


def _is_trajectory(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("schema_version"), str):
        return False
    steps = value.get("steps")
    return isinstance(value.get("agent"), dict) and isinstance(steps, list) and share(steps, _is_step) >= 0.5


def _is_step(value: Any) -> bool:
    return isinstance(value, dict) and text_of(value.get("source")) in _ROLES and "message" in value


def _is_aside(step: Record) -> bool:
    return dict_of(step.get("extra")).get("is_sidechain") is True


def _grade(extra: dict[str, Any]) -> Grade | None:
    """The grade that an export of ours wrote down; None for any other."""
    outcome, reward = extra.get("outcome"), extra.get("reward")
    if outcome not in list(Outcome) or not (reward is None or type(reward) in (int, float)):
        return None
    if (reward is None) != (outcome in (Outcome.INFRA_ERROR, Outcome.UNGRADED)):
        return None
    parts = {n: float(v) for n, v in dict_of(extra.get("reward_parts")).items() if type(v) in (int, float)}
    return Grade(Outcome(outcome), None if reward is None else float(reward), parts)


class _Reader:
    """Turns steps into messages."""

    def __init__(self, report: Report, model: str) -> None:
        self._report, self._model = report, model
        self._drafts = Drafts(report)

    def read(self, steps: list[Record]) -> Any:
        for step in steps:
            content = step.get("message")
            if text_of(step.get("source")) not in _ROLES or not (
                content is None or isinstance(content, (str, list))
            ):
                self._report.skip("malformed_step")
                continue
            self._drafts.taken += 1
            self._report.note("unknown_field", len(step.keys() - _STEP))
            self._step(step, _ROLES[step["source"]], content_text(content, self._report))
        return self._drafts.finish()

    def _step(self, step: Record, role: str, text: str) -> None:
        dispatched = role == "assistant" and step.get("llm_call_count") == 0
        self._report.note("step_without_model", int(dispatched))
        own = dict_of(dict_of(step.get("extra")).get(EXTRA))
        role = "tool" if role == "user" and own.get("role") == "tool" else role
        draft = Draft(role, [text], timestamp=unix_time(step.get("timestamp")))
        draft.copied = step.get("is_copied_context") is True or dispatched
        self._drafts.add(draft)
        if role == "assistant":
            self._own(draft, step)
        results = list_of(dict_of(step.get("observation")).get("results"))
        for result in map(dict_of, results):
            self._result(draft, result)

    def _own(self, draft: Draft, step: Record) -> None:
        draft.model = text_of(step.get("model_name")) or self._model
        draft.thoughts.append(text_of(step.get("reasoning_content")))
        self._report.note("thinking", int(bool(step.get("reasoning_content"))))
        metrics = dict_of(step.get("metrics"))
        counts = [integer_of(metrics.get(name)) or 0 for name in ("prompt_tokens", "completion_tokens")]
        draft.usage = Usage(*counts) if metrics else None
        self._report.note("token_ids", int(bool(metrics.get("completion_token_ids"))))
        for call in map(dict_of, list_of(step.get("tool_calls"))):
            name = text_of(call.get("function_name"))
            self._drafts.call(draft, text_of(call.get("tool_call_id")), name, _arguments(call))
        draft.failure = _failure(dict_of(dict_of(step.get("extra")).get(EXTRA)))

    def _result(self, draft: Draft, result: Record) -> None:
        """A result goes to its call; one without is what the environment said next."""
        text = content_text(result.get("content"), self._report)
        refs = list_of(result.get("subagent_trajectory_ref"))
        self._report.note("result_of_subagent", int(bool(refs)))
        call_id, extra = text_of(result.get("source_call_id")), dict_of(result.get("extra"))
        own = dict_of(extra.get(EXTRA))
        call = next((c for c in draft.calls if call_id and c.call_id == call_id and c.result is None), None)
        if call is not None:
            self._drafts.answer_call(call, _tool_result(text, extra, own))
        elif call_id:
            self._report.note("result_without_call")
        else:
            role = "tool" if own.get("role") == "tool" else "user"
            self._drafts.say(role, text, copied=draft.copied)


def _arguments(call: Record) -> str:
    """Arguments as JSON text; where an export of ours holds the very text, that one."""
    text = dict_of(dict_of(call.get("extra")).get(EXTRA)).get("arguments")
    if isinstance(text, str) and parse(text.encode("utf-8", "replace"))[1] != "broken":
        return text
    return arguments_of(call.get("arguments"))


def _tool_result(text: str, extra: dict[str, Any], own: dict[str, Any]) -> ToolResult:
    told = tool_result(text)
    flag = next((extra[name] for name in _FLAGS if isinstance(extra.get(name), bool)), None)
    code = integer_of(extra.get("exit_code"))
    if own:
        code = integer_of(own.get("exit_code"))
        return ToolResult(text, exit_code=code, seconds=seconds_of(own.get("seconds")), judged=True)
    return ToolResult(
        text,
        is_error=told.is_error if flag is None else flag,
        exit_code=told.exit_code if code is None else code,
    )


def _failure(own: dict[str, Any]) -> Failure | None:
    kind, cause = text_of(own.get("error_kind")), text_of(own.get("error_cause"))
    return Failure(kind, cause, text_of(own.get("error_message"))) if kind and cause else None
