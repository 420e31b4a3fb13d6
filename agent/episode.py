"""One episode from reset to reward: sample a turn, run its calls, append the results, again.

The transcript is linear. What comes out is an ``Episode`` for the journal, or ``EpisodeLost``: when something
other than the agent broke, there is no score to give and nothing to learn from.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from hintloop.agent import hints
from hintloop.agent.conversation import Conversation, Message, RenderError
from hintloop.agent.engine import Engine, EngineError, Sample, Sampling
from hintloop.agent.policy import ChatFormat, first_messages
from hintloop.envs.client import EnvironmentLost
from hintloop.envs.errors import Cause, ToolError
from hintloop.envs.models import TaskInfo, ToolCall, ToolResult
from hintloop.replay.episode import Episode, HintSite, Outcome, Turn

SiteChoice = Literal["failing", "recovery"]


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
        """``reason`` is one word to count by: ``engine``, ``environment``, ``sandbox`` or ``ungraded``."""
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class EpisodeSpec:
    """Which episode to play."""

    episode_id: str
    group_id: str
    task_id: str
    source: str = "rollout"


@dataclass(frozen=True, slots=True)
class TurnEvent:
    """One assistant turn that has been played, for whoever watches the episode."""

    spec: EpisodeSpec
    conversation: Conversation
    turn: int
    """Number of the assistant turn, from 0."""
    episode_turn: int
    """Index of the turn in ``Episode.turns``."""
    messages: tuple[Message, ...]
    """The transcript before this turn, in the OpenAI chat form."""
    task: TaskInfo
    calls: tuple[ToolCall, ...]
    errors: tuple[ToolError, ...]
    sampled_ids: tuple[int, ...]
    ended: bool
    """The turn ends with an end-of-turn token; False when it was cut for its length."""
    text: str


Observer = Callable[[TurnEvent], None]
"""Called after each turn; must return at once."""


@dataclass(frozen=True, slots=True)
class EpisodeNotes:
    """What happened on the way and is no part of the episode."""

    errors: Counter[str] = field(default_factory=Counter)
    """Tool errors by kind, whatever their cause."""
    dropped_sites: Counter[str] = field(default_factory=Counter)
    """Errors of the agent that got no hint site, by reason."""
    render_failures: int = 0
    """1 when the chat template could not append a tool result, which ended the episode as truncated."""


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
    site: SiteChoice = "failing"
    """Where the hint for an error goes: before the turn that failed, or before the one after it."""
    hint_role: str = "system"

    async def play(
        self, env: Environment, spec: EpisodeSpec, sampling: Sampling, observe: Observer | None = None
    ) -> Played:
        """Play one episode. Raises ``EpisodeLost``."""
        try:
            return await self._play(env, spec, sampling, observe)
        except EngineError as error:
            raise EpisodeLost("engine", str(error)) from error
        except EnvironmentLost as error:
            raise EpisodeLost("environment", str(error)) from error
        finally:
            # An engine that is gone has nothing to forget.
            with contextlib.suppress(EngineError):
                await self.engine.end_session(spec.episode_id)

    async def _play(
        self, env: Environment, spec: EpisodeSpec, sampling: Sampling, observe: Observer | None
    ) -> Played:
        opened = await env.reset(task_id=spec.task_id, episode_id=spec.episode_id)
        task = _task_of(opened.observation)
        log = _Log(self.chat, spec, task)
        if len(log.conversation.token_ids) >= self.max_tokens:
            prompt = len(log.conversation.token_ids)
            raise ValueError(
                f"the prompt of {prompt} tokens leaves no room in {self.max_tokens} for an episode"
            )
        final: Stepped | None = None
        while final is None and (room := self.max_tokens - len(log.conversation.token_ids)) > 0:
            limit = min(room, sampling.max_new_tokens)
            sample = await self.engine.generate(
                log.conversation.token_ids, replace(sampling, max_new_tokens=limit), session=spec.episode_id
            )
            calls = log.add_sample(sample)
            if sample.finish_reason == "length" and limit == room:
                break
            results = await _run_calls(env, calls)
            event = log.turn_done(calls, [step.observation for step in results])
            if observe is not None:
                observe(event)
            if results[-1].done:
                final = results[-1]
            elif not log.add_results([step.observation.output for step in results]):
                break
        return self._finish(log, final)

    def _finish(self, log: _Log, final: Stepped | None) -> Played:
        if final is not None and final.reward is None:
            raise EpisodeLost("ungraded", "the environment ended the episode without a reward")
        sites = log.hint_sites(self.site, self.hint_role)
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


def _task_of(observation: ToolResult) -> TaskInfo:
    _check_infra(observation)
    if observation.task is None:
        raise EpisodeLost("environment", "reset gave no task")
    return observation.task


def _check_infra(observation: ToolResult) -> None:
    error = observation.error
    if error is not None and error.cause is Cause.INFRA:
        raise EpisodeLost("sandbox", f"{error.kind}: {error.message}")


async def _run_calls(env: Environment, calls: Sequence[ToolCall]) -> list[Stepped]:
    """Run the calls of one turn in order, until the episode is over."""
    results: list[Stepped] = []
    for call in calls:
        results.append(await env.step(call))
        _check_infra(results[-1].observation)
        if results[-1].done:
            break
    return results


def _outcome(log: _Log, final: Stepped | None, reward: float) -> Outcome:
    if final is None or not log.submitted:
        return Outcome.TRUNCATED
    return Outcome.SOLVED if reward >= 1.0 else Outcome.FAILED


class _Log:
    """The transcript of one episode in its three forms: tokens, ``Turn`` records and OpenAI chat messages."""

    def __init__(self, chat: ChatFormat, spec: EpisodeSpec, task: TaskInfo):
        messages, tools = first_messages(task, chat.prompt)
        self.spec = spec
        self.conversation = Conversation(chat.renderer, messages, tools=tools)
        self.turns: list[Turn] = []
        self.submitted = False
        self._chat = chat
        self._task = task
        self._messages: list[Message] = list(messages)
        self._sampled: list[Sample] = []
        self._errors: list[tuple[int, ToolError]] = []
        self._assistants: list[int] = []
        self._kinds: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()
        self._render_failures = 0
        closed = chat.renderer.render(messages, tools=tools or None)
        self._prompt_tokens = self.conversation.prompt_end(0) - len(closed.token_ids)
        for number, message in enumerate(messages):
            own = [at for at, index in enumerate(closed.message_indices) if index == number]
            start, end = (own[0], own[-1] + 1) if own else (0, 0)
            self.turns.append(Turn(role=message["role"], start=start, end=end, text=message["content"]))

    def add_sample(self, sample: Sample) -> list[ToolCall]:
        """Append an assistant turn; its calls."""
        start = len(self.conversation.token_ids)
        calls = self.conversation.add_sample(sample)
        first = calls[0]
        self._assistants.append(len(self.turns))
        self._sampled.append(sample)
        self.turns.append(
            Turn(
                role="assistant",
                start=start,
                end=start + len(sample.token_ids),
                text=self._decode(sample),
                tool_name=None if first.malformed is not None else first.name,
                tool_arguments=None if first.malformed is not None else json.dumps(first.arguments),
            )
        )
        return calls

    def turn_done(self, calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> TurnEvent:
        """Record what the calls of the last turn gave. The first error of a turn is the turn's error."""
        index = self._assistants[-1]
        before = tuple(self._messages)
        errors = tuple(result.error for result in results if result.error is not None)
        self._kinds.update(error.kind for error in errors)
        if errors:
            first = errors[0]
            self._errors.append((len(self._assistants) - 1, first))
            self.turns[index] = replace(
                self.turns[index],
                error_kind=first.kind,
                error_message=first.message,
                error_cause=first.cause.value,
            )
        here = len(self.conversation.token_ids)
        for call, result in zip(calls, results, strict=False):
            self.submitted |= call.malformed is None and call.name == "submit" and result.error is None
            self.turns.append(
                Turn(
                    role="tool",
                    start=here,
                    end=here,
                    text=result.output,
                    tool_name=None if call.malformed is not None else call.name,
                    exit_code=result.exit_code,
                    seconds=result.seconds,
                )
            )
        self._add_messages(calls[: len(results)], results)
        return TurnEvent(
            spec=self.spec,
            conversation=self.conversation,
            turn=len(self._assistants) - 1,
            episode_turn=index,
            messages=before,
            task=self._task,
            calls=tuple(calls),
            errors=errors,
            sampled_ids=self._sampled[-1].token_ids,
            ended=self._sampled[-1].finish_reason == "stop",
            text=self.turns[index].text,
        )

    def add_results(self, outputs: Sequence[str]) -> bool:
        """Append tool results to the tokens; False when the chat template cannot."""
        start = len(self.conversation.token_ids)
        try:
            self.conversation.add_results(outputs)
        except RenderError:
            self._render_failures += 1
            return False
        # The results are rendered in one piece: the first tool turn has its tokens, the others none.
        end = len(self.conversation.token_ids) - self._prompt_tokens
        first = self._assistants[-1] + 1
        self.turns[first] = replace(self.turns[first], start=start, end=end)
        for index in range(first + 1, len(self.turns)):
            self.turns[index] = replace(self.turns[index], start=end, end=end)
        return True

    def cut_tail(self) -> None:
        """Let the transcript end with the last assistant turn: nobody has read what came after it."""
        last = self._assistants[-1]
        end = self.turns[last].end
        for index in range(last + 1, len(self.turns)):
            self.turns[index] = replace(self.turns[index], start=end, end=end)

    def hint_sites(self, choice: SiteChoice, role: str) -> tuple[HintSite, ...]:
        """One site for each error that the agent caused; what cannot be one is counted with its reason."""
        sites: dict[int, HintSite] = {}
        for failing, error in self._errors:
            if error.cause is not Cause.MODEL:
                continue
            turn = failing + (choice == "recovery")
            site = self._hint_site(turn, error, role)
            if site is not None:
                sites[turn] = site
        return tuple(sites.values())

    def _hint_site(self, turn: int, error: ToolError, role: str) -> HintSite | None:
        if turn >= len(self._assistants):
            self._dropped["no turn after the error"] += 1
            return None
        try:
            text = hints.dispatch(error)
        except KeyError:
            self._dropped[f"no hint template for {error.kind}"] += 1
            return None
        try:
            insertion = self.conversation.hint(turn, text or "", role=role)
        except RenderError as problem:
            self._dropped[str(problem)] += 1
            return None
        index = self._assistants[turn]
        return HintSite(
            turn=index,
            kind=error.kind,
            hint=text or "",
            insert_at=insertion.insert_at,
            start=self.turns[index].start,
            end=self.turns[index].end,
            hint_ids=insertion.hint_ids,
        )

    def notes(self) -> EpisodeNotes:
        return EpisodeNotes(self._kinds, self._dropped, self._render_failures)

    def _decode(self, sample: Sample) -> str:
        ids = sample.token_ids
        body = ids[:-1] if sample.finish_reason == "stop" else ids
        text: str = self._chat.tokenizer.decode(list(body))
        return text

    def _add_messages(self, calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> None:
        """The turn as OpenAI chat messages. What could not be parsed is text, its result a user message."""
        turn = len(self._assistants) - 1
        if calls[0].malformed is not None:
            self._messages.append({"role": "assistant", "content": self.turns[self._assistants[-1]].text})
            self._messages.append({"role": "user", "content": results[0].output})
            return
        made = [
            {
                "id": f"call_{turn}_{number}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for number, call in enumerate(calls)
        ]
        self._messages.append({"role": "assistant", "content": "", "tool_calls": made})
        for number, result in enumerate(results):
            reply = {"role": "tool", "tool_call_id": f"call_{turn}_{number}", "content": result.output}
            self._messages.append(reply)
