"""Teachers: stronger models behind an OpenAI-compatible chat API, asked what they would do at one turn.

A teacher may be slow, wrong, dear or gone; none of that may disturb an episode. So an answer is always data: calls,
or what went wrong. What an attempt may cost at worst is set aside in the ledger before it is made.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
import weakref
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx

from hintloop.envs.models import ToolCall
from hintloop.rollout.answer_cache import AnswerCache, cache_key
from hintloop.rollout.chat_api import (
    ChatApi,
    Failed,
    calls_text,
    parse_calls,
    parse_text,
    read_calls,
    read_text,
    usage,
)
from hintloop.rollout.config import TeacherSpec
from hintloop.rollout.ledger import Ledger, LedgerFailed, OverBudget, Reservation
from hintloop.rollout.pace import Pace

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0
T = TypeVar("T")
PROMPT_MARGIN = 1024
"""Tokens that a teacher's own template may add to a prompt, over the bytes of the request."""


@dataclass(frozen=True, slots=True)
class TeacherAnswer:
    """What one teacher said: ``error`` is None exactly when there are ``calls``."""

    teacher: str
    calls: tuple[ToolCall, ...]
    """Those of one turn, in their order."""
    error: str | None
    cost_usd: float
    """What was booked for it; the worst case for each attempt whose outcome is not known."""
    seconds: float
    cached: bool = False
    """It was asked before, and comes from the disk."""
    over_budget: bool = False
    """It was not asked, for what it might cost."""
    unusable: bool = False
    """It did answer, but without a call that can be read."""


@dataclass(slots=True)
class Bill:
    """What one question has cost so far, with all its teachers and attempts; grows while they are asked."""

    episode: str = ""
    usd: float = 0.0


