"""The manager: groups whole or not at all, lost episodes replaced, the same tasks after a restart."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hintloop.agent.engine import EngineError, Sampling
from hintloop.agent.episode import Player
from hintloop.replay.episode import Episode
from hintloop.rollout.manager import GroupRule, Manager, TooManyLost, group_id
from hintloop.rollout.pacing import Pacer
from hintloop.rollout.sampler import choose_task
from hintloop.rollout.status import Board
from hintloop.rollout.teaching import Asking

TASKS = [f"bugfix/t{number}" for number in range(10)]
task_of = partial(choose_task, TASKS, 7)


def play(
    player: Player,
    world: Any,
    folder: Path,
    *,
    done: set[str] | None = None,
    append: Callable[[Sequence[Episode]], object] | None = None,
    asking: Asking | None = None,
    allowed: int = 3,
    **rule: Any,
) -> tuple[list[list[Episode]], Board]:
    """Play until ``allowed`` groups are in the journal; the segments in the order of their appends."""
    segments: list[list[Episode]] = []
    board = Board()
    settings: dict[str, Any] = {
        "group_size": 4,
        "episodes_in_flight": 6,
        "tries_per_episode": 3,
        "max_groups_lost": 3,
        "idle_timeout_s": 20.0,
        **rule,
    }

    async def run() -> None:
        pacer = Pacer(groups_per_step=allowed, max_staleness=0, journalled=len(done or ()), version=0)
        manager = Manager(
            player=player,
            sampling=Sampling(1.0, 400),
            open_environment=world.session,
            task_of=task_of,
            append=append or (lambda episodes: segments.append(list(episodes))),
            pacer=pacer,
            rule=GroupRule(**settings),
            board=board,
            metrics=folder / "metrics.jsonl",
            asking=asking,
        )
        playing = asyncio.create_task(manager.run(done or set()))
        while not playing.done():
            if pacer.journalled == allowed and "waiting for the learner" in board.state:
                break
            await asyncio.sleep(0.005)
        if not playing.done():
            playing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await playing

    asyncio.run(run())
    return segments, board


def test_each_group_is_journalled_whole_as_one_segment(make_player: Any, world: Any, tmp_path: Path) -> None:
    tiny = world(reward=lambda episode_id: float(episode_id.endswith("0")))
    segments, board = play(make_player(), tiny, tmp_path)
    assert sorted(segment[0].group_id for segment in segments) == [group_id(0), group_id(1), group_id(2)]
    for segment in segments:
        index = int(segment[0].group_id[1:])
        assert {episode.group_id for episode in segment} == {group_id(index)}
        assert {episode.task_id for episode in segment} == {task_of(index)}
        assert sorted(episode.reward for episode in segment) == [0.0, 0.0, 0.0, 1.0]
        assert len({episode.episode_id for episode in segment}) == 4
        assert all(len(episode.hint_sites) == 1 for episode in segment)
    assert (board.episodes, board.hint_sites, board.groups_started) == (12, 12, 3)
    assert board.tool_errors == {"file_not_found": 12}
    assert board.success_rate == 0.25
    assert "waiting for the learner to publish version 1" in board.state
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["reward_mean"] for line in lines] == [0.25] * 3
    assert lines[0]["errors"] == {"file_not_found": 4}


def test_no_more_episodes_are_in_flight_than_allowed(make_player: Any, world: Any, tmp_path: Path) -> None:
    tiny = world(seconds=0.01)
    play(make_player(), tiny, tmp_path, episodes_in_flight=5)
    assert tiny.most_open == 5


def test_a_lost_episode_is_replaced_and_never_journalled(
    make_player: Any, world: Any, tmp_path: Path
) -> None:
    tiny = world(lose=lambda episode_id: episode_id == "g000001-2")
    segments, board = play(make_player(), tiny, tmp_path)
    ids = [episode.episode_id for segment in segments for episode in segment]
    assert len(ids) == 12
    assert "g000001-2" not in ids
    assert "g000001-2.1" in ids
    assert dict(board.lost) == {"environment": 1}
    assert all(episode.reward is not None for segment in segments for episode in segment)


def test_a_group_with_an_episode_lost_for_good_is_dropped_and_another_takes_its_place(
    make_player: Any, world: Any, tmp_path: Path
) -> None:
    tiny = world(lose=lambda episode_id: episode_id.startswith("g000001-2"))
    segments, board = play(make_player(), tiny, tmp_path, tries_per_episode=2)
    assert sorted(segment[0].group_id for segment in segments) == [group_id(0), group_id(2), group_id(3)]
    assert board.groups_dropped == 1
    assert dict(board.lost) == {"environment": 2}


def test_a_dead_engine_ends_the_run_with_the_reason(make_player: Any, world: Any, tmp_path: Path) -> None:
    def broken(session: str, turn: int) -> str:
        raise EngineError("the engine is gone")

    with pytest.raises(TooManyLost, match=r"2 groups in a row.*engine"):
        play(make_player(broken), world(), tmp_path, max_groups_lost=2, tries_per_episode=1)


def test_a_bug_in_one_episode_costs_that_episode_only(make_player: Any, world: Any, tmp_path: Path) -> None:
    tiny = world(reward=lambda episode_id: {"g000000-0": "no number"}.get(episode_id, 1.0))
    segments, board = play(make_player(), tiny, tmp_path)
    assert len(segments) == 3
    assert list(board.lost) == ["bug:ValidationError"]


def test_a_restart_skips_what_is_journalled_and_chooses_the_same_tasks(
    make_player: Any, world: Any, tmp_path: Path
) -> None:
    first, _ = play(make_player(), world(), tmp_path, allowed=5)
    done = {group_id(0), group_id(3)}
    again, _ = play(make_player(), world(), tmp_path, done=done, allowed=5)
    tasks = {segment[0].group_id: segment[0].task_id for segment in first}
    assert sorted(segment[0].group_id for segment in again) == [group_id(1), group_id(2), group_id(4)]
    assert all(tasks[segment[0].group_id] == segment[0].task_id for segment in again)
    assert len(set(tasks.values())) > 1


def test_a_journal_that_fails_ends_the_run(make_player: Any, world: Any, tmp_path: Path) -> None:
    def full(episodes: Sequence[Episode]) -> object:
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="disk is full"):
        play(make_player(), world(), tmp_path, append=full, storage_timeout_s=0.3)


def test_cancelling_drops_unfinished_groups_at_once(make_player: Any, world: Any, tmp_path: Path) -> None:
    segments: list[Sequence[Episode]] = []

    async def run() -> None:
        manager = Manager(
            player=make_player(),
            sampling=Sampling(1.0, 400),
            open_environment=world(seconds=30.0).session,
            task_of=task_of,
            append=segments.append,
            pacer=Pacer(groups_per_step=3, max_staleness=0, journalled=0, version=0),
            rule=GroupRule(4, 6, 3, 3, 60.0),
            board=Board(),
            metrics=tmp_path / "metrics.jsonl",
        )
        task = asyncio.create_task(manager.run(set()))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 20)

    asyncio.run(run())
    assert not segments
