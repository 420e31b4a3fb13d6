"""Playing one episode in an environment of its own: watched by the teachers, and again when it is lost."""

from __future__ import annotations

import asyncio
import contextlib
import random
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any

import structlog

from hintloop.agent.engine import Engine, Sample, Sampling
from hintloop.agent.episode import (
    Environment,
    EpisodeLost,
    EpisodeSpec,
    Keep,
    Played,
    Player,
    Stepped,
    TurnEvent,
)
from hintloop.agent.external import ExternalPlayer
from hintloop.envs.client import EnvironmentLost
from hintloop.envs.models import ToolCall
from hintloop.replay.episode import Episode
from hintloop.rollout.failures import Part, part_of, reason_of
from hintloop.rollout.teaching import Watch
from hintloop.rollout.watchdog import Pulse

OpenEnvironment = Callable[[], AbstractAsyncContextManager[Environment]]
"""Opens one environment for one episode; waits while the servers are full. Raises ``EnvironmentLost``."""
OnLost = Callable[[Part, str], None]
"""Hears of a lost try: whose failure it was, and a word to count it by."""

RETRY_PAUSE_S = 0.2
ENVIRONMENT, ENGINE, TEACHERS, PROGRAM = "environment server", "engine", "teachers", "agent program"
_log = structlog.get_logger(__name__)


async def play_until_kept(
    play: Callable[[EpisodeSpec], Awaitable[Played]], spec: EpisodeSpec, *, tries: int, on_lost: OnLost
) -> Played | None:
    """Play an episode, again under a new id when it is lost; None when every try was.

    Whatever goes wrong inside of one episode is counted and logged, and costs that try only.
    """
    for number in range(tries):
        named = spec if number == 0 else replace(spec, episode_id=f"{spec.episode_id}.{number}")
        try:
            return await play(named)
        except Exception as error:  # noqa: BLE001 - the boundary of one episode; recorded just below
            problem = error
        on_lost(part_of(problem), reason_of(problem))
        _log_failure("episode_lost", named.episode_id, problem)
        await asyncio.sleep(RETRY_PAUSE_S * (number + random.random()))
    return None


async def play_in(
    open_environment: OpenEnvironment,
    player: Player,
    spec: EpisodeSpec,
    sampling: Sampling,
    watch: Observed | Watch | None = None,
    *,
    pulse: Pulse | None = None,
    turn_s: float | None = None,
) -> Played:
    """Play one episode in an environment of its own, watched by ``watch``; ``pulse`` tells what it waits for.

    ``turn_s`` is the engine's time for one turn. Raises ``EpisodeLost``, ``Overdue`` and what a task or a chat
    template raises.
    """
    pulse = pulse or Pulse("episode", spec.episode_id)
    player = replace(player, engine=_PulsingEngine(player.engine, pulse, turn_s))
    try:
        async with open_environment() as env:
            pulsing = _PulsingEnvironment(env, pulse)
            async with _agent(player, pulse):
                if watch is None:
                    return await player.play(pulsing, spec, sampling)
                played = await player.play(pulsing, spec, sampling, watch.on_turn, watch.keep)
            async with pulse.waiting(TEACHERS, Part.TEACHER):
                await watch.verify_in(pulsing)
            return played
    except EnvironmentLost as error:
        raise EpisodeLost("environment", str(error)) from error


def _agent(player: Player, pulse: Pulse) -> AbstractAsyncContextManager[None]:
    """What is waited for between questions and calls: a program is, for which the player sets a limit."""
    return (
        pulse.waiting(PROGRAM, Part.AGENT) if isinstance(player, ExternalPlayer) else contextlib.nullcontext()
    )


@dataclass
class Observed:
    """A ``Watch`` whose failures cost an episode its pairs, and nothing else."""

    watch: Watch
    episode_id: str
    on_failure: Callable[[Part], None]
    broken: bool = False

    def on_turn(self, event: TurnEvent) -> None:
        """Ask about this turn, or not."""
        with self._guard():
            if not self.broken:
                self.watch.on_turn(event)

    def keep(self, turn: int, sample: Sample, calls: Sequence[ToolCall]) -> Keep:
        """Whether the state before the turn has to stay at hand."""
        kept: Keep = "no"
        with self._guard():
            if not self.broken:
                kept = self.watch.keep(turn, sample, calls)
        return kept

    async def verify_in(self, env: Environment) -> None:
        """Try what the teachers agreed on."""
        with self._guard():
            if not self.broken:
                await self.watch.verify_in(env)

    async def finish(self, episode: Episode, pulse: Pulse, limit_s: float) -> Episode:
        """The episode with all that was answered in time."""
        with self._guard():
            if not self.broken:
                async with pulse.waiting(TEACHERS, Part.TEACHER, limit_s):
                    return await self.watch.finish(episode)
        return episode

    async def cancel(self) -> None:
        """Stop asking."""
        with self._guard():
            await self.watch.cancel()

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the boundary between an episode and its teachers; recorded here
            self.broken = True
            self.on_failure(Part.TEACHER)
            _log_failure("teachers_failed", self.episode_id, error)


@contextlib.asynccontextmanager
async def opened(open_environment: OpenEnvironment, pulse: Pulse) -> AsyncIterator[Environment]:
    """An environment; the wait for it shows on the pulse."""
    async with contextlib.AsyncExitStack() as stack:
        async with pulse.waiting(f"a free {ENVIRONMENT}", Part.ENVIRONMENT):
            env = await stack.enter_async_context(open_environment())
        yield env


@dataclass(frozen=True, slots=True)
class _PulsingEnvironment:
    env: Environment
    pulse: Pulse

    async def reset(self, **kwargs: Any) -> Stepped:
        async with self.pulse.waiting(ENVIRONMENT, Part.ENVIRONMENT):
            return await self.env.reset(**kwargs)

    async def step(self, action: ToolCall) -> Stepped:
        async with self.pulse.waiting(ENVIRONMENT, Part.ENVIRONMENT):
            return await self.env.step(action)


@dataclass(frozen=True, slots=True)
class _PulsingEngine:
    engine: Engine
    pulse: Pulse
    turn_s: float | None

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str) -> Sample:
        async with self.pulse.waiting(ENGINE, Part.ENGINE, self.turn_s):
            return await self.engine.generate(prompt_ids, sampling, session=session)

    async def end_session(self, session: str) -> None:
        await self.engine.end_session(session)


def _log_failure(event: str, episode_id: str, error: Exception) -> None:
    detail = str(error)
    if part_of(error) is Part.BUG:
        detail = "\n".join([repr(error), *traceback.format_tb(error.__traceback__)[-3:]])
    _log.warning(event, episode=episode_id, reason=reason_of(error), detail=detail[:2000])
