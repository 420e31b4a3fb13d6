"""A simulated inference server: what it samples and how, without HTTP (that is in ``sim_server``).

Its tokens are meaningless (``sim_model``), at a planned speed and with planned faults (``sim_plan``), but its
weights are real: they are fetched, verified and loaded by the code that runs inside vLLM, and what it samples
depends on them.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from hintloop.rollout.engines.sim_model import SimModel, context_of, fold, hash_of
from hintloop.rollout.engines.sim_plan import Fault, Faults, Plan
from hintloop.rollout.engines.sim_worker import SimWorker

DEFAULT_LABEL = "default"
"""What vLLM calls the weights that it was started with."""
WRONG_LABEL = "999999"
HANG_S = 3600.0


class Dropped(Exception):
    """The connection is to end without an answer, or in the middle of one."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request to sample."""

    request_id: str
    model: SimModel | None
    """The adapter that it named, which it keeps; None for the weights, which may change meanwhile."""
    token_ids: tuple[int, ...]
    max_tokens: int
    greedy: bool
    seed: int | None
    """None: the draws depend on the request's id."""
    stop_ids: tuple[int, ...]


@dataclass(slots=True)
class Answer:
    """What was sampled for a request so far."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[dict[str, Any]] = field(default_factory=list)
    """``{"version", "start", "end"}`` over the tokens, without gaps."""
    finish_reason: str | None = None
    aborted: bool = False

    def add(self, token: int, logprob: float, label: str) -> None:
        """Append a token sampled by the weights called ``label``."""
        if not self.spans or self.spans[-1]["version"] != label:
            place = len(self.token_ids)
            self.spans.append({"version": label, "start": place, "end": place})
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        self.spans[-1]["end"] += 1


class SimEngine:
    """Samples for many requests at once. For one event loop."""

    def __init__(
        self,
        plan: Plan,
        *,
        cache: Path,
        seed: int = 0,
        quit: Callable[[], None] | None = None,
        restart: Callable[[float], None] | None = None,
    ) -> None:
        """``cache`` is for fetched weights; ``quit`` and ``restart`` (in so many seconds) act on the process.

        Without them the engine only behaves as if its process had ended, or started anew.
        """
        self.plan = plan
        self.faults = Faults(plan.fault)
        self.running: dict[str, Answer] = {}
        self.waiting = 0
        self.sampled = 0
        self.restarts = 0
        self.served: deque[dict[str, Any]] = deque(maxlen=4096)
        """The last requests that ended, and how."""
        self._cache = cache
        self._seed = seed
        self._quit = quit or self._play_dead
        self._restart = restart or self._start_anew
        self._slots = asyncio.Semaphore(plan.max_requests)
        self._moved = asyncio.Event()
        self._up_at = 0.0
        self._begin()

    def close(self) -> None:
        """Let go what the worker holds."""
        self.worker.close()

    def _begin(self) -> None:
        self.worker = SimWorker(self.plan, self.faults, self._cache, self._quit)
        self.label = DEFAULT_LABEL
        self.paused = False

    @property
    def up(self) -> bool:
        """Whether its process would answer at all."""
        return time.monotonic() >= self._up_at

    @property
    def healthy(self) -> bool:
        """Whether the engine behind the process lives; a broken model kills it when generation goes on."""
        return self.up and (self.paused or not self.worker.broken)

    def pause(self) -> None:
        """Freeze what is running; new requests wait."""
        self.paused = True

    def resume(self) -> None:
        """Go on."""
        self.paused = False
        self._move()

    def abort(self, request_ids: Sequence[str]) -> int:
        """End requests with what they have; an empty list means all. How many there were."""
        chosen = [answer for name, answer in self.running.items() if not request_ids or name in request_ids]
        for answer in chosen:
            answer.aborted = True
        self._move()
        return len(chosen)

    async def call(self, method: str, kwargs: dict[str, Any]) -> dict[str, Any]:
        """A method of the worker. Raises ``AttributeError`` when it has none of that name."""
        if not method.startswith("hintloop_"):
            raise AttributeError(f"SimWorker has no method {method!r}")
        if method == "hintloop_load":
            await asyncio.sleep(self.plan.load_ms / 1e3)
        answer: dict[str, Any] = getattr(self.worker, method)(**kwargs)
        return answer

    async def generate(self, ask: Ask, fault: Fault | None) -> AsyncGenerator[Answer, None]:
        """Yield the growing answer, the last time with its ``finish_reason``. Raises ``Dropped``."""
        life, answer = self.restarts, Answer()
        with self._admitted(ask, answer):
            self.waiting += 1
            try:
                await self._slots.acquire()
            finally:
                self.waiting -= 1
            try:
                await asyncio.sleep(self.plan.prompt_ms / 1e3 + _seconds(fault, "slow"))
                async with aclosing(self._sample(ask, answer, fault, life)) as steps:
                    async for _ in steps:
                        yield answer
            finally:
                self._slots.release()

    async def _sample(
        self, ask: Ask, answer: Answer, fault: Fault | None, life: int
    ) -> AsyncGenerator[None, None]:
        context = context_of(ask.token_ids)
        own = ask.request_id if ask.seed is None else ask.seed
        seed = 0 if ask.greedy else hash_of(f"{self._seed}:{own}")
        while answer.finish_reason is None:
            size = min(self.plan.stream_interval, ask.max_tokens - len(answer.token_ids))
            if fault and fault.kind in ("drop", "hang", "restart"):
                size = min(size, fault.tokens - len(answer.token_ids))
                if size <= 0:
                    await self.fail(fault)
            if answer.token_ids:
                await asyncio.sleep(size * self.plan.token_ms / 1e3)
            while self.paused and not answer.aborted and life == self.restarts:
                await self._change()
            if life != self.restarts or self.worker.broken:
                raise Dropped
            if answer.aborted:
                answer.finish_reason = "abort"
            else:
                context = self._draw(ask, answer, size, context, seed)
            if answer.finish_reason and fault and fault.kind == "mislabel":
                answer.spans = [{"version": WRONG_LABEL, "start": 0, "end": len(answer.token_ids)}]
            yield

    def _draw(self, ask: Ask, answer: Answer, size: int, context: int, seed: int) -> int:
        """Sample ``size`` tokens with the weights of this moment; the context after them."""
        model, label, stop_after = ask.model or self.worker.model, self.label, self.plan.stop_after
        for _ in range(size):
            token = model.draw(context, seed, ask.stop_ids, stop_after)
            answer.add(token, model.logprob(context, token), label)
            self.sampled += 1
            context = fold(context, token)
            if token in ask.stop_ids:
                answer.finish_reason = "stop"
                return context
        if len(answer.token_ids) >= ask.max_tokens:
            answer.finish_reason = "length"
        return context

    async def fail(self, fault: Fault) -> NoReturn:
        """Suffer a ``drop``, ``hang`` or ``restart``. Raises ``Dropped``."""
        if fault.kind == "hang":
            await asyncio.sleep(HANG_S)
        if fault.kind == "restart":
            self._restart(fault.seconds)
        raise Dropped

    @contextmanager
    def _admitted(self, ask: Ask, answer: Answer) -> Iterator[None]:
        self.running[ask.request_id] = answer
        started = time.monotonic()
        try:
            yield
        finally:
            del self.running[ask.request_id]
            self.served.append(
                {
                    "request_id": ask.request_id,
                    "prompt": len(ask.token_ids),
                    "tokens": len(answer.token_ids),
                    "finish_reason": answer.finish_reason,
                    "seconds": time.monotonic() - started,
                }
            )

    def _play_dead(self) -> None:
        self._start_anew(HANG_S)

    def _start_anew(self, seconds: float) -> None:
        self.close()
        self._up_at = time.monotonic() + seconds
        self._begin()
        self.restarts += 1  # last of what another thread may look at
        self._move()

    def _move(self) -> None:
        self._moved.set()

    async def _change(self) -> None:
        self._moved.clear()
        await self._moved.wait()


def _seconds(fault: Fault | None, kind: str) -> float:
    return fault.seconds if fault and fault.kind == kind else 0.0
