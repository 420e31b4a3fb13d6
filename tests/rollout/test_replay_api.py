"""Teachers on recorded states: resumable, within a budget, and in the form that TRL reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyarrow.json import read_json

from hintloop.envs.tools import TOOLS
from hintloop.rollout.replay_api import (
    DEFAULT_TEACHERS,
    DPOPair,
    TeacherSpec,
    ToolCall,
    TraceState,
    extract_dpo_pairs,
    replay_trace,
    save_pairs,
)

from .teacher_server import Reply, TeacherServer, says, says_all, teaching

TOOL_SPECS = list(TOOLS.values())
GOOD = ToolCall(name="read_file", arguments={"path": "solution.py"})
OTHER = ToolCall(name="bash", arguments={"command": "ls"})
BAD = ToolCall(name="submit", arguments={})


def states(count: int = 2, action: ToolCall = BAD) -> list[TraceState]:
    return [TraceState([{"role": "user", "content": f"task {n}"}], TOOL_SPECS, action) for n in range(count)]


def specs(server: TeacherServer, count: int = 3, usd: float = 0.0) -> list[TeacherSpec]:
    return [
        TeacherSpec(name=f"t{n}", base_url=server.url, model=f"m{n}", usd_per_mtok_in=0, usd_per_mtok_out=usd)
        for n in range(count)
    ]


def by_model(**calls: ToolCall | None) -> Any:
    return lambda number, body: says(calls[body["model"]], {"prompt_tokens": 1, "completion_tokens": 1000})


def test_the_default_teachers_are_asked_by_one_key_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert {spec.base_url for spec in DEFAULT_TEACHERS} == {"https://openrouter.ai/api/v1"}
    assert all(spec.is_priced and not spec.is_free for spec in DEFAULT_TEACHERS)
    unpriced = [TeacherSpec(name="one", base_url="http://one/v1", model="m", usd_per_mtok_in=1.0)]
    with pytest.raises(ValueError, match="teacher one has no price"):
        replay_trace(states(), unpriced, folder=tmp_path, budget_usd=1.0)
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    with pytest.raises(ValueError, match="OPENROUTER_API_KEY is not set"):
        replay_trace(states(), folder=tmp_path)


def test_what_two_of_three_agree_on_becomes_a_pair(tmp_path: Path) -> None:
    with teaching(by_model(m0=GOOD, m1=OTHER, m2=GOOD)) as server:
        results = replay_trace(states(), specs(server, usd=1.0), folder=tmp_path)
    assert [(result.answer.teacher, *result.answer.calls) for result in results[:3]] == [
        ("t0", GOOD),
        ("t1", OTHER),
        ("t2", GOOD),
    ]
    pairs = extract_dpo_pairs(states(), results)
    assert [(pair.chosen, pair.rejected, pair.teachers) for pair in pairs] == [
        ((GOOD,), (BAD,), ("t0", "t2"))
    ] * 2
    assert pairs[0].cost_usd == pytest.approx(0.003)
    assert extract_dpo_pairs(states(), results, agreeing=3) == []
    assert extract_dpo_pairs(states(action=GOOD), results) == []


def test_the_same_state_or_teacher_twice_counts_once(tmp_path: Path) -> None:
    with teaching(by_model(m0=GOOD, m1=OTHER)) as server:
        twice = [*states(1), *states(1)]
        one, other = specs(server, 2)
        results = replay_trace(twice, [one, other, one], folder=tmp_path)
    assert extract_dpo_pairs(twice, results) == []
    (pair,) = extract_dpo_pairs(twice, results, agreeing=1)
    assert (pair.chosen, pair.asked, pair.agreed, pair.teachers) == ((GOOD,), 2, 1, ("t0",))


def test_a_turn_of_several_calls_is_one_action(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "task"}]
    same, part = (TraceState(messages, TOOL_SPECS, OTHER, further) for further in ([GOOD], []))
    with teaching(lambda number, body: says_all(OTHER, GOOD)) as server:
        results = replay_trace([same, part], specs(server, 2), folder=tmp_path)
    (pair,) = extract_dpo_pairs([same, part], results)
    assert (pair.state_id, pair.chosen, pair.rejected) == (part.state_id, (OTHER, GOOD), (OTHER,))
    assert len(pair.row()["chosen"][0]["tool_calls"]) == 2


def test_a_script_that_starts_again_asks_only_what_has_no_answer(tmp_path: Path) -> None:
    failing = {"m1"}

    def answer(number: int, body: dict[str, Any]) -> Reply:
        return Reply(b"", 400) if body["model"] in failing else says(GOOD)

    with teaching(answer) as server:
        first = replay_trace(states(), specs(server), folder=tmp_path)
        failing.clear()
        again = replay_trace(states(3), specs(server), folder=tmp_path)
        asked = [body["model"] for body in server.requests[6:]]
    assert [result.answer.calls for result in first] == [(GOOD,), (), (GOOD,)] * 2
    assert sorted(asked) == ["m0", "m1", "m1", "m1", "m2"]
    assert len(extract_dpo_pairs(states(3), again, agreeing=3)) == 3


def test_the_budget_holds_over_restarts(tmp_path: Path) -> None:
    # The worst case of a question is 2.048 USD, its cost 1.
    with teaching(by_model(m0=GOOD)) as server:
        teacher = specs(server, 1, usd=1000.0)
        for _ in range(2):
            results = replay_trace(states(9), teacher, folder=tmp_path, budget_usd=4.5, in_flight=1)
        assert len(server.requests) == 3
    assert [result.answer.over_budget for result in results] == [False] * 3 + [True] * 6
    assert all(result.answer.cached for result in results[:3])


def test_pairs_are_written_whole_in_trls_form(tmp_path: Path) -> None:
    path = tmp_path / "made" / "pairs.jsonl"
    malformed = ToolCall(malformed="<tool_call>oops")
    pairs = [
        DPOPair("a", states()[0].messages, TOOL_SPECS, [GOOD], [BAD], 3, 2),
        DPOPair("b", states()[1].messages, TOOL_SPECS, [OTHER], [malformed], 3, 2),
    ]
    assert save_pairs(pairs, path) == 2
    assert [file.name for file in path.parent.iterdir()] == ["pairs.jsonl"]
    rows = read_json(path).to_pylist()  # as `datasets` reads it: one type per column, what is missing is None
    for row, call in zip(rows, (GOOD, OTHER), strict=True):
        assert [spec["function"] for spec in json.loads(row["tools"])] == TOOL_SPECS
        function = row["chosen"][0]["tool_calls"][0]["function"]
        assert (function["name"], json.loads(function["arguments"])) == (call.name, call.arguments)
    assert rows[1]["rejected"][0]["content"] == "<tool_call>oops"
    save_pairs([], path)
    assert path.read_text() == ""


def test_a_pair_that_cannot_be_written_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text("old")
    broken = DPOPair("a", [{"role": "user", "content": object()}], [], [GOOD], [BAD], 1, 1)
    with pytest.raises(TypeError):
        save_pairs([broken], path)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("pairs.jsonl", "old")]
