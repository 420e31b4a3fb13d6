"""What one request to a vLLM server brought, and how much of it can be trusted.

vLLM names, for every answer, the weights that sampled each span of tokens, and the name is changed only while
generation is paused: such a record is exact. A stream that is cut has no spans; its tokens count only if the
server was seen with the known version after the first of them came, and no update began meanwhile. A request that
names an adapter has all its tokens from that one; a server that was started again does not know it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
from pydantic_core import from_json

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
    slow: bool = False
    """Nothing came yet, and nothing is wrong: the server was busy, and the request is better made anew."""


@dataclass(slots=True)
class Standing:
    """What is known of a server's weights."""

    version: int | None = None
    """What it samples from, once verified; None while that is not known or changes."""
    name: str = ""
    """What the server calls these weights."""
    epoch: int = 0
    """Number of the period in which the weights cannot have changed without our doing."""
    confirmed_at: float = -math.inf
    """Start of the last look that found the version in place; monotonic seconds."""
    _verified: dict[str, int] = field(default_factory=dict)
    """Name of checked weights -> their version."""
    _failed: dict[str, int] = field(default_factory=dict)
    """Name -> the last epoch in which weights of that name were something else."""
    _settled: asyncio.Event = field(default_factory=asyncio.Event)

    def begin(self) -> None:
        """The weights are about to change."""
        self.version = None
        self.epoch += 1
        self._settled.clear()

    def verify(self, version: int, name: str) -> None:
        """The weights in place, called ``name``, are those of ``version``: what they sampled counts."""
        _remember(self._verified, name, version)
        self._settled.set()

    def admit(self, version: int, name: str) -> None:
        """The same, and the server is to sample more from them."""
        self.version, self.name = version, name
        self.verify(version, name)

    def refuse(self, name: str) -> None:
        """What is called ``name`` there is something else; nothing of it counts."""
        self.version = None
        _remember(self._failed, name, self.epoch)
        self._settled.set()

    def lose(self) -> None:
        """The server may be another process from now on."""
        self.version = None
        self.epoch += 1
        self._settled.set()

    async def trusted(self, names: Sequence[str], epoch: int) -> list[int]:
        """The versions of the first tokens, as far as these count, for a request of ``epoch``.

        Waits for a check that goes on.
        """
        versions = self._trusted(names, epoch)
        if len(versions) < len(names) and not self._settled.is_set():
            await self._settled.wait()
            versions = self._trusted(names, epoch)
        return versions

    def _trusted(self, names: Sequence[str], epoch: int) -> list[int]:
        versions = []
        for name in names:
            if name not in self._verified or self._failed.get(name, -1) >= epoch:
                break
            versions.append(self._verified[name])
        return versions


class Stream:
    """The answer to one request, as it comes in."""

    def __init__(
        self, standing: Standing, limit: int, stop_ids: frozenset[int], *, adapter: str = ""
    ) -> None:
        """``adapter`` is what the request named: its weights are those of all its tokens, whatever vLLM says."""
        self._adapter = adapter
        self._standing = standing
        self._limit = limit
        self._stop_ids = stop_ids
        self._epoch, self._version = standing.epoch, standing.version
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._names: list[str] = []
        self._reason = ""
        self._first_at = math.inf
        self._certain = 0

    def add(self, event: Any) -> None:
        """Take in one piece. Raises ``BadAnswer``."""
        if isinstance(event, dict) and "error" in event:
            raise BadAnswer(f"the server says: {str(event['error'])[:MAX_ERROR_CHARS]}")
        try:
            for choice in event["choices"]:
                self._add_tokens(choice["token_ids"] or [], (choice["logprobs"] or {}).get("content") or [])
                if choice["finish_reason"] is not None:
                    self._end(choice["finish_reason"], choice["weight_versions"] or [])
        except (BadAnswer, KeyError, TypeError, AttributeError, ValueError) as error:
            self._ids, self._logprobs, self._certain = [], [], 0  # who errs once is believed nothing
            if isinstance(error, BadAnswer):
                raise
            raise BadAnswer(f"an answer that cannot be read: {error!r}") from error
        self._mark()

    async def piece(self, problem: str, *, gone: bool) -> Piece:
        """What can be used of it; ``problem`` is what happened if it is not complete."""
        if not self._reason:
            self._mark()
            known = [] if self._version is None else [self._version] * self._certain
            return self._first(known, problem, gone=gone)
        versions = await self._standing.trusted(self._names, self._epoch)
        if len(versions) < len(self._ids):
            name = self._names[len(versions)]
            return self._first(versions, f"tokens of weights that were not verified there: {name}", gone=True)
        if self._reason not in ("stop", "length"):
            return self._first(versions, f"it ended the request ({self._reason})", gone=False)
        return replace(self._first(versions, "", gone=False), finish_reason=self._reason)

    def _first(self, versions: Sequence[int], problem: str, *, gone: bool) -> Piece:
        """As many tokens as there are versions."""
        ids, logprobs = self._ids[: len(versions)], self._logprobs[: len(versions)]
        return Piece(tuple(ids), tuple(logprobs), tuple(versions), "", problem, gone)

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
            if span["start"] != len(self._names):
                raise BadAnswer(f"spans of weight versions with gaps: {spans}")
            self._names += [str(span["version"])] * (span["end"] - span["start"])
        if self._adapter:
            self._names = [self._adapter] * len(self._names)  # vLLM names the base that it is applied to
        if len(self._names) != len(self._ids) or len(self._ids) > self._limit:
            raise BadAnswer(f"{len(self._ids)} tokens of {self._limit}, {len(self._names)} with a version")
        stopped = bool(self._ids) and self._ids[-1] in self._stop_ids
        if (reason == "stop") != stopped or (reason == "length" and not self._ids):
            raise BadAnswer(f"it says {reason!r}, but the last token is {self._ids[-1:]}")
        self._reason = reason

    def _mark(self) -> None:
        """Note how much is certainly of the version that the request began with."""
        standing = self._standing
        known = bool(self._adapter) or self._first_at <= standing.confirmed_at
        if standing.epoch == self._epoch and known:
            self._certain = len(self._ids)


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
                parsed = from_json(data, cache_strings="keys")  # a third of the time that json takes
            except ValueError as error:
                raise BadAnswer(f"an event that is no JSON: {error}") from error
            yield parsed


def _remember(known: dict[str, int], name: str, value: int) -> None:
    """Set an entry, and drop the oldest ones."""
    known.pop(name, None)
    known[name] = value
    while len(known) > REMEMBERED:
        known.pop(next(iter(known)))
