"""A learner whose storage fails for a while, for good, and until somebody stops it; on a clock of its own."""

from __future__ import annotations

import errno
import json
import math
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import fsspec  # type: ignore[import-untyped]
import pytest
from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]

from hintloop.learner import patience as module
from hintloop.learner.config import LearnerConfig
from hintloop.learner.patience import GivenUp, Patience
from hintloop.learner.run import LearnerSummary, run_learner
from hintloop.replay.journal import Journal
from hintloop.replay.patience import LONGEST_PAUSE_S, StorageFailed
from hintloop.replay.weights import WeightStore

from .factory import make_groups, save_student

CONFIG = LearnerConfig(steps=3, groups_per_step=2, micro_batches=2, max_staleness=None, keep_versions=2)


class Clock:
    """Waits take no time."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.on_wait: Callable[[], None] = lambda: None

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.on_wait()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


class Flaky(MemoryFileSystem):  # type: ignore[misc]
    """A remote storage that fails, in a way of its own, from one of its calls on for a while."""

    protocol = "flaky"
    store: dict[str, Any] = {}  # noqa: RUF012 - MemoryFileSystem keeps its files in the class
    pseudo_dirs = [""]  # noqa: RUF012
    clock: Clock
    calls = 0
    fails_at: float = 0
    fails_s: float = 0.0
    back_at: float | None = None

    @classmethod
    def fail(cls, at: float, seconds: float) -> None:
        cls.calls, cls.fails_at, cls.fails_s, cls.back_at = 0, at, seconds, None

    def _call(self) -> None:
        cls = type(self)
        cls.calls += 1
        if cls.calls > cls.fails_at:
            cls.back_at = self.clock.now + cls.fails_s if cls.back_at is None else cls.back_at
            if self.clock.now < cls.back_at:
                raise RuntimeError("503 Slow Down")

    def ls(self, *args: Any, **kwargs: Any) -> Any:
        self._call()
        return super().ls(*args, **kwargs)

    def info(self, *args: Any, **kwargs: Any) -> Any:
        self._call()
        return super().info(*args, **kwargs)

    def cat_file(self, *args: Any, **kwargs: Any) -> Any:
        self._call()
        return super().cat_file(*args, **kwargs)

    def pipe_file(self, *args: Any, **kwargs: Any) -> Any:
        self._call()
        return super().pipe_file(*args, **kwargs)

    def _open(self, *args: Any, **kwargs: Any) -> Any:
        self._call()
        return super()._open(*args, **kwargs)


@pytest.fixture
def flaky(clock: Clock) -> Iterator[type[Flaky]]:
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    Flaky.clock = clock
    Flaky.fail(0, 0.0)
    yield Flaky
    Flaky.store.clear()


class Run:
    """A learner with journal or weights, or both, on such a storage."""

    def __init__(self, folder: Path, flaky: tuple[str, ...] = ("journal", "weights")) -> None:
        self.folder, self.student = folder, save_student(folder / "student")
        place = f"flaky://{uuid4().hex}"
        self.journal, self.weights = (
            f"{place if part in flaky else folder}/{part}" for part in ("journal", "weights")
        )
        writer = Journal(self.journal).writer("w")
        for group in make_groups(6, 2):
            writer.append(group)

    def learn(self) -> LearnerSummary:
        return run_learner(
            self.student, self.journal, self.weights, self.folder / "run", CONFIG, follow=False
        )

    @property
    def state(self) -> str:
        return str(json.loads((self.folder / "run" / "status" / "learner.json").read_text())["state"])

    def ends_well(self) -> bool:
        summary = self.learn()
        found = WeightStore(self.weights)
        latest = found.latest()
        assert latest is not None
        assert (summary.step, summary.version, summary.reason) == (3, 3, "steps")
        return latest.version == 3 and latest.metadata["final"] and found.versions() == [2, 3]


def test_a_storage_may_fail_for_a_minute_wherever_the_learner_is(
    flaky: type[Flaky], clock: Clock, tmp_path: Path
) -> None:
    undisturbed = Run(tmp_path / "whole")
    flaky.fail(math.inf, 0.0)
    undisturbed.learn()
    calls = (
        flaky.calls - 20
    )  # fsspec takes some failures for a no; behind those of the last deletion nothing follows
    for at in (12, *random.sample(range(13, calls), 3)):
        run, before = Run(tmp_path / str(at)), clock.now
        flaky.fail(at, 60.0)
        assert run.ends_well(), at
        assert 60.0 <= clock.now - before <= 60.0 + 1.5 * LONGEST_PAUSE_S, at


PLACES = [
    ("weights", 0, "looking for weights"),
    ("weights", 6, "publishing version 0"),
    ("journal", 0, "reading the journal"),
    ("journal", 5, "reading the journal"),
]


@pytest.mark.parametrize(("part", "at", "what"), PLACES)
def test_a_storage_that_fails_for_good_ends_the_learner_with_one_line_and_a_restart_goes_on(
    flaky: type[Flaky], clock: Clock, tmp_path: Path, part: str, at: int, what: str
) -> None:
    run, before = Run(tmp_path, (part,)), clock.now
    flaky.fail(at, math.inf)
    with pytest.raises(StorageFailed) as caught:
        run.learn()
    place = {"journal": run.journal, "weights": run.weights}[part]
    assert str(caught.value) == f"{what} failed for 300 s: {place}: 503 Slow Down"
    assert run.state == f"waiting for a storage that fails: {what}"
    assert clock.now - before == pytest.approx(300.0)
    flaky.fail(math.inf, 0.0)
    assert run.ends_well()


@pytest.mark.parametrize(("part", "at", "what"), PLACES)
def test_sigterm_ends_the_wait_for_a_storage_and_a_restart_goes_on(
    flaky: type[Flaky], clock: Clock, tmp_path: Path, part: str, at: int, what: str
) -> None:
    run, before = Run(tmp_path, (part,)), clock.now
    clock.on_wait = lambda: os.kill(os.getpid(), signal.SIGTERM)
    flaky.fail(at, math.inf)
    if what == "looking for weights":  # nothing to go on with
        with pytest.raises(GivenUp, match=r"looking for weights was given up: .*503 Slow Down"):
            run.learn()
    else:
        assert run.learn().reason == "signal"
    assert clock.now - before < 1.0
    clock.on_wait = lambda: None
    flaky.fail(math.inf, 0.0)
    assert run.ends_well()


@pytest.mark.parametrize("error", [FileExistsError("another writer"), ValueError("a bug")])
def test_what_no_second_try_can_change_is_raised_at_once(clock: Clock, error: Exception) -> None:
    before = clock.now

    def call() -> None:
        raise error

    with pytest.raises(type(error)):
        Patience(300.0)("writing", call)
    assert clock.now == before


def test_a_call_that_took_long_before_it_failed_is_tried_once_more(clock: Clock) -> None:
    calls: list[float] = []

    def upload() -> str:
        calls.append(clock.now)
        clock.now += 1000.0
        if len(calls) == 1:
            raise OSError(errno.ECONNRESET, "Connection reset by peer")
        return "there"

    assert Patience(300.0)("publishing", upload) == "there"
