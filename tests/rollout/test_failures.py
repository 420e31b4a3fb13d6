"""Whose failure it was, and storages that fail for a while, for ever, or without a word."""

from __future__ import annotations

import asyncio
import errno
import math
import selectors
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from hintloop.agent.conversation import RenderError
from hintloop.agent.engine import EngineError
from hintloop.agent.episode import EpisodeLost, TaskUnfit
from hintloop.envs.client import AtCapacity, EnvironmentLost, Refused
from hintloop.replay import patience
from hintloop.replay.patience import StorageFailed
from hintloop.replay.weights import WeightStore
from hintloop.rollout.config import RolloutConfig
from hintloop.rollout.failures import Overdue, Part, part_of, reason_of
from hintloop.rollout.ledger import LedgerFailed
from hintloop.rollout.offload import aside, persist
from hintloop.rollout.weights import WeightsRefused, next_version

WHAT = "writing to the journal"


@pytest.mark.parametrize(
    ("error", "part", "reason"),
    [
        (EpisodeLost("sandbox", "out of disk"), Part.SANDBOX, "sandbox"),
        (EpisodeLost("environment", "gone"), Part.ENVIRONMENT, "environment"),
        (EpisodeLost("engine", "gone"), Part.ENGINE, "engine"),
        (EpisodeLost("ungraded", "no reward"), Part.TASK, "ungraded"),
        (EnvironmentLost("gone"), Part.ENVIRONMENT, "environment"),
        (AtCapacity("full"), Part.ENVIRONMENT, "environment"),
        (Refused("no such task"), Part.TASK, "task"),
        (TaskUnfit("too long"), Part.TASK, "task"),
        (EngineError("gone"), Part.ENGINE, "engine"),
        (WeightsRefused("version 3"), Part.ENGINE, "engine"),
        (RenderError("the template"), Part.MODEL, "model"),
        (httpx.ReadTimeout("late"), Part.TEACHER, "teacher"),
        (LedgerFailed("no space"), Part.STORAGE, "storage"),
        (StorageFailed("no space"), Part.STORAGE, "storage"),
        (Overdue(Part.TEACHER, "late"), Part.TEACHER, "teacher"),
        (KeyError("x"), Part.BUG, "bug:KeyError"),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, Exception) else str(each),
)
def test_every_failure_has_a_class(error: Exception, part: Part, reason: str) -> None:
    assert part_of(error) is part
    assert reason_of(error) == reason


def test_a_call_aside_gives_what_it_returns_or_raises_and_holds_nobody_up() -> None:
    async def run() -> None:
        assert await aside(lambda: threading.current_thread().name, name="journal") == "journal"
        with pytest.raises(KeyError):
            await aside(lambda: {}["x"], name="journal")
        begun, let_go = threading.Event(), threading.Event()

        def wait() -> bool:
            begun.set()
            return let_go.wait(30)

        waiting = asyncio.create_task(aside(wait, name="slow"))
        while not begun.is_set():  # noqa: ASYNC110 - it is of threads
            await asyncio.sleep(0.001)
        let_go.set()
        assert await waiting, "the call was over before anybody else came to do something"

    asyncio.run(run())


def test_neither_a_run_nor_its_process_waits_for_a_call_that_never_returns() -> None:
    for_ever = threading.Event()

    async def run() -> None:
        with pytest.raises(TimeoutError):
            await aside(for_ever.wait, name="dead", limit_s=0.05)

    started = time.monotonic()
    asyncio.run(run())
    assert time.monotonic() - started < 30.0
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "dead")
    for_ever.set()


def stored(call: Callable[[], str], patience_s: float) -> tuple[str, int]:
    """What the call returns in the end, and the failures before it."""
    failures: list[OSError] = []

    async def run() -> str:
        async with asyncio.timeout(20):
            return await persist(call, what=WHAT, patience_s=patience_s, on_failure=failures.append)

    return asyncio.run(run()), len(failures)


