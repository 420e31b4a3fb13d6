"""Teachers: stronger models behind an OpenAI-compatible chat API, asked what they would do at one turn.

A teacher may be slow, wrong or gone; none of that may disturb an episode. So an answer is always data: a
call, or what went wrong.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import stamina

from hintloop.envs.models import ToolCall
from hintloop.rollout.config import TeacherSpec

RETRY_STATUS = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
MAX_ERROR_CHARS = 200


@dataclass(frozen=True, slots=True)
class TeacherAnswer:
    """What one teacher said: exactly one of ``call`` and ``error`` is set."""

    teacher: str
    call: ToolCall | None
    error: str | None
    cost_usd: float
    seconds: float


class _Refused(Exception):
    """An answer that asking again may change, after ``wait`` seconds if the teacher said so."""

    def __init__(self, status: int, wait: float | None):
        super().__init__(f"HTTP {status}")
        self.wait = wait


class Teacher:
    """Asks one teacher. The HTTP client is shared and belongs to the caller."""

    def __init__(
        self, spec: TeacherSpec, client: httpx.AsyncClient, *, timeout_s: float, attempts: int, in_flight: int
    ) -> None:
        """``timeout_s`` is for a question with all its ``attempts``; ``in_flight`` is how many run at once.

        ``ValueError`` when the environment variable of the key is not set.
        """
        self.spec = spec
        self._client = client
        self._timeout_s = timeout_s
        self._attempts = attempts
        self._slots = asyncio.Semaphore(in_flight)
        self._headers = {}
        if spec.api_key_env is not None:
            key = os.environ.get(spec.api_key_env)
            if not key:
                raise ValueError(
                    f"teacher {spec.name}: the environment variable {spec.api_key_env} is not set"
                )
            self._headers["Authorization"] = f"Bearer {key}"

    async def ask(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> TeacherAnswer:
        """The teacher's next call for an OpenAI-style transcript; ``tools`` are plain function specs."""
        started = time.monotonic()
        body = {
            "model": self.spec.model,
            "messages": list(messages),
            "tools": [{"type": "function", "function": spec} for spec in tools],
            "tool_choice": "required",
        }
        call, error, cost = None, None, 0.0
        try:
            async with asyncio.timeout(self._timeout_s), self._slots:
                reply = await self._post(body)
            cost = self._cost(reply)
            call = parse_call(reply)
        except TimeoutError:
            error = f"no answer within {self._timeout_s:g} s"
        except (httpx.HTTPError, _Refused, ValueError) as problem:
            error = f"{type(problem).__name__}: {problem}"[:MAX_ERROR_CHARS]
        return TeacherAnswer(self.spec.name, call, error, cost, time.monotonic() - started)

    async def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        retries = stamina.retry_context(
            on=_try_again, attempts=self._attempts, timeout=None, wait_initial=0.2, wait_max=5.0
        )
        async for attempt in retries:
            with attempt:
                return await self._post_once(body)
        raise AssertionError("stamina raises after the last attempt")

    async def _post_once(self, body: dict[str, Any]) -> dict[str, Any]:
        url = self.spec.base_url.rstrip("/") + "/chat/completions"
        response = await self._client.post(url, json=body, headers=self._headers, timeout=self._timeout_s)
        if response.status_code in RETRY_STATUS:
            raise _Refused(response.status_code, _retry_after(response))
        if response.status_code != 200:
            raise ValueError(f"HTTP {response.status_code}: {response.text[:MAX_ERROR_CHARS]}")
        reply = response.json()
        if not isinstance(reply, dict):
            raise ValueError("the answer is no JSON object")
        return reply

    def _cost(self, reply: dict[str, Any]) -> float:
        spent_in = _tokens(reply, "prompt_tokens") * self.spec.usd_per_mtok_in
        spent_out = _tokens(reply, "completion_tokens") * self.spec.usd_per_mtok_out
        return (spent_in + spent_out) / 1e6


def _try_again(error: Exception) -> bool | float:
    if isinstance(error, _Refused):
        return True if error.wait is None else error.wait
    return isinstance(error, httpx.TransportError)


def _retry_after(response: httpx.Response) -> float | None:
    value = response.headers.get("retry-after", "")
    return float(value) if value.isdigit() else None


def _tokens(reply: dict[str, Any], name: str) -> int:
    usage = reply.get("usage")
    count = usage.get(name) if isinstance(usage, dict) else None
    return count if isinstance(count, int) else 0


def parse_call(reply: dict[str, Any]) -> ToolCall:
    """The first tool call of a chat completion. ``ValueError`` when there is none that can be read."""
    try:
        function = reply["choices"][0]["message"]["tool_calls"][0]["function"]
        name, arguments = function["name"], function["arguments"]
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (KeyError, IndexError, TypeError):
        raise ValueError("the answer holds no tool call") from None
    if not isinstance(name, str) or not isinstance(parsed, dict):
        raise ValueError("the answer's tool call has no name or no arguments")
    return ToolCall(name=name, arguments=parsed)
