"""What one request to a vLLM server brought, and how much of it can be trusted.

vLLM names, for every answer, the weights that sampled each span of tokens, and the name is changed only while
generation is paused: such a record is exact. A stream that is cut has no spans; its tokens count only if the
server was seen with the known version after the first of them came, and no update began meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

LOST_LOGPROB = -9998.0
"""vLLM reports -9999 for a log-probability that it does not know."""
MAX_EVENT_BYTES = 64 << 20
MAX_ERROR_CHARS = 300
REMEMBERED = 16
"""Versions of one server that answers in flight may still be of."""


class BadAnswer(Exception):
    """An answer that cannot be right."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one request brought: an answer with its end, or the trustworthy start of one and what went wrong."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()
    finish_reason: str = ""
    """``stop``, ``length``, or empty when the answer is not complete."""
    problem: str = ""
    gone: bool = False
    """The problem is one of the connection or of the weights: the server must be looked at before more is asked."""


@dataclass(slots=True)
class Standing:
    """What is known of a server's weights."""

    version: int | None = None
    """What it samples from, once verified; None while that is not known or changes."""
    epoch: int = 0
    """Number of the period in which the weights cannot have changed without our doing."""
    confirmed_at: float = -math.inf
    """Start of the last look that found the version in place; monotonic seconds."""
    _verified: deque[int] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _failed: dict[int, int] = field(default_factory=dict)
    _settled: asyncio.Event = field(default_factory=asyncio.Event)

    def begin(self) -> None:
        """The weights are about to change."""
        self.version = None
        self.epoch += 1
        self._settled.clear()

    def admit(self, version: int) -> None:
        """The weights in place are those of ``version``, checked."""
        self.version = version
        self._verified.append(version)
        self._settled.set()

    def refuse(self, version: int) -> None:
        """What is called ``version`` there is something else; nothing of it counts."""
        self.version = None
        self._failed[version] = self.epoch
        while len(self._failed) > REMEMBERED:
            self._failed.pop(next(iter(self._failed)))
        self._settled.set()

    def lose(self) -> None:
        """The server may be another process from now on."""
        self.version = None
        self.epoch += 1
        self._settled.set()

    async def trusted(self, versions: Sequence[int | None], epoch: int) -> int:
        """How many of the first tokens count, for a request of ``epoch``; waits for a check that goes on."""
        count = self._trusted(versions, epoch)
        if count < len(versions) and not self._settled.is_set():
            await self._settled.wait()
            count = self._trusted(versions, epoch)
        return count

    def _trusted(self, versions: Sequence[int | None], epoch: int) -> int:
        for place, version in enumerate(versions):
            if version is None or version not in self._verified or self._failed.get(version, -1) >= epoch:
                return place
        return len(versions)


class Stream:
    """The answer to one request, as it comes in."""

    def __init__(self, standing: Standing, limit: int, stop_ids: frozenset[int]) -> None:
        self._standing = standing
        self._limit = limit
        self._stop_ids = stop_ids
        self._epoch, self._version = standing.epoch, standing.version
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int | None] = []
        self._reason = ""
        self._first_at = math.inf
        self._certain = 0

    def add(self, event: Any) -> None:
        """Take in one piece. Raises ``BadAnswer``."""
        try:
            if "error" in event:
                raise BadAnswer(f"the server says: {str(event['error'])[:MAX_ERROR_CHARS]}")
            for choice in event["choices"]:
                self._add_tokens(choice["token_ids"] or [], (choice["logprobs"] or {}).get("content") or [])
                if choice["finish_reason"] is not None:
                    self._end(choice["finish_reason"], choice["weight_versions"] or [])
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise BadAnswer(f"an answer that cannot be read: {error!r}") from error
        self._mark()

    async def piece(self, problem: str, *, gone: bool) -> Piece:
        """What can be used of it; ``problem`` is what happened if it is not complete."""
        if not self._reason:
            self._mark()
            return self._cut(self._certain, [self._version] * self._certain, problem, gone=gone)
        count = await self._standing.trusted(self._versions, self._epoch)
        if count < len(self._ids):
            problem = f"tokens of weights that were not verified there: {self._versions[count]}"
            return self._cut(count, self._versions, problem, gone=True)
        if self._reason not in ("stop", "length"):
            return self._cut(count, self._versions, f"it ended the request ({self._reason})", gone=False)
        return replace(self._cut(count, self._versions, "", gone=False), finish_reason=self._reason)

    def _cut(self, count: int, versions: Sequence[int | None], problem: str, *, gone: bool) -> Piece:
        known = tuple(version for version in versions[:count] if version is not None)
        assert len(known) == count
        return Piece(tuple(self._ids[:count]), tuple(self._logprobs[:count]), known, "", problem, gone)

    def _add_tokens(self, ids: Sequence[int], content: Sequence[dict[str, Any]]) -> None:
        if [entry["token_id"] for entry in content] != list(ids):
            raise BadAnswer(f"log-probabilities of other tokens than the {len(ids)} that were sampled")
        logprobs = [float(entry["logprob"]) for entry in content]
        if not all(LOST_LOGPROB < logprob < 1e-3 for logprob in logprobs):
            raise BadAnswer(f"impossible log-probabilities: {logprobs}")
        if ids and self._first_at == math.inf:
            self._first_at = time.monotonic()
        self._ids += ids
        self._logprobs += logprobs

    def _end(self, reason: str, spans: Sequence[dict[str, Any]]) -> None:
        for span in spans:
            if span["start"] != len(self._versions):
                raise BadAnswer(f"spans of weight versions with gaps: {spans}")
            self._versions += [version_of(span["version"])] * (span["end"] - span["start"])
        if len(self._versions) != len(self._ids) or len(self._ids) > self._limit:
            raise BadAnswer(f"{len(self._ids)} tokens of {self._limit}, {len(self._versions)} with a version")
        stopped = bool(self._ids) and self._ids[-1] in self._stop_ids
        if (reason == "stop") != stopped or (reason == "length" and not self._ids):
            raise BadAnswer(f"it says {reason!r}, but the last token is {self._ids[-1:]}")
        self._reason = reason

    def _mark(self) -> None:
        """Note how much is certainly of the version that the request began with."""
        standing = self._standing
        if standing.epoch == self._epoch and self._first_at <= standing.confirmed_at:
            self._certain = len(self._ids) if self._version is not None else 0


async def events(response: httpx.Response) -> AsyncIterator[Any]:
    """The JSON of each server-sent event. Raises ``BadAnswer``."""
    rest = b""
    async for part in response.aiter_raw():
        *whole, rest = (rest + part).split(b"\n\n")
        if len(rest) > MAX_EVENT_BYTES:
            raise BadAnswer(f"an event of more than {MAX_EVENT_BYTES} bytes")
        for event in whole:
            data = event.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                continue
            try:
                parsed = json.loads(data)
            except ValueError as error:
                raise BadAnswer(f"an event that is no JSON: {error}") from error
            yield parsed


def version_of(name: str) -> int | None:
    """The version that weights are called by; None for those that a server was started with."""
    return int(name) if name.isdecimal() else None
