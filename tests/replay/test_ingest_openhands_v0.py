"""OpenHands before version 1: each known quirk, and that every record is accounted for."""

from __future__ import annotations

from typing import Any

import pytest

from hintloop.replay.ingest.classify import classify
from hintloop.replay.ingest.trace import Usage

from .recordings import Record, balanced, lines, read
from .samples import document, v0_action, v0_events, v0_row, v0_seen


def one(data: bytes) -> Any:
    traces, report = read(data, "openhands_v0")
    assert balanced(report)
    (trace,) = traces
    return trace, report


@pytest.mark.parametrize(
    "data",
    [lines(v0_events()), document(v0_events()), document({"trajectory": v0_events()}), document(v0_row())],
)
def test_all_forms_hold_the_same_conversation(data: bytes) -> None:
    trace, report = one(data)
    assert [(m.role, m.text, len(m.calls)) for m in trace.messages] == [
        ("system", "You are an agent", 0),
        ("user", "list the files", 0),
        ("assistant", "I look.", 1),
        ("assistant", "", 1),
        ("assistant", "There is a.py", 0),
    ]
    call = trace.messages[2].calls[0]
    assert (call.name, call.arguments, call.result.exit_code) == ("execute_bash", '{"command": "ls"}', 127)
    assert (trace.messages[2].model, trace.messages[2].usage) == ("claude-x", Usage(7, 3))
    assert report.ignored["agent_state_changed"] == 1


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (v0_seen(4, 3, "ok", 0), None),
        (v0_seen(4, 3, "boom", 1), ("runtime_error", "model")),
        (v0_seen(4, 3, "no new output after 30 seconds", -1), ("timeout", "infra")),
        (v0_seen(4, 3, "ERROR: No replacement was performed", None, "error"), ("edit_no_match", "model")),
        (v0_seen(4, 3, "The agent is stuck", None, "error"), ("runtime_error", "model")),
        (v0_seen(4, 3, "no", None, "user_rejected"), ("permission_denied", "user")),
        (v0_seen(4, 3, "Permission denied", 0, success=False), ("permission_denied", "model")),
    ],
)
def test_errors_have_a_kind_and_a_cause(event: Record, expected: Any) -> None:
    events = [
        v0_action(1, "message", "user", content="go"),
        v0_action(3, "run", call="c1", command="ls"),
        event,
    ]
    trace, _ = one(lines(events))
    failure = classify(trace.messages[1].calls[0])
    assert (failure and (failure.kind, failure.cause)) == expected


def test_the_oldest_rows_are_flat_and_paired_by_order() -> None:
    def bare(event: Record) -> Record:
        return {
            name: value for name, value in event.items() if name not in ("id", "cause", "tool_call_metadata")
        }

    old = {"observation": "run", "content": "boom", "extras": {"command": "ls", "exit_code": 2}}
    events = [bare(event) for event in v0_events()[1:4]]
    trace, _ = one(document({"instruction": "x", "history": [*events, old, old]}))
    (call,) = trace.messages[1].calls
    assert (call.name, call.arguments, call.result.exit_code) == ("run", '{"command":"lss"}', 2)


def test_pairs_of_action_and_observation_are_read_and_the_instruction_is_the_prompt() -> None:
    events = v0_events()
    row = {**v0_row(), "history": [[events[3], events[4]], [events[5], events[6]]]}
    trace, report = one(document(row))
    assert trace.messages[0].text == "list the files"
    assert [call.result.text for m in trace.messages for call in m.calls] == [
        "bash: lss: command not found",
        "a.py",
    ]
    assert (trace.session, report.read) == ("i1", 5)


def test_calls_of_one_answer_are_one_turn_whatever_the_order_of_results() -> None:
    events = [
        v0_action(1, "message", "user", content="go"),
        v0_action(2, "run", call="c1", response="r", command="a", thought="both"),
        v0_action(3, "run", call="c2", response="r", command="b", thought="both"),
        v0_seen(5, 3, "B"),
        v0_seen(4, 2, "A"),
    ]
    trace, _ = one(lines(events))
    assert [(m.text, [call.result.text for call in m.calls]) for m in trace.messages] == [
        ("go", []),
        ("both", ["A", "B"]),
    ]


def test_the_agents_own_words_and_thoughts_stay_and_the_users_commands_do_not() -> None:
    events = [
        v0_action(1, "message", "user", content="go"),
        v0_action(2, "think", call="", thought="hm"),
        v0_seen(3, 2, "Your thought has been logged.", None, "think"),
        v0_action(4, "run", "user", command="ls"),
        v0_seen(5, 4, "a.py"),
        v0_action(6, "finish", final_thought="done", thought="bye"),
    ]
    trace, report = one(lines(events))
    assert [(call.name, call.arguments) for m in trace.messages for call in m.calls] == [
        ("think", '{"thought":"hm"}'),
        ("finish", '{"final_thought":"done"}'),
    ]
    assert report.ignored == {"action_of_the_user": 1}
    assert report.notes == {"result_without_call": 1, "call_without_result": 1}


@pytest.mark.parametrize(
    "forgotten",
    [{"forgotten_event_ids": [3, 4]}, {"forgotten_events_start_id": 3, "forgotten_events_end_id": 4}],
)
def test_a_condensation_begins_a_conversation_with_its_summary(forgotten: Record) -> None:
    condensed = v0_action(8, "condensation", **forgotten, summary="so far", summary_offset=2)
    more = [v0_action(9, "run", call="c9", command="x"), v0_seen(10, 9, "boom", 1)]
    traces, report = read(lines([*v0_events(), condensed, *more]), "openhands_v0")
    assert [(t.branch, [m.text for m in t.messages]) for t in traces] == [
        ("part0", ["You are an agent", "list the files", "I look.", "", "There is a.py"]),
        ("main", ["You are an agent", "list the files", "so far", "", "There is a.py", ""]),
    ]
    assert [m.copied for m in traces[1].messages] == [True] * 5 + [False]
    assert balanced(report)
    assert report.ignored["condensation"] == 1


def test_odd_events_and_known_ids_are_counted_by_reason() -> None:
    odd = [
        v0_events()[1],
        {"id": 20},
        {"id": 21, "action": "run", "args": "x"},
        {"id": 22, "observation": "run"},
    ]
    _, report = one(lines([*v0_events(), *v0_events(), *odd]))
    assert report.ignored["duplicate_id"] == 9
    assert report.skipped == {"unknown_type": 1, "malformed_event": 2}


def test_what_the_recorder_calls_success_is_no_grade() -> None:
    trace, report = one(document(v0_row()))
    assert trace.grade is None
    assert report.notes["success_not_verified"] == 1