class Teacher:
    """Asks one teacher. The HTTP client, the ledger and the cache are shared and belong to the caller."""

    def __init__(
        self,
        spec: TeacherSpec,
        client: httpx.AsyncClient,
        *,
        timeout_s: float,
        attempts: int,
        in_flight: int,
        ledger: Ledger | None = None,
        cache: AnswerCache | None = None,
    ) -> None:
        """``timeout_s`` is for a question with all its ``attempts``; ``in_flight`` is how many requests run
        at once, unless the teacher has a limit of its own.

        ``ValueError`` when the environment variable of the key is not set, or cannot be one.
        """
        self.spec = spec
        self._timeout_s = timeout_s
        self._attempts = attempts
        self._slots = asyncio.Semaphore(spec.in_flight or in_flight)
        self._pace = Pace(spec.requests_per_minute)
        self._ledger = ledger
        self._cache = cache
        self._asking: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        self._api = ChatApi(spec, client, timeout_s=timeout_s)

    async def ask(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], bill: Bill | None = None
    ) -> TeacherAnswer:
        """The teacher's next turn for an OpenAI-style transcript; ``tools`` are plain function specs.

        ``bill`` grows by what is booked, also when this is cancelled.
        """
        body = question(self.spec, messages, tools)
        started, own = time.monotonic(), Bill(bill.episode if bill else "")
        try:
            asked = self._answer(body, own, parse_calls, calls_text, read_calls)
            found, problem = await self._safely(asked)
        finally:
            if bill is not None:
                bill.usd += own.usd
        calls, cached = found or ((), False)
        return TeacherAnswer(
            self.spec.name,
            calls,
            error=None if problem is None else str(problem),
            cost_usd=own.usd,
            seconds=time.monotonic() - started,
            cached=cached,
            over_budget=isinstance(problem, OverBudget),
            unusable=isinstance(problem, ValueError),
        )

    async def write(self, messages: Sequence[dict[str, Any]], bill: Bill) -> str | None:
        """What the teacher writes in answer to ``messages``, as one line; None when it does not."""
        body = {
            "model": self.spec.model,
            "messages": list(messages),
            "max_tokens": self.spec.max_answer_tokens,
        }
        found, _ = await self._safely(self._answer(body, bill, parse_text, json.dumps, read_text))
        return None if found is None else found[0]

    async def _safely(self, work: Coroutine[Any, Any, T]) -> tuple[T | None, Exception | None]:
        """What comes of ``work`` in time, or what went wrong: a ``ValueError`` is an answer that cannot be used."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await work, None
        except TimeoutError:
            return None, TimeoutError(f"no answer within {self._timeout_s:g} s")
        except (OverBudget, Failed, ValueError, LedgerFailed) as problem:
            return None, problem

    async def _answer(
        self,
        body: dict[str, Any],
        bill: Bill,
        parse: Callable[[dict[str, Any]], T],
        write: Callable[[T], str],
        read: Callable[[str], T],
    ) -> tuple[T, bool]:
        """What ``parse`` finds in the reply, and whether it comes from the cache, which holds what ``write`` gives.

        Who asks the same at the same time waits for the first.
        """
        if self._cache is None:
            return parse(await self._reply(body, bill)), False
        key = cache_key(self._api.url, body)
        async with self._asking.setdefault(key, asyncio.Lock()):
            found = await self._cache.find(key, read)
            if found is not None:
                return found, True
            answer = parse(await self._reply(body, bill))
            await self._cache.keep(key, write(answer))
            return answer, False

    async def _reply(self, body: dict[str, Any], bill: Bill) -> dict[str, Any]:
        """The reply of the first attempt that has one."""
        data = json.dumps(body).encode()
        for number in range(1, self._attempts + 1):
            try:
                async with self._slots:
                    await self._pace.take()
                    return await self._attempt(data, bill)
            except Failed as failed:
                if not failed.again or number == self._attempts:
                    raise
                if failed.wait is not None:
                    self._pace.hold_for(failed.wait)  # nobody else asks it meanwhile either
                    continue
            pause = min(FIRST_PAUSE_S * 2 ** (number - 1), LONGEST_PAUSE_S)
            await asyncio.sleep(pause * (0.5 + random.random()))
        raise AssertionError("the last attempt returns or raises")

    async def _attempt(self, data: bytes, bill: Bill) -> dict[str, Any]:
        """One request, with its place in the ledger from before it to after it."""
        worst = worst_case_usd(self.spec, data)
        held = await self._reserve(bill.episode, worst)
        cost = worst  # while the outcome is not known, as it never is after a timeout
        try:
            reply = await self._api.post(data)
            spent = usage(reply)
            cost = worst if spent is None else _price(self.spec, *spent)
            return reply
        except Failed as failed:
            cost = worst if failed.billed else 0.0
            raise
        finally:
            bill.usd += cost
            if held is not None and self._ledger is not None:
                self._ledger.settle(held, cost)

    async def _reserve(self, episode: str, worst: float) -> Reservation | None:
        ledger = self._ledger
        if ledger is None or worst == 0:
            return None
        holding = ledger.hold(episode, worst)

        def give_back(done: Future[Reservation]) -> None:
            if done.exception() is None:
                ledger.settle(done.result(), 0.0)

        try:
            return await asyncio.shield(asyncio.wrap_future(holding))
        except asyncio.CancelledError:
            holding.add_done_callback(give_back)  # the call is not made
            raise


def question(
    spec: TeacherSpec, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """The request that asks a teacher for its next call."""
    return {
        "model": spec.model,
        "messages": list(messages),
        "tools": [{"type": "function", "function": tool} for tool in tools],
        "tool_choice": "required",
        "max_tokens": spec.max_answer_tokens,
    }


def worst_case_usd(spec: TeacherSpec, data: bytes) -> float:
    """What one attempt at a request may cost: no token has less than a byte, and no answer is longer than allowed."""
    return _price(spec, len(data) + PROMPT_MARGIN, spec.max_answer_tokens)


def _price(spec: TeacherSpec, tokens_in: int, tokens_out: int) -> float:
    per_in, per_out = spec.usd_per_mtok_in or 0.0, spec.usd_per_mtok_out or 0.0
    return (tokens_in * per_in + tokens_out * per_out) / 1e6
