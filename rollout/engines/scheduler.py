"""Which sequence is in which slot, and what is computed next. One thread, no clock, no queue.

A session keeps its slot between turns, so that a turn computes only what is new. With no slot left, the
session that has been idle longest loses its own. A new session copies the longest prefix that another slot
already holds (the system text, the prompt of its group), if that prefix was computed with today's weights.
Live rows are kept together at the front, because a step computes every row up to the last live one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from hintloop.rollout.engines.cache import Chunk
from hintloop.rollout.engines.decoder import Decoder, Tensors, draw

PREFILL_TOKENS = 512
"""Prompt tokens computed in one step at most, so that a long prompt does not stall the rows that decode."""
MIN_SHARED = 8
"""Copying a shared prefix shorter than this is not worth it."""
DENSE = 0.75
"""Rows are moved together when fewer than this share of the decoded rows is live."""


@dataclass(slots=True, eq=False)
class Request:
    """One call: what was asked, and what has been sampled so far."""

    prompt: list[int]
    temperature: float
    limit: int
    """Tokens to sample at most, at least 1."""
    session: str
    cancelled: bool = False
    """Set by any thread; the row is free at the next step."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: str = ""


@dataclass(slots=True, eq=False)
class Slot:
    """One row of the cache. Positions ``0 .. len(cached)`` hold the keys and values of ``cached``."""

    session: str | None = None
    cached: list[int] = field(default_factory=list)
    todo: list[int] = field(default_factory=list)
    """Tokens that come next; a row with exactly one of them decodes."""
    version: int = 0
    """Weights that computed the first cached token: the oldest in the row."""
    request: Request | None = None
    used: int = 0
    """Number of requests started when this one was; orders prompts, and idle sessions by age."""
    fresh: bool = False
    """Nothing of this conversation has been computed: it may take over another row's prefix."""


