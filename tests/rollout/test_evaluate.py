"""The fixed evaluation: the same tasks, an honest interval, and no row twice."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hintloop.agent.engine import Sampling
from hintloop.rollout.evaluate import Evaluation, draw_tasks, evaluate, wilson
from hintloop.rollout.manager import TooManyLost

TASKS = [f"bugfix/t{number}" for number in range(12)]


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_the_interval_holds_the_rate_and_stays_within_0_and_1(case: tuple[int, int]) -> None:
    solved, n = case
    low, high = wilson(solved, n)
    assert 0.0 <= low <= solved / n <= high <= 1.0


def test_the_interval_is_wilsons() -> None:
    assert wilson(5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    assert wilson(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert wilson(0, 0) == (0.0, 1.0)


def test_a_smaller_evaluation_has_the_first_tasks_of_a_larger_one() -> None:
    large = draw_tasks(TASKS, 30, seed=3)
    assert draw_tasks(TASKS, 10, seed=3) == large[:10]
    assert sorted(large[:12]) == sorted(TASKS)
    assert draw_tasks(TASKS, 10, seed=4) != large[:10]


def test_it_counts_what_was_solved_and_which_errors_were_made(make_player: Any, world: Any) -> None:
    tiny = world(reward=lambda episode_id: float(int(episode_id[-4:]) % 3 == 0))
    result, episodes = asyncio.run(evaluate(make_player(), tiny.session, TASKS, Sampling(0.0, 400), 5))
    assert (result.n, result.solved, result.lost) == (12, 4, 0)
    assert result.rate == pytest.approx(1 / 3)
    assert result.errors_by_kind == {"file_not_found": 1.0}
    assert result.turns_per_episode == 2
    assert [episode.task_id for episode in episodes] == TASKS
    assert {episode.source for episode in episodes} == {"evaluation"}
    assert tiny.most_open == 5


def test_a_lost_episode_is_played_again_and_otherwise_reported_not_scored(
    make_player: Any, world: Any
) -> None:
    tiny = world(lose=lambda episode_id: episode_id.endswith("0001") or "0002" in episode_id)
    result, _ = asyncio.run(evaluate(make_player(), tiny.session, TASKS, Sampling(1.0, 400), 12))
    assert (result.n, result.solved, result.lost) == (11, 11, 1)


def test_an_evaluation_without_any_episode_is_no_result(make_player: Any, world: Any) -> None:
    tiny = world(lose=lambda episode_id: True)
    with pytest.raises(TooManyLost, match="all 2 episodes were lost"):
        asyncio.run(evaluate(make_player(), tiny.session, TASKS[:2], Sampling(1.0, 400), 2))


def test_rows_that_are_there_are_not_measured_again(make_player: Any, world: Any, tmp_path: Path) -> None:
    tiny = world()
    said: list[str | None] = []
    evaluation = Evaluation(tmp_path, {"heldmut": TASKS, "heldfn": TASKS[:6]}, (1.0, 0.0), 400, 4, 1)

    def run(label: str) -> list[dict[str, Any]]:
        return asyncio.run(evaluation.run(label, 0, 5, make_player(), tiny.session, said.append))

    made = run("before")
    assert [(row["split"], row["temperature"], row["n"]) for row in made] == [
        ("heldmut", 1.0, 5),
        ("heldmut", 0.0, 5),
        ("heldfn", 1.0, 5),
        ("heldfn", 0.0, 5),
    ]
    assert run("before") == []
    assert tiny.played.total() == 20
    with evaluation.rows_file.open("a") as file:
        file.write('{"label": "aft')  # what a crash leaves
    assert len(evaluation.rows()) == 4
    assert "evaluating before-v0-heldmut-t1: 5 of 5" in said
    assert said[-1] is None
    kept = json.loads((tmp_path / "examples" / "before-v0-heldfn-t0-0.json").read_text())
    assert kept["task_id"] == TASKS[0]
    assert kept["outcome"] == "solved"
