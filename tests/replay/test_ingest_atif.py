"""ATIF files: each known quirk, and that every record is accounted for."""

from __future__ import annotations

from typing import Any

import pytest

from hintloop.replay.ingest.classify import classify
from hintloop.replay.ingest.report import Refused
from hintloop.replay.ingest.trace import Usage

from .recordings import Record, balanced, lines, read
from .samples import FAILED, atif_call, atif_document, atif_step, document


def all_of(value: Any) -> Any:
    traces, report = read(document(value), "atif")
    assert balanced(report)
    return traces, report


def one(steps: list[Record], **more: Any) -> Any:
    (trace,), report = all_of({**atif_document(), "steps": steps, **more})
    return trace, report


def seen(call_id: str | None, content: Any = "ok", **extra: Any) -> Record:
    result = {"content": content, **({"extra": extra} if extra else {})}
    return result if call_id is None else {"source_call_id": call_id, **result}


def acts(number: int, *results: Record, **more: Any) -> Record:
    return atif_step(
        number, "agent", "", tool_calls=[atif_call("c1")], observation={"results": list(results)}, **more
    )


USER = atif_step(1, "user", "go")


def test_steps_are_messages_with_calls_results_thoughts_and_usage() -> None:
    (trace,), report = all_of(atif_document())
    assert [(m.role, m.text, len(m.calls)) for m in trace.messages] == [
        ("system", "SETTING", 0),
        ("user", "list the files", 0),
        ("assistant", "I look.", 1),
        ("assistant", "", 1),
        ("assistant", "There is a.py", 0),
    ]
    first = trace.messages[2]
    assert (first.thinking, first.model, first.usage) == ("hm", "gpt-x", Usage(9, 4))
    assert trace.messages[3].model == "gpt-y"
    failure = classify(first.calls[0])
    assert failure is not None
    assert (failure.kind, failure.cause, failure.message) == ("command_not_found", "model", FAILED)
    assert (trace.session, trace.versions) == ("a1", ("harbor 1",))
    assert report.notes == {"tool_definitions": 1, "thinking": 1}
    assert trace.grade is None


@pytest.mark.parametrize("number", range(9))
def test_versions_1_0_to_1_8_are_read(number: int) -> None:
    assert all_of({**atif_document(), "schema_version": f"ATIF-v1.{number}"})[0]


@pytest.mark.parametrize("version", ["ATIF-v1.9", "ATIF-v2.0", "1.8", ""])
def test_another_version_is_refused_in_one_line(version: str) -> None:
    with pytest.raises(Refused, match="1 schema_version_not_known"):
        read(document({**atif_document(), "schema_version": version}), "atif")


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (seen("c1", "ok"), None),
        (seen("c1", "ok", tool_result_is_error=False), None),
        (seen("c1", "Traceback", tool_result_is_error=True), ("runtime_error", "model")),
        (seen("c1", "boom", exit_code=2), ("runtime_error", "model")),
        (seen("c1", '{"output": "boom", "exit_code": 1}'), ("runtime_error", "model")),
        (seen("c1", f"Error: {FAILED}"), ("command_not_found", "model")),
        (
            seen("c1", "The user doesn't want to proceed", tool_result_is_error=True),
            ("permission_denied", "user"),
        ),
    ],
)
def test_errors_have_a_kind_and_a_cause(result: Record, expected: Any) -> None:
    trace, _ = one([USER, acts(2, result)])
    failure = classify(trace.messages[1].calls[0])
    assert (failure and (failure.kind, failure.cause)) == expected


def test_parallel_calls_are_one_turn_and_results_name_their_calls() -> None:
    calls = [atif_call("c1"), atif_call("c2"), atif_call("c3")]
    results = [seen("c2", "B"), seen("c1", "A"), seen("c9", "?"), seen("c2", "again")]
    trace, report = one([USER, atif_step(2, "agent", "", tool_calls=calls, observation={"results": results})])
    assert [call.result and call.result.text for call in trace.messages[1].calls] == ["A", "B", None]
    assert report.notes["result_without_call"] == 2
    assert report.notes["call_without_result"] == 1


def test_what_answers_no_call_is_what_the_environment_said() -> None:
    trace, _ = one(
        [
            USER,
            acts(2, seen(None, "note")),
            atif_step(3, "system", "up", observation={"results": [seen(None, "log")]}),
        ]
    )
    assert [(m.role, m.text) for m in trace.messages[2:]] == [
        ("user", "note"),
        ("system", "up"),
        ("user", "log"),
    ]


def test_copied_steps_and_those_without_a_model_are_context_only() -> None:
    steps = [
        USER,
        acts(2, seen("c1", "boom", exit_code=1), is_copied_context=True),
        acts(3, llm_call_count=0),
        acts(4),
    ]
    trace, report = one(steps)
    assert [m.copied for m in trace.messages] == [False, True, True, False]
    assert report.notes["step_without_model"] == 1


def test_sub_agents_and_side_chains_are_conversations_of_their_own() -> None:
    sub = {**atif_document(), "trajectory_id": "sub-1", "session_id": "a1"}
    reference = {"source_call_id": "c1", "subagent_trajectory_ref": [{"trajectory_id": "sub-1"}]}
    steps = [USER, acts(2, reference), atif_step(3, "agent", "aside", extra={"is_sidechain": True})]
    traces, report = all_of({**atif_document(), "steps": steps, "subagent_trajectories": [sub]})
    assert [(t.branch, len(t.messages)) for t in traces] == [("main", 2), ("side", 1), ("sub-1/", 5)]
    assert report.notes["result_of_subagent"] == 1
    assert report.used == 1 + 3 + 1 + 5


def test_parts_that_are_no_text_leave_their_kind() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image", "source": {}}, {"type": "audio", "source": {}}]
    trace, report = one([atif_step(1, "user", parts), acts(2, seen("c1", parts))])
    assert trace.messages[0].text == trace.messages[1].calls[0].result.text == "a\n[image]\n[audio]"
    assert (report.notes["image"], report.notes["audio"]) == (2, 2)


def test_broken_rules_of_the_format_are_noted() -> None:
    trace, report = one(
        [{**USER, "step_id": 7, "mood": "good"}, acts(2)], continued_trajectory_ref="next.json"
    )
    assert len(trace.messages) == 2
    for note in ("step_id_out_of_order", "unknown_field", "continued_elsewhere"):
        assert report.notes[note] == 1


def test_odd_steps_and_lines_are_skipped_by_reason() -> None:
    steps = [
        *atif_document()["steps"],
        *atif_document()["steps"],
        {"source": "ghost", "message": ""},
        {**USER, "message": 5},
    ]
    _, report = one(steps)
    assert report.skipped == {"malformed_step": 2}
    data = lines([atif_document()] * 4 + [{"odd": 1}])
    traces, report = read(data, "atif")
    assert (len(traces), report.skipped) == (4, {"unknown_type": 1})
    assert balanced(report)
