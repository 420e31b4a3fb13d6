"""The local engine: a transformers model in this process, all requests decoded together.

One worker thread owns the model and runs ``Scheduler.step`` again and again; asyncio tasks hand it requests
through a bounded queue and wait for futures. Waiting is never silent: a worker that fails or stops moving
turns every wait into an ``EngineError``.

New weights are taken over between two steps. Keys and values that older weights computed stay valid for the
session that they belong to (as in vLLM's ``pause(keep)``): the recorded log-probabilities are those of the
distribution that was really sampled, which is all that an importance ratio needs.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hintloop.agent.engine import EngineError, Sample, Sampling
from hintloop.rollout.engines.decoder import Decoder
from hintloop.rollout.engines.scheduler import Request, Scheduler

MAX_PENDING = 4096
"""Requests and orders that may be unanswered at once."""
IDLE_SECONDS = 0.2
"""How often an idle worker shows that it is alive."""


class LocalEngine:
    """An ``Engine`` on a model of this process. It owns ``model``: nothing else may run or change it."""

    def __init__(
        self,
        model: Any,
        tokenizer_stop_ids: Sequence[int],
        *,
        slots: int,
        max_length: int,
        threads: int | None,
        seed: int,
        version: int = 0,
        stall_seconds: float = 120.0,
    ) -> None:
        """Start the worker.

        ``slots`` sequences of at most ``max_length`` tokens (prompt and sample) are decoded together.
        ``threads`` is torch's thread count, one setting for the whole process; None leaves it alone. More
        than one pays only while nothing else wants the cores.
        ``stall_seconds`` is how long one step, or reading weights, may last before waiting callers give up.
        Raises ``ValueError`` for a model that cannot run in slots.
        """
        if slots < 1 or max_length < 2:
            raise ValueError(f"an engine needs a slot and two tokens of length, not {slots} and {max_length}")
        self.max_length = max_length
        self._stall_seconds = stall_seconds
        self._decoder = Decoder(model, slots=slots, max_length=max_length)
        self._scheduler = Scheduler(self._decoder, stop_ids=tokenizer_stop_ids, seed=seed, version=version)
        self._inbox: queue.Queue[Callable[[], None]] = queue.Queue(MAX_PENDING)
        self._lock = threading.Lock()
        self._waiters: dict[object, asyncio.Future[Any]] = {}
        self._failure: str | None = None
        self._cause: Exception | None = None
        self._closing = False
        self._busy_seconds = 0.0
        self._beat = time.monotonic()
        self._worker = threading.Thread(target=self._run, args=(threads,), name="local-engine", daemon=True)
        self._worker.start()

    @classmethod
    def from_folder(
        cls,
        path: str | Path,
        *,
        slots: int,
        max_length: int,
        threads: int | None,
        seed: int,
        version: int = 0,
        stop_ids: Sequence[int] | None = None,
    ) -> LocalEngine:
        """Load a folder as ``save_pretrained`` writes it, in float32 on the CPU.

        ``stop_ids`` None means the end-of-sequence tokens that the folder names.
        Raises ``ValueError`` when model or tokenizer is not there.
        """
        from transformers import AutoModelForCausalLM, AutoTokenizer

        folder = Path(path)
        for pattern in ("config.json", "*.safetensors", "tokenizer_config.json"):
            if not any(folder.glob(pattern)):
                raise ValueError(f"{folder} is not a model folder: it has no {pattern}")
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        if stop_ids is None:
            named = model.generation_config.eos_token_id
            listed = named if isinstance(named, list) else [named]
            stop_ids = sorted({token for token in [*listed, tokenizer.eos_token_id] if token is not None})
        return cls(
            model, stop_ids, slots=slots, max_length=max_length, threads=threads, seed=seed, version=version
        )

    @property
    def version(self) -> int:
        """Version of the weights that the next step uses."""
        return self._scheduler.version

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str) -> Sample:
        """Sample one continuation; see ``Engine``. Cancelling the call frees its row."""
        request = self._request(prompt_ids, sampling, session)
        try:
            sample = await self._ask(request, partial(self._scheduler.submit, request))
        finally:
            request.cancelled = True  # without effect on a request that is finished
        assert isinstance(sample, Sample)
        return sample

    async def end_session(self, session: str) -> None:
        """Forget what was cached for ``session``."""
        self._post(partial(self._scheduler.end_session, session))

    async def load_weights(self, folder: Path, version: int) -> None:
        """Use the weights in ``folder`` from the next step on; returns when they are in use.

        Requests in flight go on with what they have cached. Raises ``ValueError`` for weights that do not fit
        (nothing has changed then) and ``EngineError``.
        """
        reading = asyncio.to_thread(self._decoder.read_weights, Path(folder))
        try:
            tensors = await asyncio.wait_for(reading, self._stall_seconds)
        except TimeoutError as error:
            raise EngineError(f"reading {folder} took more than {self._stall_seconds:g} s") from error
        order = object()

        def take_over() -> None:
            self._scheduler.load_weights(tensors, version)
            self._answer(order, None)

        await self._ask(order, take_over)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probability of each token after the first under the weights in use, temperature 1, nats.

        Computed between two steps, without a slot. Raises ``ValueError`` and ``EngineError``.
        """
        ids = self._checked(token_ids)
        if len(ids) < 2 or len(ids) > self.max_length:
            raise ValueError(f"can score 2 to {self.max_length} tokens, not {len(ids)}")
        key = object()
        scores = await self._ask(key, lambda: self._answer(key, self._decoder.score(ids)))
        assert isinstance(scores, list)
        return scores

    def stats(self) -> dict[str, float]:
        """Totals since the start: tokens, steps, seconds in steps, mean number of working rows."""
        counters = self._scheduler.counters
        return {
            "sampled_tokens": counters.sampled,
            "prefilled_tokens": counters.prefilled,
            "reused_tokens": counters.reused,
            "decode_steps": counters.steps,
            "mean_occupancy": counters.live / max(1, counters.steps),
            "evictions": counters.evictions,
            "busy_seconds": self._busy_seconds,
        }

    async def close(self) -> None:
        """Stop after the step that is running; calls that still wait get ``EngineError``."""
        self._closing = True
        with contextlib.suppress(queue.Full):  # then the worker is awake anyway
            self._inbox.put_nowait(lambda: None)
        await asyncio.to_thread(self._worker.join, self._stall_seconds)
        if self._worker.is_alive():
            raise EngineError(f"the engine did not stop within {self._stall_seconds:g} s")

    # The asyncio side

    def _request(self, prompt_ids: Sequence[int], sampling: Sampling, session: str) -> Request:
        prompt = self._checked(prompt_ids)
        room = self.max_length - len(prompt)
        if not prompt or room < 1:
            raise ValueError(f"a prompt of {len(prompt)} tokens leaves no room in {self.max_length}")
        if sampling.max_new_tokens < 1 or not 0.0 <= sampling.temperature < math.inf:
            raise ValueError(f"cannot sample with {sampling}")
        return Request(prompt, sampling.temperature, min(room, sampling.max_new_tokens), session)

    def _checked(self, token_ids: Sequence[int]) -> list[int]:
        ids = [int(token) for token in token_ids]
        if ids and (min(ids) < 0 or max(ids) >= self._decoder.vocabulary):
            raise ValueError(f"token ids must be below {self._decoder.vocabulary}")
        return ids

    async def _ask(self, key: object, order: Callable[[], None]) -> object:
        """Post an order and wait until the worker answers ``key``."""
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        with self._lock:
            self._check()
            if len(self._waiters) >= MAX_PENDING:
                raise EngineError(f"more than {MAX_PENDING} requests are waiting")
            self._waiters[key] = future
        try:
            self._post(order)
            while not future.done():
                await asyncio.wait({future}, timeout=self._stall_seconds / 4)
                silent = time.monotonic() - self._beat
                if not future.done() and silent > self._stall_seconds:
                    raise EngineError(f"the engine has not finished a step for {silent:.0f} s")
            return future.result()
        finally:
            future.cancel()  # without effect on one that is done
            with self._lock:
                self._waiters.pop(key, None)

    def _post(self, order: Callable[[], None]) -> None:
        self._check()
        try:
            self._inbox.put_nowait(order)
        except queue.Full:
            raise EngineError(f"more than {MAX_PENDING} orders are waiting") from None

    def _check(self) -> None:
        if self._failure is not None or self._closing:
            raise EngineError(self._failure or "the engine is closed") from self._cause

    # The worker side

    def _run(self, threads: int | None) -> None:
        try:
            if threads is not None:
                torch.set_num_threads(threads)
            with torch.inference_mode():
                while not self._closing:
                    self._take_orders()
                    self._work()
            self._fail("the engine is closed", None)
        except Exception as error:  # noqa: BLE001 - the thread's boundary: every caller gets it as the cause
            self._fail(f"the engine failed: {error!r}", error)

    def _take_orders(self) -> None:
        """Run what was posted; sleeps while there is nothing at all to do."""
        self._beat = time.monotonic()
        with contextlib.suppress(queue.Empty):
            if not self._scheduler.busy:
                self._inbox.get(timeout=IDLE_SECONDS)()
            while True:
                self._inbox.get_nowait()()

    def _work(self) -> None:
        started = time.perf_counter()
        finished = self._scheduler.step()
        self._busy_seconds += time.perf_counter() - started
        for done in finished:
            sampled = (tuple(done.token_ids), tuple(done.logprobs), tuple(done.versions))
            self._answer(done, Sample(*sampled, done.finish_reason))

    def _answer(self, key: object, result: object) -> None:
        with self._lock:
            future = self._waiters.pop(key, None)
        if future is not None:
            _settle_soon(future, result, None)

    def _fail(self, message: str, cause: Exception | None) -> None:
        with self._lock:
            self._failure, self._cause = message, cause
            futures = list(self._waiters.values())
            self._waiters.clear()
        for future in futures:
            error = EngineError(message)
            error.__cause__ = cause
            _settle_soon(future, None, error)


def _settle_soon(future: asyncio.Future[Any], result: object, error: EngineError | None) -> None:
    def settle() -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    # RuntimeError: the loop is closed, and with it everyone who waited.
    with contextlib.suppress(RuntimeError):
        future.get_loop().call_soon_threadsafe(settle)
