"""OpenHands events of version 1: each known quirk, and that every record is accounted for."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from hintloop.replay.ingest.classify import classify
from hintloop.replay.ingest.event_log import size_of
from hintloop.replay.ingest.ingest import find_files, ingest, read_traces
from hintloop.replay.ingest.report import Report
from hintloop.replay.journal import Journal

from .recordings import Record, balanced, lines, read
from .samples import OH_STATE, document, oh_action, oh_event, oh_events, oh_seen, oh_text, oh_user


def one(events: list[Record]) -> Any:
    traces, report = read(lines(events), "openhands")
    assert balanced(report)
    (trace,) = traces
    return trace, report


def verdict(event: Record) -> Any:
    """Kind and cause of the failure that an event is for its call."""
    trace, _ = one([oh_user(1, "go"), oh_action(2, "c1", "r1"), event])
    failure = classify(trace.messages[1].calls[0])
    return failure and (failure.kind, failure.cause)


@pytest.mark.parametrize(
    "data", [lines(oh_events()), document(oh_events()), document({"history": oh_events()})]
)
def test_lines_an_array_and_a_row_hold_the_same_conversation(data: bytes) -> None:
    (trace,), report = read(data, "openhands")
    assert [(m.role, m.text, len(m.calls)) for m in trace.messages] == [
        ("system", "You are an agent", 0),
        ("user", "list the files", 0),
        ("assistant", "I look.", 1),
        ("assistant", "", 1),
        ("assistant", "There is a.py", 0),
    ]
    assert trace.messages[2].calls[0].arguments == '{"command": "ls"}'
    assert report.ignored["ConversationStateUpdateEvent"] == 1
    assert report.notes["tool_definitions"] == 1
    assert balanced(report)


def error_event(text: str, kind: str | None) -> Record:
    about: Record = {} if kind is None else {"classification": {"kind": kind, "retryable": True}}
    return oh_event("AgentErrorEvent", 3, tool_name="terminal", tool_call_id="c1", error=text, **about)


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (oh_seen(3, "c1", "ok", 0), None),
        (oh_seen(3, "c1", "boom", 1), ("runtime_error", "model")),
        (oh_seen(3, "c1", "Cannot execute multiple commands at once.", None, True), ("type_error", "model")),
        (oh_seen(3, "c1", "[still running]", -1), ("timeout", "infra")),
        (error_event("Tool 'x' not found. Available: ['terminal']", "agent_action"), ("tool_not_found", "model")),
        (error_event("Error validating tool 'terminal': x", "agent_action"), ("type_error", "model")),
        (error_event("odd", "agent_action"), ("type_error", "model")),
        (error_event("429", "rate_limit"), ("connection_error", "infra")),
        (error_event("bad key", "auth"), ("connection_error", "infra")),
        (error_event("oops", "internal"), ("runtime_error", "infra")),
        (error_event("oops", "unknown"), ("runtime_error", "infra")),
        (error_event("Tool 'x' not found. Available: []", None), ("tool_not_found", "model")),
        (oh_event("UserRejectObservation", 3, tool_name="terminal", tool_call_id="c1", action_id="x",
                  rejection_reason="no", rejection_source="hook"), ("permission_denied", "user")),
    ],
)  # fmt: skip
def test_errors_have_a_kind_and_a_cause(event: Record, expected: Any) -> None:
    assert verdict(event) == expected


def test_calls_of_one_answer_are_one_turn_and_results_come_in_any_order() -> None:
    events = [
        oh_user(1, "go"),
        oh_action(2, "c1", "r1", thought=oh_text("both"), reasoning_content="hm"),
        oh_action(3, "c2", "r1"),
        oh_seen(4, "c2", "B"),
        oh_seen(5, "c1", "A"),
        oh_action(6, "c3", "r2", action=None),
    ]
    trace, report = one(events)
    assert [[call.result and call.result.text for call in m.calls] for m in trace.messages] == [
        [],
        ["A", "B"],
        [None],
    ]
    assert (trace.messages[1].text, trace.messages[1].thinking) == ("both", "hm")
    assert report.notes["call_without_result"] == 1


def test_a_rejection_is_paired_by_the_action_when_it_has_no_call_id() -> None:
    rejected = oh_event(
        "UserRejectObservation", 3, tool_name="terminal", action_id="e0000002", rejection_reason="no"
    )
    trace, _ = one([oh_user(1, "go"), oh_action(2, "c1", "r1"), rejected])
    assert trace.messages[1].calls[0].result.refused


def test_a_condensation_begins_a_conversation_with_its_summary() -> None:
    forgotten = [event["id"] for event in oh_events()[1:5]]
    condensed = oh_event(
        "Condensation", 9, "environment", forgotten_event_ids=forgotten, summary="so far", summary_offset=1
    )
    more = [oh_action(10, "c9", "r9"), oh_seen(11, "c9", "boom", 1)]
    traces, report = read(lines([*oh_events(), condensed, *more]), "openhands")
    assert [trace.branch for trace in traces] == ["until-e0000009", "main"]
    assert [(m.role, m.text, m.copied) for m in traces[1].messages] == [
        ("system", "You are an agent", True),
        ("user", "so far", False),
        ("assistant", "", True),
        ("assistant", "There is a.py", True),
        ("assistant", "", False),
    ]
    assert balanced(report)
    assert report.used == 10


def test_branches_of_the_tree_are_conversations_and_the_last_is_the_main_one() -> None:
    events = oh_events()
    for before, event in pairwise(events):
        event["parent_id"] = before["id"]
    events.append(oh_user(9, "other", parent_id=events[4]["id"]))
    events.append(oh_action(10, "c9", "r9", parent_id="e0000009"))
    traces, report = read(lines(events), "openhands")
    assert [(t.branch, len(t.messages)) for t in traces] == [("branch-e0000008", 5), ("main", 5)]
    assert [m.copied for m in traces[1].messages] == [True, True, True, False, False]
    assert balanced(report)


def test_an_explicit_root_begins_anew_and_a_missing_parent_is_the_event_before() -> None:
    events = [
        *oh_events(),
        oh_user(9, "new", parent_id="__root__"),
        oh_action(10, "c9", "r9", parent_id="gone"),
    ]
    traces, report = read(lines(events), "openhands")
    assert [[m.text for m in t.messages][:1] for t in traces] == [["You are an agent"], ["new"]]
    assert report.notes["parent_missing"] == 1


def test_events_with_a_known_id_or_of_odd_form_are_counted_by_reason() -> None:
    odd = [oh_events()[1], oh_event("Hologram", 12), oh_event("ActionEvent", 13), {"kind": "x"}]
    _, report = one([*oh_events(), *oh_events()[:3], *odd])
    assert report.ignored["duplicate_id"] == 4
    assert report.ignored["Hologram"] == 1
    assert report.skipped == {"malformed_event": 1, "unknown_type": 1}


@pytest.fixture
def conversation(tmp_path: Path) -> Path:
    """A conversation as the SDK keeps it: the state, and a file for each event, one of which is missing."""
    folder = tmp_path / "conversations" / "c1"
    (folder / "events").mkdir(parents=True)
    (folder / "base_state.json").write_text(json.dumps(OH_STATE))
    events = oh_events()
    for number, event in enumerate(events):
        indent = 2 if number % 2 else None
        if number != 2:
            name = f"event-{number:05d}-{number:08x}-aaaa.json"
            (folder / "events" / name).write_text(json.dumps(event, indent=indent))
    return folder


def test_the_event_files_of_a_folder_are_one_recording(conversation: Path, tmp_path: Path) -> None:
    files = find_files([conversation])
    assert [file.name for file in files] == ["event-00000-00000000-aaaa.json"]
    assert size_of(files[0]) > 1000
    (report,) = ingest(files, Journal(tmp_path / "journal"))
    (episode,) = Journal(tmp_path / "journal").reader().poll()
    assert (report.format, report.traces, report.sites) == ("openhands", 1, 1)
    assert (report.ignored, report.notes["event_file_missing"]) == ({"state": 1, "event_file_missing": 1}, 1)
    assert (episode.model, episode.task_id) == ("gpt-x", "openhands/conversation-1")
    assert balanced(report)


def test_any_event_file_or_the_state_stands_for_its_folder(conversation: Path) -> None:
    events = sorted((conversation / "events").iterdir())
    assert find_files([events[3], conversation / "base_state.json"]) == [events[0]]
    (trace,) = read_traces(events[3], Report())
    assert len(trace.messages) == 5


def test_names_of_users_and_hosts_are_not_taken() -> None:
    trace, _ = one(oh_events())
    assert "'me'" not in str(trace)
    assert "hostname" not in str(trace)
