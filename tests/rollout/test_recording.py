"""A recorded episode as teachers see it: whole turns, valid requests, and nothing of what comes later."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hintloop.envs.models import ToolCall
from hintloop.replay.episode import Turn
from hintloop.replay.ingest.episodes import NO_RESULT
from hintloop.rollout.asking import AskRule, Reason
from hintloop.rollout.recording import SYSTEM_PROMPT, Recording, cut_history, turn_of

from .recordings import agent, call, episode, recorded, user

ERRORS = AskRule(agree=1, ask_probability=0.0, max_asks=3, deadline_s=1.0)
ALL = replace(ERRORS, ask="all", max_asks=9)


def test_errors_are_asked_about_and_by_choice_every_turn_with_a_call() -> None:
    made = Recording(episode())
    assert [(state.turn, state.reason) for state in made.states(ERRORS)] == [(1, Reason.ERROR)]
    assert [(state.turn, state.reason) for state in made.states(ALL)] == [
        (1, Reason.ERROR),
        (3, Reason.ALL),
        (5, Reason.ALL),
    ]
    assert len(made.states(replace(ALL, max_asks=2))) == 2


def test_uncertainty_is_not_known_of_a_recording() -> None:
    with pytest.raises(ValueError, match="no log-probabilities"):
        Recording(episode()).states(replace(ERRORS, ask="uncertain"))


def test_messages_are_those_before_the_turn_with_a_result_for_every_call() -> None:
    told = Recording(episode()).messages(8)
    assert [message["role"] for message in told] == [
        *("system", "user"),
        *("assistant", "tool"),
        *("assistant", "tool"),
        *("assistant", "tool", "tool"),
    ]
    assert told[0]["content"] == SYSTEM_PROMPT
    for number, message in enumerate(told):
        calls = [made["id"] for made in message.get("tool_calls", ())]
        assert calls == [each["tool_call_id"] for each in told[number + 1 : number + 1 + len(calls)]]
    assert told[-1]["content"] == NO_RESULT
    assert [turn_of(message) for message in told if message["role"] == "assistant"] == [1, 3, 5]
    assert len(Recording(episode()).messages(1)) == 2


def test_a_system_prompt_of_its_own_is_kept_and_a_nameless_result_is_the_users() -> None:
    nameless = Turn("tool", 0, 0, "error: not JSON")
    made = recorded(
        Turn("system", 0, 0, "be brief"), user("go"), agent("{"), nameless, agent(), call("a", {})
    )
    told = Recording(made).messages(4)
    assert [(message["role"], message["content"]) for message in told] == [
        ("system", "be brief"),
        ("user", "go"),
        ("assistant", "{"),
        ("user", "error: not JSON"),
    ]
    assert Recording(recorded(user("go"), agent()), system_prompt=None).messages(1) == [
        {"role": "user", "content": "go"}
    ]


def test_tools_are_told_from_the_calls_by_names_that_chat_apis_take() -> None:
    made = Recording(episode())
    shell, read = sorted(made.tools, key=lambda tool: tool["name"], reverse=True)
    assert shell["name"] == "shell"
    assert shell["parameters"] == {
        "type": "object",
        "properties": {"command": {"type": "string"}},
        "required": ["command"],
    }
    assert read["name"] == "read_file"
    assert read["parameters"]["properties"]["lines"] == {"type": "array", "items": {}}
    answer = made.recorded_call(ToolCall(name="read_file", arguments={"path": "b"}))
    assert answer == ToolCall(name="read.file", arguments={"path": "b"})


def test_no_two_tools_get_the_same_name() -> None:
    names = ["a.b", "a_b", "a b", "x" * 90, "x" * 91]
    made = Recording(recorded(user("go"), agent(), *(call(name, {}) for name in names)))
    safe = [tool["name"] for tool in made.tools]
    assert len(set(safe)) == len(names)
    assert all(len(name) <= 64 for name in safe)
    assert {made.recorded_call(ToolCall(name=name)).name for name in safe} == set(names)


@given(limit=st.integers(0, 60), sizes=st.lists(st.integers(0, 12), min_size=4, max_size=4))
def test_a_cut_history_fits_and_keeps_opening_end_and_whole_turns(limit: int, sizes: list[int]) -> None:
    turns = [user("u" * 5)]
    for size in sizes:
        turns += [agent("a"), call("f", {}, "r" * size)]
    whole = Recording(recorded(*turns, agent(), call("f", {})), system_prompt=None).messages(len(turns))
    cut = cut_history(whole, limit, len)
    if cut is None:
        return
    told = sum(
        len(each["content"]) + (len(str(each["tool_calls"])) if "tool_calls" in each else 0) for each in cut
    )
    assert told <= limit + 9 * len(cut)  # str() of a call is not quite its JSON
    assert cut[0] == whole[0]
    assert cut[1:] == whole[len(whole) - len(cut) + 1 :]
    assert len(cut) == 1 or cut[1]["role"] == "assistant"


def test_without_a_limit_all_is_shown_and_what_cannot_fit_is_none() -> None:
    whole = Recording(episode()).messages(5)
    assert cut_history(whole, None) == whole
    assert cut_history(whole, 10_000) == whole
    assert cut_history(whole, 1) is None
