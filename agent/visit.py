"""One episode of an agent program: its questions to the model, its calls in the sandbox, and what is made of both.

The program decides what is asked and what runs. The model's turns are recorded as they were sampled; a call counts
as a turn's own, and its error as that turn's mistake, when the model wrote it: what a program runs for itself (to
look around, to collect a patch) is nobody's mistake.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from hintloop.agent.chat_messages import ChatRequest, Reply, closing, completion, read_request
from hintloop.agent.conversation import Message
from hintloop.agent.engine import EngineError, Sampling
from hintloop.agent.episode import (
    LONG,
    Environment,
    EpisodeLost,
    EpisodeSpec,
    Keep,
    Keeper,
    Observer,
    Played,
    Player,
    Stepped,
    TaskUnfit,
    check_infra,
)
from hintloop.agent.lines import Answer, Line, Lines
from hintloop.agent.transcript import TurnEvent
from hintloop.envs.client import EnvironmentLost
from hintloop.envs.errors import Cause, tool_error
from hintloop.envs.models import TaskInfo, ToolCall, ToolResult
from hintloop.envs.tools import failure

ANSWERS_PER_TURN = 4
"""Answers that a program gets at most, for each turn that the task has: retries and side questions included."""
OVER = "The episode is over."
T = TypeVar("T")


class Closed(Exception):
    """The episode takes no more."""


class BadRequest(ValueError):
    """The program asked for what cannot be answered."""


class Visit:
    """One agent program's episode, from its first question to the grade."""

    def __init__(
        self,
        player: Player,
        env: Environment,
        spec: EpisodeSpec,
        task: TaskInfo,
        sampling: Sampling,
        observe: Observer | None,
        keep: Keeper | None,
        *,
        refuse_sampling: bool,
    ):
        """``player.chat`` must take user messages in mid-conversation, see ``policy.retaining``.

        ``refuse_sampling``: a question with sampling settings other than ``sampling`` is refused, and not answered with
        these.
        """
        self.task = task
        self.lost: Exception | None = None
        """Why the episode cannot be scored."""
        self.over = asyncio.Event()
        """Nothing that the program does counts any more: graded, out of tokens or answers, or lost."""
        self._player = player
        self._env = env
        self._spec = spec
        self._sampling = sampling
        self._observe = observe
        self._keep = keep
        self._refuse_sampling = refuse_sampling
        self._lines = Lines(player.chat, spec, task)
        self._told: list[Answer] = []
        """What the observer knows; the line that becomes the episode has all of these."""
        self._final: Stepped | None = None
        self._steps = 0
        self._unowned: Counter[str] = Counter()
        self._overridden: Counter[str] = Counter()
        self._model, self._sandbox = asyncio.Lock(), asyncio.Lock()
        self._tasks: dict[asyncio.Task[Any], asyncio.Lock] = {}
        self._busy_since, self._busy_s = 0.0, 0.0
        self._ended = False

    @property
    def num_answers(self) -> int:
        """Answers that the model gave."""
        return self._lines.num_answers

    def waited(self) -> float:
        """Seconds that the program has waited for the model or the sandbox so far."""
        return self._busy_s + (time.monotonic() - self._busy_since if self._tasks else 0.0)

    async def ask(self, body: Mapping[str, Any]) -> Message:
        """Answer a chat completion request. Raises ``BadRequest``, ``Closed``."""
        return await self._within(lambda: self._ask(body), self._model)

    async def call(self, call: ToolCall) -> ToolResult:
        """Make a call in the sandbox. Raises ``Closed``."""
        return await self._within(lambda: self._call(call), self._sandbox)

    async def finish(self, *, submit: bool) -> Played:
        """The episode; nothing is answered any more. ``submit``: hand in the work, if that has not been done.

        Raises ``EpisodeLost``, or whatever the episode was lost to.
        """
        self._ended = True
        await self._stop(self._model)
        if submit and not self.over.is_set():
            async with self._sandbox:  # what still runs may be part of the work
                with contextlib.suppress(Closed):
                    await self._guarded(self._call(ToolCall(name="submit"), own=True))
        await self.close()
        if self.lost is not None:
            raise self.lost
        line = self._last_line()
        self._tell(line, line.close_turn())
        return await _beside(len(line.prompt_ids), lambda: self._played(line))

    async def close(self) -> None:
        """Stop what is under way."""
        self._ended = True
        self.over.set()
        await self._stop(self._model, self._sandbox)

    def lose(self, error: Exception) -> None:
        """The episode cannot be scored."""
        self.lost = self.lost or error
        self.over.set()

    async def _within(self, work: Callable[[], Awaitable[T]], lock: asyncio.Lock) -> T:
        """Do one thing at a time, as a task that can be stopped; its failures are the episode's."""

        async def one() -> T:
            async with lock:
                if self._ended or self.lost is not None:
                    raise Closed
                return await self._guarded(work())

        if not self._tasks:
            self._busy_since = time.monotonic()
        task = asyncio.create_task(one())
        self._tasks[task] = lock
        task.add_done_callback(self._forget)
        await asyncio.wait({task})
        if task.cancelled():
            raise Closed
        return task.result()

    def _forget(self, task: asyncio.Task[Any]) -> None:
        del self._tasks[task]
        if not self._tasks:
            self._busy_s += time.monotonic() - self._busy_since

    async def _stop(self, *locks: asyncio.Lock) -> None:
        tasks = [task for task, lock in self._tasks.items() if lock in locks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _guarded(self, work: Awaitable[T]) -> T:
        """``Closed`` for what breaks the episode, which is then lost to it."""
        try:
            return await work
        except (BadRequest, Closed):
            raise
        except EngineError as error:
            self.lose(EpisodeLost("engine", str(error)))
        except EnvironmentLost as error:
            self.lose(EpisodeLost("environment", str(error)))
        except Exception as error:  # noqa: BLE001 - what the episode is lost to; raised by finish
            self.lose(error)
        raise Closed

    # The model

    async def _ask(self, body: Mapping[str, Any]) -> Message:
        model, max_tokens = self._player.model, self._player.max_tokens
        if self.num_answers >= ANSWERS_PER_TURN * self.task.max_turns:
            self.over.set()
        if self.over.is_set():
            return closing(OVER, model=model)
        try:
            request, line, ended = await _beside(_length(body), lambda: self._find(body))
        except ValueError as error:
            raise BadRequest(str(error)) from error
        self._tell(line, ended)
        prompt = list(line.prompt_ids)
        room = max_tokens - len(prompt)
        if room <= 0:
            if not self.num_answers:
                text = f"the program's first prompt of {len(prompt)} tokens leaves no room in {max_tokens}"
                self.lose(TaskUnfit(text))
            self.over.set()
            return closing(OVER, model=model)
        limit = min(room, self._sampling.max_new_tokens, request.max_tokens or room)
        sampling = replace(self._sampling, max_new_tokens=limit)
        sample = await self._player.engine.generate(prompt, sampling, session=self._spec.episode_id)
        answer = self._lines.answer(line, sample, request.sent)
        answer.problem = _problem(answer.reply, line.tools)
        if sample.finish_reason == "length" and limit == room:
            self.over.set()
        return completion(answer.reply, sample, prompt, model=model, ids=request.token_ids)

    def _find(self, body: Mapping[str, Any]) -> tuple[ChatRequest, Line, TurnEvent | None]:
        request = read_request(body)
        self._settle(request.sampling)
        return request, *self._lines.find(request)

    def _settle(self, asked: Mapping[str, Any]) -> None:
        """Refuse or count what is asked for beside the run's own sampling. ``ValueError`` to refuse it."""
        own = self._sampling.temperature
        others = [name for name, value in asked.items() if name != "temperature" or value != own]
        if others and self._refuse_sampling:
            raise ValueError(
                f"{', '.join(others)}: the recorded probabilities hold for temperature {own:g} and nothing else; "
                "leave such settings out"
            )
        self._overridden.update(others)

    def _tell(self, line: Line, ended: TurnEvent | None) -> None:
        """Tell the observer of a line's last turn, if it has calls and comes after all that was told before."""
        if self._observe is not None and ended is not None and ended.calls and self._goes_on(line):
            self._told.append(line.answers[-1])
            self._observe(ended)

    def _goes_on(self, line: Line) -> bool:
        return set(self._told) <= set(line.answers)

    # The sandbox

    async def _call(self, call: ToolCall, *, own: bool = False) -> ToolResult:
        """``own``: it is the machinery's call, and of no turn."""
        if self.over.is_set():
            return failure(tool_error("connection_error", OVER)).model_copy(update={"done": True})
        owner = None if own else next((each for each in self._lines.last_answers() if each.wrote(call)), None)
        if owner is not None and not owner.step:
            owner.step = self._steps + 1
            call = call.model_copy(update={"keep": self._kept(owner)})
        step = await self._env.step(call)
        self._steps += 1
        result = step.observation
        check_infra(result)
        call = call.model_copy(update={"keep": "no"})
        if owner is not None:
            owner.made.append((call, result))
        elif result.error is not None:
            self._unowned[result.error.kind] += 1
        if step.done:
            self._final = step
            if owner is None and self.num_answers:
                self._last_line().answers[-1].made.append((call, result))
            self.over.set()
        return result

    def _kept(self, answer: Answer) -> Keep:
        """Whether the state before the first call of an answer has to stay at hand."""
        if self._keep is not None:
            for line in self._lines.all:
                if line.tools and line.answers[-1:] == [answer] and self._goes_on(line):
                    return self._keep(len(line.answers) - 1, answer.sample, answer.reply.calls)
        return "no"

    # The episode

    def _last_line(self) -> Line:
        """The line that becomes the episode: of those that have all that was told, the one with most sampled tokens."""
        lines = [line for line in self._lines.all if line.answers and self._goes_on(line)]
        return max(lines, key=lambda line: line.sampled)

    def _played(self, line: Line) -> Played:
        played = self._player.finish(line.log, self._final)
        answers = {id(answer) for answer in line.answers}
        others = {
            id(answer): answer
            for each in self._lines.all
            for answer in each.answers
            if id(answer) not in answers
        }
        if len(self._lines.all) > 1:
            tokens = sum(len(answer.sample.token_ids) for answer in others.values())
            parts = {"lines": float(len(self._lines.all)), "tokens_elsewhere": float(tokens)}
            played = replace(
                played, episode=replace(played.episode, reward_parts={**played.episode.reward_parts, **parts})
            )
        notes, dropped = played.notes, Counter(played.notes.dropped_sites)
        lost = [error for other in others.values() for _, result in other.results if (error := result.error)]
        dropped["the agent took the turn out of its history"] += sum(
            error.cause is Cause.MODEL for error in lost
        )
        dropped["the call was not the model's"] += self._unowned.total()
        notes = replace(notes, dropped_sites=+dropped, overridden=self._overridden)
        return replace(played, notes=notes)


async def _beside(size: int, work: Callable[[], T]) -> T:
    """``work()``, in a thread when it has many characters or tokens to work on; never left while it goes on."""
    if size < LONG:
        return work()
    working = asyncio.create_task(asyncio.to_thread(work))
    try:
        return await asyncio.shield(working)
    finally:
        await asyncio.wait({working})


def _length(body: Mapping[str, Any]) -> int:
    """Characters of the texts in a request, wherever they stand, and its parts; no further than to ``LONG``."""
    length, left = 0, list(body.values())
    while left and length < LONG:
        part = left.pop()
        length += 1
        if isinstance(part, str):
            length += len(part)
        elif isinstance(part, dict):
            left += part.values()
        elif isinstance(part, list):
            left += part
    return length


def _problem(reply: Reply, tools: tuple[dict[str, Any], ...]) -> tuple[ToolCall, ToolResult] | None:
    """A call that no program could make: it cannot be read, or there is no such tool."""
    names = [spec["name"] for spec in tools]
    if reply.broken is not None:
        error = tool_error("json_decode", "bad JSON in the tool call", text=reply.broken[:200])
        return ToolCall(malformed=reply.broken), failure(error)
    for call in reply.calls:
        if call.name not in names:
            nearest = difflib.get_close_matches(call.name, names, n=1)
            meta = {"name": call.name[:40], "tools": names, "nearest": nearest[0] if nearest else None}
            return call, failure(tool_error("tool_not_found", f"unknown tool: {call.name[:40]}", **meta))
    return None
