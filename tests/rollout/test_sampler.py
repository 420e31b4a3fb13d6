"""Which tasks are drawn: by the seed, by weights, and where the agent both succeeds and fails."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from hintloop.replay.episode import Episode, Outcome
from hintloop.replay.journal import Journal
from hintloop.rollout.config import RolloutConfig
from hintloop.rollout.sampler import (
    CurriculumSampler,
    Result,
    TaskSampler,
    UniformSampler,
    all_equal,
    chance_of_both,
    make_sampler,
    past_results,
    result_of,
    weight_of,
)

TASKS = [f"set/t{number}" for number in range(10)]


def sampler(kind: Any = "curriculum", **weights: float) -> TaskSampler:
    return make_sampler(TASKS, 3, kind=kind, weights=weights, group_size=4)


def drawn(source: TaskSampler, n: int = 3000) -> Counter[str]:
    return Counter(source.choose(index) for index in range(n))


@pytest.mark.parametrize("kind", ["uniform", "weighted", "curriculum"])
def test_a_draw_follows_from_seed_number_and_attempt(kind: Any) -> None:
    first, again = sampler(kind), sampler(kind)
    places = [(index, attempt) for index in range(40) for attempt in range(3)]
    chosen = [first.choose(*place) for place in places]
    random.Random(1).shuffle(places)
    again_chosen = {place: again.choose(*place) for place in places}
    assert chosen == [again_chosen[place] for place in sorted(places)]
    assert len({chosen[place] for place in range(0, 120, 3)}) > 3
    assert any(chosen[3 * index] != chosen[3 * index + 1] for index in range(40))


def test_weights_are_by_the_first_pattern_that_matches() -> None:
    weights = {"set/t1": 3.0, "set/*": 0.0, "*": 9.0}
    assert [weight_of(task, weights) for task in ("set/t1", "set/t2", "other")] == [3.0, 0.0, 9.0]
    assert weight_of("set/t1", {}) == 1.0


def test_tasks_are_drawn_by_weight() -> None:
    counts = drawn(
        make_sampler(TASKS, 3, kind="weighted", weights={"set/t0": 9.0, "set/t9": 0.0}, group_size=4)
    )
    assert counts["set/t9"] == 0
    assert 0.45 < counts["set/t0"] / 3000 < 0.61  # 9 of 17


def test_weights_that_leave_no_task_are_refused() -> None:
    with pytest.raises(ValueError, match="leaves no task"):
        make_sampler(TASKS, 0, kind="weighted", weights={"*": 0.0}, group_size=4)


def test_a_curriculum_prefers_what_is_now_solved_and_now_not() -> None:
    source = sampler()
    before = drawn(source)
    for _ in range(6):
        for number, task in enumerate(TASKS):
            source.observe(Result(task, {0: 2, 1: 2}.get(number, 4 * (number % 2)), 4))
    counts = drawn(source)
    assert min(before.values()) > 200
    assert counts["set/t0"] + counts["set/t1"] > 1500
    assert all(counts[task] > 30 for task in TASKS)  # what always fails now may be solved one day


def test_a_curriculum_follows_an_agent_that_changes() -> None:
    source = sampler()
    for _ in range(10):
        source.observe(Result("set/t0", 0, 4))
    dull = drawn(source)["set/t0"]
    for _ in range(2):
        source.observe(Result("set/t0", 2, 4))
    assert drawn(source)["set/t0"] > 2 * dull


@given(
    st.floats(0.5, 50),
    st.floats(0.5, 50),
    st.integers(1, 16),
)
def test_the_chance_of_both_outcomes_is_a_chance_and_symmetric(solved: float, failed: float, n: int) -> None:
    chance = chance_of_both(solved, failed, n)
    assert 0.0 < chance < 1.0
    assert chance == pytest.approx(chance_of_both(failed, solved, n))
    assert chance == pytest.approx(sum_of_middles(solved, failed, max(n, 2)))


def sum_of_middles(solved: float, failed: float, n: int) -> float:
    """The same by adding up the beta-binomial probabilities of 1 to n - 1 solved ones."""
    from math import comb, exp, lgamma

    def beta(a: float, b: float) -> float:
        return lgamma(a) + lgamma(b) - lgamma(a + b)

    return sum(comb(n, k) * exp(beta(solved + k, failed + n - k) - beta(solved, failed)) for k in range(1, n))


def test_results_of_other_tasks_are_left_out() -> None:
    source = sampler()
    source.observe(Result("gone/t0", 1, 4))
    assert set(drawn(source, 300)) <= set(TASKS)


def episode(group: str, number: int, *, solved: bool, task: str = "set/t0") -> Episode:
    return Episode(
        episode_id=f"{group}-{number}",
        group_id=group,
        task_id=task,
        env="set",
        source="rollout",
        created_at=1.0,
        model="m",
        tokenizer_fingerprint="sha256:0",
        token_ids=(1, 2),
        loss_mask=(0, 1),
        logprobs=(0.0, -1.0),
        policy_versions=(-1, 0),
        turns=(),
        outcome=Outcome.SOLVED if solved else Outcome.FAILED,
        reward=float(solved),
    )


def test_a_group_says_something_when_two_rewards_differ() -> None:
    both = [episode("g", number, solved=number == 0) for number in range(3)]
    assert result_of(both) == Result("set/t0", 1, 3)
    assert not all_equal(both)
    assert all_equal(both[1:])
    assert not all_equal(both[:1])


def line(group: str, solved: int, time: float, task: str = "set/t0") -> str:
    return json.dumps({"group": group, "task": task, "solved": solved, "episodes": 4, "time": time}) + "\n"


def test_what_is_known_of_the_tasks_survives_a_restart(tmp_path: Path) -> None:
    """The lines give the order; a group whose line a crash took is found in the journal."""
    kept, resampled = tmp_path / "rollout.jsonl", tmp_path / "resampled.jsonl"
    kept.write_text(line("g0", 1, 10.0) + line("g1", 4, 30.0) + '{"group": "g2", "ta')
    resampled.write_text(line("g1", 0, 20.0) + "[]\n" + '{"task": 3}\n')
    journal = Journal(tmp_path / "journal")
    writer = journal.writer("rollout")
    for group, solved in (("g0", 1), ("g1", 4), ("g2", 2)):
        writer.append([episode(group, number, solved=number < solved) for number in range(4)])
    found = past_results(kept, resampled, journal, {"g0", "g1", "g2"})
    assert [result.solved for result in found] == [1, 0, 4, 2]
    live, again = sampler(), sampler()
    for result in found:
        live.observe(result)
    for result in past_results(kept, resampled, journal, {"g0", "g1", "g2"}):
        again.observe(result)
    assert drawn(live, 200) == drawn(again, 200)


def test_a_new_run_has_no_past(tmp_path: Path) -> None:
    none = tmp_path / "none"
    assert past_results(none, none, Journal(tmp_path / "journal"), set()) == []


def test_the_config_names_the_sampler_and_refuses_weights_that_nobody_reads() -> None:
    assert isinstance(sampler("uniform"), UniformSampler)
    assert isinstance(sampler(), CurriculumSampler)
    RolloutConfig(task_sampling="weighted", task_weights={"a*": 2.0})
    with pytest.raises(ValidationError, match="task_sampling weighted or curriculum"):
        RolloutConfig(task_weights={"a*": 2.0})
    with pytest.raises(ValidationError, match="must be a number"):
        RolloutConfig(task_sampling="weighted", task_weights={"a*": -1.0})
