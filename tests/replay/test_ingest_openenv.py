"""OpenEnv files: each known quirk, and that every record is accounted for."""

from __future__ import annotations

from typing import Any

import pytest

from hintloop.replay.episode import Outcome
from hintloop.replay.ingest.classify import classify
from hintloop.replay.ingest.episodes import to_episode
from hintloop.replay.ingest.report import Refused, Report

from .recordings import Record, balanced, lines, read
from .samples import (
    FAILED,
    chat_messages,
    document,
    openenv_capture,
    openenv_episode,
    openenv_trace,
    openenv_turn,
)

SPOKEN = [
    ("system", "SETTING", 0),
    ("user", "list the files", 0),
    ("assistant", "I look.", 1),
    ("assistant", "", 1),
    ("assistant", "There is a.py", 0),
]


def all_of(value: Any) -> Any:
    traces, report = read(document(value), "openenv")
    assert balanced(report)
    return traces, report


def one(value: Any) -> Any:
    (trace,), report = all_of(value)
    return trace, report


@pytest.mark.parametrize(
    "value",
    [openenv_trace(), openenv_trace()["turns"], openenv_capture(), openenv_episode(), [openenv_episode()]],
)
def test_all_forms_hold_the_same_conversation(value: Any) -> None:
    trace, _ = one(value)
    assert [(m.role, m.text, len(m.calls)) for m in trace.messages] == SPOKEN
    assert all(call.result is not None for m in trace.messages for call in m.calls)


@pytest.mark.parametrize(
    ("reward", "done", "expected"),
    [
        (1.0, True, (Outcome.SOLVED, 1.0)),
        (2, True, (Outcome.SOLVED, 2.0)),
        (0.5, True, (Outcome.FAILED, 0.5)),
        (0.0, False, (Outcome.TRUNCATED, 0.0)),
        (None, True, (Outcome.UNGRADED, None)),
        ("1", True, (Outcome.UNGRADED, None)),
        (True, True, (Outcome.UNGRADED, None)),
        (float("nan"), True, (Outcome.UNGRADED, None)),
    ],
)
def test_an_episode_keeps_its_reward_and_none_is_not_0(reward: Any, done: bool, expected: Any) -> None:
    trace, _ = one(openenv_episode(reward, done))
    episode = to_episode(trace, set(), Report())
    assert (episode.outcome, episode.reward) == expected


def test_the_trace_of_the_calls_says_which_failed() -> None:
    trace, _ = one(openenv_episode())
    first, second = (call for m in trace.messages for call in m.calls)
    assert (first.result.text, first.result.is_error, second.result.is_error) == (FAILED, True, False)
    failure = classify(first)
    assert failure is not None
    assert (failure.kind, failure.cause) == ("command_not_found", "model")


def test_a_trace_of_other_calls_is_not_used() -> None:
    value = openenv_episode()
    value["tool_trace"] = value["tool_trace"][:1]
    trace, report = one(value)
    assert [call.result.is_error for m in trace.messages for call in m.calls] == [None, None]
    assert report.notes["tool_trace_does_not_match"] == 1


def test_a_call_that_was_sent_other_messages_begins_a_conversation() -> None:
    other = openenv_turn(9, 2)
    other["request"] = {"messages": [{"role": "user", "content": "a title for this"}]}
    traces, report = all_of({"schema_version": 1, "turns": [openenv_turn(0, 2), other, openenv_turn(1, 4)]})
    assert [(t.branch, len(t.messages)) for t in traces] == [("main", 4), ("root1", 2)]
    assert report.notes["token_ids"] == 3
    assert traces[0].model == "qwen-x"


def test_a_call_goes_on_with_a_conversation_whatever_was_rewritten_in_it() -> None:
    last = openenv_turn(1, 4)
    messages = [dict(message) for message in chat_messages()[:4]]
    messages[0]["content"] = "SETTING, again"
    messages[1]["content"] = "list the files "
    function = {"name": "bash", "arguments": '{ "command" : "ls" }'}
    messages[2] = {
        **messages[2],
        "refusal": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
    }
    last["request"]["messages"] = messages
    trace, _ = one({"turns": [openenv_turn(0, 2), last]})
    assert [m.text for m in trace.messages] == ["SETTING", "list the files", "I look.", ""]


def test_answers_without_a_call_and_calls_that_may_not_be_trained_are_context_only() -> None:
    trace, _ = one({"turns": [openenv_turn(1, 4), openenv_turn(2, 6, mask=[0, 0, 0])]})
    assert [m.copied for m in trace.messages if m.role == "assistant"] == [True, False, True]


def test_discarded_and_auxiliary_calls_are_ignored_by_reason() -> None:
    value = openenv_capture()
    title, retry = (
        dict(value["turns"][0], node_id="title"),
        dict(value["turns"][0], node_id="retry", discarded=True),
    )
    value["turns"] += [title, retry]
    value["sequences"].append({"role": "auxiliary", "node_ids": ["title"]})
    trace, report = one(value)
    assert report.ignored == {"auxiliary": 1, "discarded": 1}
    assert (len(trace.messages), trace.session) == (5, "cap-1")


def test_a_capture_without_messages_is_refused() -> None:
    turns: list[Record] = [{**openenv_turn(0, 2), "request": {"messages": []}}] * 3
    with pytest.raises(Refused, match="3 call_without_messages"):
        read(document({"turns": turns}), "openenv")


def test_a_call_may_carry_the_reward() -> None:
    turns = [openenv_turn(0, 2), {**openenv_turn(1, 4), "reward": 0.0}]
    assert one(turns)[0].grade.reward == 0.0


def test_odd_lines_are_skipped_by_reason() -> None:
    traces, report = read(lines([openenv_episode()] * 4 + [{"odd": 1}]), "openenv")
    assert (len(traces), report.skipped) == (4, {"unknown_type": 1})
    assert balanced(report)