def failing(times: int, error: Exception) -> Callable[[], str]:
    calls = iter(range(times))
    busy = threading.Lock()

    def call() -> str:
        assert busy.acquire(blocking=False), "two calls at once"
        try:
            if next(calls, None) is not None:
                raise error
            return "written"
        finally:
            busy.release()

    return call


def test_a_storage_that_fails_for_a_while_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "FIRST_PAUSE_S", 0.01)
    assert stored(failing(4, OSError(errno.EIO, "Input/output error")), 10.0) == ("written", 4)


class SkippingSelector(selectors.DefaultSelector):
    """Of a loop whose clock jumps to what is due next, whenever no call to the storage is under way."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        while True:
            busy = any(thread.name == WHAT for thread in threading.enumerate())
            found = super().select(0.001 if busy and timeout != 0 else 0)
            if found or timeout == 0:
                return found
            if not busy:
                self.now += timeout or 0.0
                return found


def seconds_until_written(clock: SkippingSelector, fails_s: float) -> float:
    """How long an append takes, with the run's own patience, to a storage that fails for the first ``fails_s``."""

    def loop() -> asyncio.AbstractEventLoop:
        made = asyncio.SelectorEventLoop(clock)
        monkeypatch.setattr(made, "time", lambda: clock.now)
        return made

    def append() -> str:
        if clock.now < fails_s:
            raise OSError(errno.EIO, "Input/output error")
        return "written"

    rule = RolloutConfig().storage_timeout_s
    with pytest.MonkeyPatch.context() as monkeypatch, asyncio.Runner(loop_factory=loop) as runner:
        patient = persist(append, what=WHAT, patience_s=rule, on_failure=lambda error: None)
        assert runner.run(patient) == "written"
    return clock.now


def test_a_storage_may_fail_for_minutes() -> None:
    for fails_s in (60.0, 240.0):
        longest = 1.5 * patience.LONGEST_PAUSE_S
        assert fails_s <= seconds_until_written(SkippingSelector(), fails_s) <= fails_s + longest
    clock = SkippingSelector()
    with pytest.raises(StorageFailed, match="failed for 300 s: Input/output error"):
        seconds_until_written(clock, math.inf)
    assert clock.now == pytest.approx(300.0)


def test_a_storage_that_fails_for_too_long_says_why() -> None:
    with pytest.raises(
        StorageFailed, match=r"writing to the journal failed for 2 s: No space left on device"
    ):
        stored(failing(10**6, OSError(errno.ENOSPC, "No space left on device")), 2.0)


def test_a_storage_that_never_answers_says_so() -> None:
    for_ever = threading.Event()
    with pytest.raises(StorageFailed, match="it does not answer"):
        stored(lambda: str(for_ever.wait()), 0.1)
    for_ever.set()


def test_a_fetch_of_weights_that_never_ends_is_begun_anew(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "weights.txt").write_text("w")
    store = WeightStore(tmp_path / "weights")
    store.publish(0, tmp_path / "made", metadata={})
    for_ever, fetches, heard = threading.Event(), list[int](), list[OSError]()

    class Hanging:
        """The first fetch never returns."""

        def latest(self) -> Any:
            return store.latest()

        def fetch(self, version: int, cache: Path) -> Path:
            fetches.append(version)
            if len(fetches) == 1:
                for_ever.wait()
            return store.fetch(version, cache)

    async def run() -> int:
        async with asyncio.timeout(60):
            cache = tmp_path / "cache"
            following = next_version(
                Hanging(), cache, after=-1, poll_s=0.01, fetch_s=1.0, on_failure=heard.append
            )
            return (await following).version

    assert asyncio.run(run()) == 0
    assert len(fetches) >= 2
    assert {type(error) for error in heard} == {TimeoutError}
    for_ever.set()


@pytest.mark.parametrize("error", [FileExistsError("another writer"), ValueError("a bug")])
def test_what_no_second_try_can_change_is_raised_at_once(error: Exception) -> None:
    with pytest.raises(type(error)):
        stored(failing(1, error), 10.0)
