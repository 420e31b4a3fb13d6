"""One episode from reset to reward: sample a turn, run its calls, append the results, again.

The transcript is linear. What comes out is an ``Episode`` for the journal, or ``EpisodeLost``: when something
other than the agent broke, there is no score to give and nothing to learn from.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

from hintloop.agent.engine import Engine, EngineError, Sample, Sampling
from hintloop.agent.policy import ChatFormat
from hintloop.agent.transcript import EpisodeNotes, EpisodeSpec, Transcript, TurnEvent
from hintloop.envs.client import EnvironmentLost
from hintloop.envs.errors import Cause
from hintloop.envs.models import TaskInfo, ToolCall, ToolResult
from hintloop.replay.episode import Episode, Outcome

__all__ = [
    "Environment",
    "EpisodeLost",
    "EpisodeNotes",
    "EpisodeSpec",
    "Observer",
    "Played",
    "Player",
    "Stepped",
    "TaskUnfit",
    "TurnEvent",
]

LONG = 8192
"""Characters or tokens; the event loop is not held up for the work on so many."""
_POOL = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokens")
T = TypeVar("T")

Observer = Callable[[TurnEvent], None]
"""Called after each turn; must return at once."""
Keep = Literal["no", "on_error", "always"]
"""As ``ToolCall.keep``."""
Keeper = Callable[[int, Sample, Sequence[ToolCall]], Keep]
"""Called before the calls of an assistant turn (from 0) are made: is the state before them to be kept for trials?"""


class Stepped(Protocol):
    """What a step gives; an ``openenv`` ``StepResult`` is one."""

    observation: ToolResult
    reward: float | None
    done: bool


class Environment(Protocol):
    """One environment of one episode; ``hintloop.envs.client.CodingEnvClient`` is one."""

    async def reset(self, **kwargs: Any) -> Stepped: ...
    async def step(self, action: ToolCall) -> Stepped: ...


class EpisodeLost(Exception):
    """Something that is not the agent broke; the episode has no score and is to be replaced."""

    def __init__(self, reason: str, detail: str):
        """``reason`` is one word to count by: ``engine``, ``environment``, ``sandbox``, ``ungraded`` or ``agent``
        (an agent program that broke)."""
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


class TaskUnfit(ValueError):
    """The task's prompt is too long for an episode."""


@dataclass(frozen=True, slots=True)
class Played:
    """A finished episode and its notes."""

    episode: Episode
    notes: EpisodeNotes


