"""The rollout manager: groups of episodes, many at a time, whole groups into the journal.

Groups are numbered, and a manager that starts again goes on where the journal ends: what is not there is played
(again), what is there is skipped. An episode that the infrastructure loses is played again; only a whole group is
ever written. A group whose rewards are all equal can be played anew with another task, under the same number.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import structlog

from hintloop.agent.engine import Sampling
from hintloop.agent.episode import Environment, EpisodeSpec, Played, Player
from hintloop.replay.episode import Episode, Outcome
from hintloop.rollout.episodes import Observed, OpenEnvironment, opened, play_in, play_until_kept
from hintloop.rollout.failures import Part
from hintloop.rollout.offload import aside, persist
from hintloop.rollout.pacing import Pacer
from hintloop.rollout.sampler import Result, all_equal, result_of
from hintloop.rollout.status import Board, append_line
from hintloop.rollout.teaching import Asking
from hintloop.rollout.watchdog import Pulse, Watchdog

Append = Callable[[Sequence[Episode]], object]
"""Writes a whole group to the journal; blocks."""

RESAMPLED = "resampled.jsonl"
"""File, beside that of the groups, with a line for each group that was played anew."""
FINISH_S = 30.0
"""What the teachers' answers to an episode may take beyond their own deadline."""
LAST_WRITE_S = 10.0
"""What a run that is stopped waits for the write that is under way."""
_log = structlog.get_logger(__name__)


class TooManyLost(Exception):
    """Group after group was lost to the infrastructure: something is broken for good."""


class TaskOf(Protocol):
    """The task of a group, by its number and attempt (from 0)."""

    def __call__(self, index: int, attempt: int = 0, /) -> str: ...


@dataclass(frozen=True, slots=True)
class GroupRule:
    """How groups are played."""

    group_size: int
    episodes_in_flight: int
    tries_per_episode: int
    max_groups_lost: int
    idle_timeout_s: float
    turn_s: float | None = None
    """The engine's time for one turn."""
    resample_equal: int = 0
    """Times that a group with equal rewards is played anew."""
    storage_timeout_s: float = 300.0


@dataclass(slots=True)
class _Group:
    group_id: str
    task_id: str
    version: int
    started: float
    index: int = 0
    attempt: int = 0
    """How often its number was played before, with equal rewards."""
    dead: bool = False
    """One of its episodes is lost for good."""

    def episode_id(self, number: int) -> str:
        """The id of a member."""
        again = f"r{self.attempt}" if self.attempt else ""
        return f"{self.group_id}{again}-{number}"


def group_id(index: int) -> str:
    """The id of the group number ``index`` of a run."""
    return f"g{index:06d}"