@dataclass(slots=True)
class Counters:
    """What was done since the start, in tokens, steps and rows."""

    sampled: int = 0
    prefilled: int = 0
    reused: int = 0
    steps: int = 0
    live: int = 0
    """Rows that worked, summed over the steps."""
    evictions: int = 0


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the longest prefix that both share."""
    limit = min(len(one), len(other))
    if one[:limit] == other[:limit]:
        return limit
    return next(i for i in range(limit) if one[i] != other[i])


class Scheduler:
    """Runs requests on a decoder, one step at a time."""

    def __init__(self, decoder: Decoder, *, stop_ids: Sequence[int], seed: int, version: int) -> None:
        self.version = version
        self.counters = Counters()
        self._decoder = decoder
        self._stops = frozenset(stop_ids)
        self._slots = [Slot() for _ in range(decoder.cache.slots)]
        self._rows: dict[str, int] = {}
        self._waiting: deque[Request] = deque()
        self._generator = torch.Generator().manual_seed(seed)
        self._started = 0

    @property
    def busy(self) -> bool:
        """Whether ``step`` has anything to do."""
        return bool(self._waiting) or any(slot.request for slot in self._slots)

    def submit(self, request: Request) -> None:
        """Queue a request; requests of one session run one after the other."""
        self._waiting.append(request)

    def end_session(self, session: str) -> None:
        """Forget a session; a request of it that is still running goes on, and leaves nothing behind."""
        row = self._rows.pop(session, None)
        if row is not None:
            self._slots[row].session = None

    def load_weights(self, tensors: Tensors, version: int) -> None:
        """Use new weights from the next step on. What is cached stays, but only for its own session."""
        self._decoder.load(tensors)
        self.version = version

    def step(self) -> list[Request]:
        """Compute one step; returns the requests that it finished."""
        self._drop_cancelled()
        self._admit()
        self._compact()
        live = [row for row, slot in enumerate(self._slots) if slot.request]
        if not live:
            return []
        chunks = self._chunks(live)
        decoding = [row for row in live if len(self._slots[row].todo) == 1]
        sampling, logits = self._forward(decoding, chunks)
        self.counters.steps += 1
        self.counters.live += len(live)
        return self._sample(sampling, logits) if sampling else []

    def _forward(self, decoding: list[int], chunks: list[Chunk]) -> tuple[list[int], torch.Tensor]:
        """Run decode rows and chunks; returns the rows that now need a token, and their logits."""
        span = decoding[-1] + 1 if decoding else 0
        tokens, positions = [0] * span, [self._decoder.cache.max_length] * span
        for row in decoding:
            slot = self._slots[row]
            tokens[row], positions[row] = slot.todo[0], len(slot.cached)
        sampling, keep, flat = list(decoding), list(decoding), span
        for chunk in chunks:
            flat += len(chunk.tokens)
            if len(chunk.tokens) == len(self._slots[chunk.row].todo):
                sampling.append(chunk.row)
                keep.append(flat - 1)
        logits = self._decoder.forward(tokens, positions, chunks, keep)
        for row in decoding:
            self._store(self._slots[row], 1)
        for chunk in chunks:
            self._store(self._slots[chunk.row], len(chunk.tokens))
            self.counters.prefilled += len(chunk.tokens)
        return sampling, logits

    def _store(self, slot: Slot, count: int) -> None:
        if not slot.cached:
            slot.version = self.version
        slot.cached += slot.todo[:count]
        del slot.todo[:count]

    def _sample(self, rows: list[int], logits: torch.Tensor) -> list[Request]:
        requests = [request for row in rows if (request := self._slots[row].request)]
        tokens, logprobs = draw(logits, [request.temperature for request in requests], self._generator)
        finished = []
        for row, request, token, logprob in zip(rows, requests, tokens, logprobs, strict=True):
            request.token_ids.append(token)
            request.logprobs.append(logprob)
            request.versions.append(self.version)
            if token in self._stops:
                request.finish_reason = "stop"
            elif len(request.token_ids) == request.limit:
                request.finish_reason = "length"
            if request.finish_reason:
                self._release(self._slots[row])
                finished.append(request)
            else:
                self._slots[row].todo.append(token)
        self.counters.sampled += len(tokens)
        return finished

    def _release(self, slot: Slot) -> None:
        """The row goes idle; its cache stays for the session's next turn."""
        slot.request = None
        slot.todo.clear()

    def _drop_cancelled(self) -> None:
        for slot in self._slots:
            if slot.request and slot.request.cancelled:
                self._release(slot)
        if any(request.cancelled for request in self._waiting):
            self._waiting = deque(request for request in self._waiting if not request.cancelled)

    def _admit(self) -> None:
        """Start waiting requests in order, as far as there are slots; a busy session waits for itself."""
        idle = sum(slot.request is None for slot in self._slots)
        passed: list[Request] = []
        while self._waiting and idle:
            request = self._waiting.popleft()
            row = self._rows.get(request.session)
            if row is not None and self._slots[row].request:
                passed.append(request)
                continue
            self._start(self._vacate(request.session) if row is None else row, request)
            idle -= 1
        self._waiting.extendleft(reversed(passed))

    def _vacate(self, session: str) -> int:
        """A row for a new session: the first that nobody owns, else that of the session idle for longest."""
        idle = [row for row, slot in enumerate(self._slots) if slot.request is None]
        owned = {row: self._slots[row].session is not None for row in idle}
        row = min(idle, key=lambda row: (self._slots[row].used if owned[row] else 0, row))
        slot = self._slots[row]
        if slot.session is not None:
            del self._rows[slot.session]
            self.counters.evictions += 1
        if slot.version != self.version:
            slot.cached.clear()
        slot.session, slot.fresh = session, True
        self._rows[session] = row
        return row

    def _start(self, row: int, request: Request) -> None:
        slot = self._slots[row]
        # At least the last prompt token is computed: its logits give the first sample.
        known = common_prefix(slot.cached, request.prompt[:-1])
        del slot.cached[known:]
        slot.todo = request.prompt[known:]
        slot.request = request
        self._started += 1
        slot.used = self._started
        self.counters.reused += known

    def _chunks(self, live: list[int]) -> list[Chunk]:
        """Prompt tokens for this step, oldest request first."""
        budget, chunks = PREFILL_TOKENS, []
        for row in sorted(live, key=lambda row: self._slots[row].used):
            slot = self._slots[row]
            if len(slot.todo) == 1 or not budget:
                continue
            if slot.fresh:
                self._borrow(row)
            tokens = slot.todo[:budget]
            if len(slot.todo) > 1:
                chunks.append(Chunk(row, len(slot.cached), tokens))
                budget -= len(tokens)
        return chunks

    def _borrow(self, row: int) -> None:
        """Copy the longest prefix of a new session's prompt that any row computed with the weights in use."""
        slot = self._slots[row]
        slot.fresh = False
        prompt = slot.cached + slot.todo
        donors = [i for i, other in enumerate(self._slots) if other.cached and other.version == self.version]
        shared = {i: common_prefix(self._slots[i].cached, prompt[:-1]) for i in donors if i != row}
        best = max(shared, key=lambda i: shared[i], default=row)
        gain = shared.get(best, 0) - len(slot.cached)
        if gain >= MIN_SHARED:
            self._decoder.cache.copy(best, row, shared[best])
            slot.cached, slot.todo = prompt[: shared[best]], prompt[shared[best] :]
            slot.version = self.version
            self.counters.reused += gain

    def _compact(self) -> None:
        """Move the last live rows to idle ones before them, if too many of those are computed for nothing."""
        live = [row for row, slot in enumerate(self._slots) if slot.request]
        if not live or len(live) >= DENSE * (live[-1] + 1):
            return
        holes = [row for row in range(len(live)) if not self._slots[row].request]
        for hole, row in zip(holes, reversed(live), strict=False):
            self._exchange(hole, row)

    def _exchange(self, one: int, other: int) -> None:
        slots = self._slots
        self._decoder.cache.swap(one, other, max(len(slots[one].cached), len(slots[other].cached)))
        slots[one], slots[other] = slots[other], slots[one]
        for row in (one, other):
            session = slots[row].session
            if session is not None:
                self._rows[session] = row