@dataclass(frozen=True, slots=True)
class Player:
    """A model with everything that all of its episodes share."""

    engine: Engine
    chat: ChatFormat
    model: str
    """Name of the model, for the record."""
    env: str
    """Name of the environment, for the record."""
    max_tokens: int
    """Tokens that one episode may have in all."""
    hint_role: str = "system"

    async def play(
        self,
        env: Environment,
        spec: EpisodeSpec,
        sampling: Sampling,
        observe: Observer | None = None,
        keep: Keeper | None = None,
    ) -> Played:
        """Play one episode. Raises ``EpisodeLost``."""
        try:
            return await self._play(env, spec, sampling, observe, keep)
        except EngineError as error:
            raise EpisodeLost("engine", str(error)) from error
        except EnvironmentLost as error:
            raise EpisodeLost("environment", str(error)) from error
        finally:
            # An engine that is gone has nothing to forget.
            with contextlib.suppress(EngineError):
                await self.engine.end_session(spec.episode_id)

    async def _play(
        self,
        env: Environment,
        spec: EpisodeSpec,
        sampling: Sampling,
        observe: Observer | None,
        keep: Keeper | None,
    ) -> Played:
        opened = await env.reset(task_id=spec.task_id, episode_id=spec.episode_id)
        task = task_of(opened.observation)
        log = await _beside(len(task.instruction), partial(Transcript, self.chat, spec, task))
        if len(log.conversation.token_ids) >= self.max_tokens:
            prompt = len(log.conversation.token_ids)
            raise TaskUnfit(
                f"the prompt of {prompt} tokens leaves no room in {self.max_tokens} for an episode"
            )
        final: Stepped | None = None
        while final is None and (room := self.max_tokens - len(log.conversation.token_ids)) > 0:
            limit = min(room, sampling.max_new_tokens)
            sample = await self.engine.generate(
                log.conversation.token_ids, replace(sampling, max_new_tokens=limit), session=spec.episode_id
            )
            calls = await _beside(len(sample.token_ids), partial(log.add_sample, sample))
            if sample.finish_reason == "length" and limit == room:
                break
            kept = "no" if keep is None else keep(log.conversation.num_turns - 1, sample, calls)
            results = await _run_calls(env, calls, kept)
            event = log.turn_done(calls, [step.observation for step in results])
            if observe is not None:
                observe(event)
            if results[-1].done:
                final = results[-1]
                continue
            outputs = [step.observation.output for step in results]
            if not await _beside(sum(map(len, outputs)), partial(log.add_results, outputs)):
                break
        return await _beside(len(log.conversation.token_ids), partial(self.finish, log, final))

    def finish(self, log: Transcript, final: Stepped | None) -> Played:
        """The episode of a transcript; ``final`` ended it, None: it ran out of room. Raises ``EpisodeLost``."""
        if final is not None and final.reward is None:
            raise EpisodeLost("ungraded", "the environment ended the episode without a reward")
        sites = log.hint_sites(self.hint_role)
        reward = 0.0 if final is None or final.reward is None else float(final.reward)
        log.cut_tail()
        conversation, spec = log.conversation, log.spec
        end = log.turns[-1].end
        episode = Episode(
            episode_id=spec.episode_id,
            group_id=spec.group_id,
            task_id=spec.task_id,
            env=self.env,
            source=spec.source,
            created_at=time.time(),
            model=self.model,
            tokenizer_fingerprint=self.chat.fingerprint,
            token_ids=tuple(conversation.token_ids[:end]),
            loss_mask=tuple(conversation.loss_mask[:end]),
            logprobs=tuple(conversation.logprobs[:end]),
            policy_versions=tuple(conversation.policy_versions[:end]),
            turns=tuple(log.turns),
            outcome=_outcome(log, final, reward),
            reward=reward,
            reward_parts=dict(final.observation.reward_parts) if final else {},
            hint_sites=sites,
        )
        return Played(episode, log.notes())


async def _beside(size: int, call: Callable[[], T]) -> T:
    """``call()``, in a thread of a pool when it has much to work on."""
    if size < LONG:
        return call()
    return await asyncio.get_running_loop().run_in_executor(_POOL, call)


def task_of(observation: ToolResult) -> TaskInfo:
    """The task that a reset gave. Raises ``EpisodeLost``."""
    check_infra(observation)
    if observation.task is None:
        raise EpisodeLost("environment", "reset gave no task")
    return observation.task


def check_infra(observation: ToolResult) -> None:
    """Raises ``EpisodeLost`` when the machinery failed."""
    error = observation.error
    if error is not None and error.cause is Cause.INFRA:
        raise EpisodeLost("sandbox", f"{error.kind}: {error.message}")


async def _run_calls(env: Environment, calls: Sequence[ToolCall], keep: Keep) -> list[Stepped]:
    """Run the calls of one turn in order, until the episode is over."""
    results: list[Stepped] = []
    for call in calls:
        first = keep != "no" and not results
        results.append(await env.step(call.model_copy(update={"keep": keep}) if first else call))
        check_infra(results[-1].observation)
        if results[-1].done:
            break
    return results


def _outcome(log: Transcript, final: Stepped | None, reward: float) -> Outcome:
    if final is None or not log.submitted:
        return Outcome.TRUNCATED
    return Outcome.SOLVED if reward >= 1.0 else Outcome.FAILED