class Manager:
    """Plays groups until it is cancelled."""

    def __init__(
        self,
        *,
        player: Player,
        sampling: Sampling,
        open_environment: OpenEnvironment,
        task_of: TaskOf,
        append: Append,
        pacer: Pacer,
        rule: GroupRule,
        board: Board,
        metrics: Path,
        asking: Asking | None = None,
        observe: Callable[[Result], None] = lambda result: None,
        watchdog: Watchdog | None = None,
    ) -> None:
        """``metrics`` is the file for a line per group; groups played anew go to ``RESAMPLED`` beside it.

        ``observe`` hears what each group brought.
        """
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
        self._observe = observe
        self._watchdog = watchdog or Watchdog()
        self._slots = asyncio.Semaphore(rule.episodes_in_flight)
        self._journal = asyncio.Lock()
        self._lost_in_a_row = 0

    async def run(self, done: frozenset[str] | set[str]) -> None:
        """Play every group whose id is not in ``done``, in order, without end.

        Raises ``LearnerSilent``, ``TooManyLost``, ``StorageFailed``, or what else the journal raises. Cancelling
        it drops unfinished groups, which nobody has seen.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                with self._watchdog.task("manager") as pulse:
                    for index in count():
                        if group_id(index) not in done:
                            await self._start_group(tasks, index, pulse)
        except BaseExceptionGroup as errors:
            raise _first(errors) from errors

    async def _start_group(self, tasks: asyncio.TaskGroup, index: int, pulse: Pulse) -> None:
        def on_wait() -> None:
            if self._pacer.learner_is_next:
                on, limit_s = "the learner's next version", self._rule.idle_timeout_s
                self._board.say(f"waiting for the learner to publish version {self._pacer.version + 1}")
            else:
                on, limit_s = "the groups that are played", None
            if pulse.on != on:
                pulse.beat(on, limit_s)

        version = await self._pacer.start(self._rule.idle_timeout_s, on_wait)
        self._board.say("playing episodes")
        self._board.groups_started += 1
        group = _Group(group_id(index), self._task_of(index), version, time.monotonic(), index)
        pulse.beat("a free place among the episodes in flight")
        await self._launch(tasks, group)

    async def _launch(self, tasks: asyncio.TaskGroup, group: _Group) -> None:
        episodes = []
        for number in range(self._rule.group_size):
            await self._slots.acquire()
            episodes.append(tasks.create_task(self._episode(group, number)))
        tasks.create_task(self._finish(tasks, group, episodes))

    async def _episode(self, group: _Group, number: int) -> Episode | None:
        """One member of a group; holds a slot while it has an environment, which unverified pairs do not need."""
        watches: list[Observed] = []
        spec = EpisodeSpec(group.episode_id(number), group.group_id, group.task_id)
        with self._watchdog.task("episode", spec.episode_id) as pulse:

            async def play(spec: EpisodeSpec) -> Played:
                watch = None
                if self._asking is not None:
                    asked = self._asking.watch(spec.episode_id, self._player.hint_role)
                    watches.append(watch := Observed(asked, spec.episode_id, self._board.fail))
                environment = partial(self._open_counted, pulse)
                return await play_in(
                    environment,
                    self._player,
                    spec,
                    self._sampling,
                    watch,
                    pulse=pulse,
                    turn_s=self._rule.turn_s,
                )

            try:
                played = await self._in_slot(group, play, spec)
                if played is None:
                    group.dead = True
                    return None
                self._board.episode_done(played.episode, played.notes)
                if self._asking is None:
                    return played.episode
                limit = self._asking.rule.deadline_s + FINISH_S
                return await watches[-1].finish(played.episode, pulse, limit)
            finally:
                for watch in watches:
                    await watch.cancel()

    async def _in_slot(
        self, group: _Group, play: Callable[[EpisodeSpec], Awaitable[Played]], spec: EpisodeSpec
    ) -> Played | None:
        """Play an episode until it is kept; its slot is free afterwards."""
        self._board.in_flight += 1
        try:
            tries = 0 if group.dead else self._rule.tries_per_episode
            return await play_until_kept(play, spec, tries=tries, on_lost=self._board.lose_to)
        finally:
            self._board.in_flight -= 1
            self._slots.release()

    @contextlib.asynccontextmanager
    async def _open_counted(self, pulse: Pulse) -> AsyncIterator[Environment]:
        """An environment; the wait for it shows on the board."""
        async with contextlib.AsyncExitStack() as stack:
            self._board.waiting_for_environment += 1
            try:
                env = await stack.enter_async_context(opened(self._open_environment, pulse))
            finally:
                self._board.waiting_for_environment -= 1
            yield env

    async def _finish(
        self, tasks: asyncio.TaskGroup, group: _Group, playing: list[asyncio.Task[Episode | None]]
    ) -> None:
        """Wait for all members; journal the group, play it anew, or drop it when one of them is lost."""
        finished = await asyncio.gather(*playing)
        episodes = [episode for episode in finished if episode is not None]
        if len(episodes) < len(finished):
            self._drop(group)
            return
        with self._watchdog.task("finished group", group.group_id) as pulse:
            if group.attempt < self._rule.resample_equal and all_equal(episodes):
                pulse.beat("a free place among the episodes in flight")
                await self._again(tasks, group, episodes)
                return
            pulse.beat("groups that started with older weights")
            await self._pacer.reserve(group.version)
            pulse.beat("the group before it in the journal")
            async with self._journal:  # fair: appends come in the order of the reservations
                await self._write(group, episodes, pulse)

    async def _write(self, group: _Group, episodes: list[Episode], pulse: Pulse) -> None:
        """Append a group to the journal and count it, also when the run stops meanwhile."""
        pulse.beat("the journal's storage", self._rule.storage_timeout_s)
        writing = asyncio.create_task(self._append_group(group, episodes))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            await asyncio.wait({writing}, timeout=LAST_WRITE_S)
            if not writing.cancel() and not writing.cancelled():
                writing.exception()  # whoever stops the run has no use for it
            raise

    async def _append_group(self, group: _Group, episodes: list[Episode]) -> None:
        await persist(
            partial(self._append, episodes),
            what="writing to the journal",
            patience_s=self._rule.storage_timeout_s,
            on_failure=lambda error: self._board.fail(Part.STORAGE),
        )
        self._pacer.appended()
        self._lost_in_a_row = 0
        self._board.group_done(episodes, equal=all_equal(episodes))
        self._observe(result_of(episodes))
        await self._note(self._metrics, group, episodes)

    async def _again(self, tasks: asyncio.TaskGroup, group: _Group, episodes: list[Episode]) -> None:
        """Another task in the place of a group whose rewards say nothing."""
        self._board.groups_resampled += 1
        self._observe(result_of(episodes))
        await self._note(self._metrics.with_name(RESAMPLED), group, episodes)
        version, attempt = self._pacer.restart(group.version), group.attempt + 1
        task_id = self._task_of(group.index, attempt)
        anew = _Group(group.group_id, task_id, version, time.monotonic(), group.index, attempt)
        await self._launch(tasks, anew)

    async def _note(self, path: Path, group: _Group, episodes: list[Episode]) -> None:
        """Add the line of a group to a file; a run does not end for want of it."""
        try:
            await aside(
                lambda: append_line(path, _line(group, episodes)), name="metrics", limit_s=LAST_WRITE_S
            )
        except OSError as error:  # a TimeoutError is one
            self._board.fail(Part.STORAGE)
            _log.warning("metrics_not_written", path=str(path), error=repr(error))

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
        "attempt": group.attempt,
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
