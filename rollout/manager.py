"""The rollout manager: groups of episodes, many at a time, whole groups into the journal.

The order of tasks follows from the seed alone, so a manager that starts again goes on where the journal ends:
what is not there is played (again), what is there is skipped. An episode that the infrastructure loses is
played again; only a whole group is ever written.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import structlog

from hintloop.agent.engine import Sampling
from hintloop.agent.episode import Environment, EpisodeLost, EpisodeSpec, Played, Player
from hintloop.envs.client import EnvironmentLost
from hintloop.replay.episode import Episode, Outcome
from hintloop.rollout.pacing import Pacer
from hintloop.rollout.status import Board, append_line
from hintloop.rollout.teaching import Asking, Watch

OpenEnvironment = Callable[[], AbstractAsyncContextManager[Environment]]
"""Opens one environment for one episode; waits while the server is full. Raises ``EnvironmentLost``."""
Append = Callable[[Sequence[Episode]], object]
"""Writes a whole group to the journal; blocks."""

RETRY_PAUSE_S = 0.2
_log = structlog.get_logger(__name__)


class TooManyLost(Exception):
    """Group after group was lost to the infrastructure: something is broken for good."""


@dataclass(frozen=True, slots=True)
class GroupRule:
    """How groups are played."""

    group_size: int
    episodes_in_flight: int
    tries_per_episode: int
    max_groups_lost: int
    idle_timeout_s: float


@dataclass(slots=True)
class _Group:
    group_id: str
    task_id: str
    version: int
    started: float
    dead: bool = False
    """One of its episodes is lost for good."""


def group_id(index: int) -> str:
    """The id of the group number ``index`` of a run."""
    return f"g{index:06d}"


def choose_task(task_ids: Sequence[str], seed: int, index: int) -> str:
    """The task of group number ``index``: a function of the seed alone."""
    return random.Random(f"task:{seed}:{index}").choice(task_ids)


async def play_until_kept(
    play: Callable[[EpisodeSpec], Awaitable[Played]],
    spec: EpisodeSpec,
    *,
    tries: int,
    on_lost: Callable[[str], None],
) -> Played | None:
    """Play an episode, again under a new id when it is lost; None when every try was.

    Whatever goes wrong inside of one episode is counted and logged, and costs that try only.
    """
    for number in range(tries):
        named = spec if number == 0 else replace(spec, episode_id=f"{spec.episode_id}.{number}")
        try:
            return await play(named)
        except EpisodeLost as lost:
            reason, detail = lost.reason, str(lost)
        except Exception as error:  # noqa: BLE001 - the boundary of one episode; recorded just below
            reason, detail = f"bug:{type(error).__name__}", repr(error)
            detail += "\n" + "".join(traceback.format_tb(error.__traceback__)[-3:])
        on_lost(reason)
        _log.warning("episode_lost", episode=named.episode_id, reason=reason, detail=detail[:2000])
        await asyncio.sleep(RETRY_PAUSE_S * (number + random.random()))
    return None


async def play_in(
    open_environment: OpenEnvironment,
    player: Player,
    spec: EpisodeSpec,
    sampling: Sampling,
    watch: Watch | None = None,
) -> Played:
    """Play one episode in an environment of its own, watched by ``watch``. Raises ``EpisodeLost``."""
    try:
        async with open_environment() as env:
            if watch is None:
                return await player.play(env, spec, sampling)
            played = await player.play(env, spec, sampling, watch.on_turn, watch.pairs.keep)
            await watch.pairs.verify_in(env)
            return played
    except EnvironmentLost as error:
        raise EpisodeLost("environment", str(error)) from error


class Manager:
    """Plays groups until it is cancelled."""

    def __init__(
        self,
        *,
        player: Player,
        sampling: Sampling,
        open_environment: OpenEnvironment,
        task_of: Callable[[int], str],
        append: Append,
        pacer: Pacer,
        rule: GroupRule,
        board: Board,
        metrics: Path,
        asking: Asking | None = None,
    ) -> None:
        """``task_of`` gives the task id of a group index; ``metrics`` is the file for a line per group."""
        self._player = player
        self._sampling = sampling
        self._open_environment = open_environment
        self._task_of = task_of
        self._append = append
        self._pacer = pacer
        self._rule = rule
        self._board = board
        self._metrics = metrics
        self._asking = asking
        self._slots = asyncio.Semaphore(rule.episodes_in_flight)
        self._journal = asyncio.Lock()
        self._lost_in_a_row = 0

    async def run(self, done: frozenset[str] | set[str]) -> None:
        """Play every group whose id is not in ``done``, in order, without end.

        Raises ``LearnerSilent``, ``TooManyLost``, or what the journal raises. Cancelling it drops unfinished
        groups, which nobody has seen.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                for index in count():
                    if group_id(index) not in done:
                        await self._start_group(tasks, index)
        except BaseExceptionGroup as errors:
            raise _first(errors) from errors

    async def _start_group(self, tasks: asyncio.TaskGroup, index: int) -> None:
        if not self._pacer.open:
            self._board.say(f"waiting for the learner to publish version {self._pacer.version + 1}")
        version = await self._pacer.start(self._rule.idle_timeout_s)
        self._board.say("playing episodes")
        self._board.groups_started += 1
        group = _Group(group_id(index), self._task_of(index), version, time.monotonic())
        episodes = []
        for number in range(self._rule.group_size):
            await self._slots.acquire()
            episodes.append(tasks.create_task(self._episode(group, number)))
        tasks.create_task(self._finish(group, episodes))

    async def _episode(self, group: _Group, number: int) -> Episode | None:
        """One member of a group; holds a slot while it has an environment, which unverified pairs do not need."""
        watches: list[Watch] = []

        async def play(spec: EpisodeSpec) -> Played:
            if self._asking is not None:
                watches.append(self._asking.watch(spec.episode_id, self._player.hint_role))
            watch = watches[-1] if watches else None
            return await play_in(self._open_counted, self._player, spec, self._sampling, watch)

        try:
            self._board.in_flight += 1
            try:
                spec = EpisodeSpec(f"{group.group_id}-{number}", group.group_id, group.task_id)
                tries = 0 if group.dead else self._rule.tries_per_episode
                played = await play_until_kept(play, spec, tries=tries, on_lost=self._board.lose)
            finally:
                self._board.in_flight -= 1
                self._slots.release()
            if played is None:
                group.dead = True
                return None
            self._board.episode_done(played.episode, played.notes)
            return await watches[-1].finish(played.episode) if watches else played.episode
        finally:
            for watch in watches:
                await watch.cancel()

    @contextlib.asynccontextmanager
    async def _open_counted(self) -> AsyncIterator[Environment]:
        """An environment; the wait for it shows on the board."""
        async with contextlib.AsyncExitStack() as stack:
            self._board.waiting_for_environment += 1
            try:
                env = await stack.enter_async_context(self._open_environment())
            finally:
                self._board.waiting_for_environment -= 1
            yield env

    async def _finish(self, group: _Group, playing: list[asyncio.Task[Episode | None]]) -> None:
        """Wait for all members; journal the group, or drop it when one of them is lost."""
        finished = await asyncio.gather(*playing)
        episodes = [episode for episode in finished if episode is not None]
        if len(episodes) < len(finished):
            self._drop(group)
            return
        await self._pacer.reserve(group.version)
        async with self._journal:  # fair: appends come in the order of the reservations
            writing = asyncio.create_task(self._write(group, episodes))
            try:
                await asyncio.shield(writing)
            except asyncio.CancelledError:
                await writing  # what is in the journal is counted, also when the run stops meanwhile
                raise

    async def _write(self, group: _Group, episodes: list[Episode]) -> None:
        """Append a group to the journal and count it."""
        await asyncio.to_thread(self._append, episodes)
        self._pacer.appended()
        self._lost_in_a_row = 0
        self._board.group_done(episodes)
        append_line(self._metrics, _line(group, episodes))

    def _drop(self, group: _Group) -> None:
        self._pacer.drop(group.version)
        self._board.groups_dropped += 1
        self._lost_in_a_row += 1
        _log.error("group_dropped", group=group.group_id, task=group.task_id)
        if self._lost_in_a_row >= self._rule.max_groups_lost:
            reasons = ", ".join(f"{reason} {times}" for reason, times in self._board.lost.most_common(3))
            raise TooManyLost(
                f"{self._lost_in_a_row} groups in a row were lost; episodes lost so far: {reasons}"
            )


def _line(group: _Group, episodes: Sequence[Episode]) -> dict[str, Any]:
    """The metrics of one group."""
    rewards = [episode.reward or 0.0 for episode in episodes]
    assistant = [turn for episode in episodes for turn in episode.turns if turn.role == "assistant"]
    return {
        "time": time.time(),
        "group": group.group_id,
        "task": group.task_id,
        "version": group.version,
        "episodes": len(episodes),
        "seconds": round(time.monotonic() - group.started, 3),
        "reward_mean": sum(rewards) / len(rewards),
        "reward_varies": len(set(rewards)) > 1,
        "solved": sum(episode.outcome is Outcome.SOLVED for episode in episodes),
        "truncated": sum(episode.outcome is Outcome.TRUNCATED for episode in episodes),
        "turns": len(assistant),
        "sampled_tokens": sum(sum(episode.loss_mask) for episode in episodes),
        "errors": dict(Counter(turn.error_kind for turn in assistant if turn.error_kind)),
        "hint_sites": sum(len(episode.hint_sites) for episode in episodes),
        "pairs": sum(len(episode.pairs) for episode in episodes),
    }


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error itself, out of however many groups it is wrapped in."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
