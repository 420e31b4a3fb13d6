"""The pool keeps things ready, serves those who wait first, and tells them of failures. No engine is needed."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from hintloop.envs.sandbox.base import SandboxDead
from hintloop.envs.sandbox.docker_pool import Pool


def soon(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


def test_it_keeps_as_many_ready_as_it_should() -> None:
    numbers = itertools.count()
    pool = Pool(lambda: next(numbers), size=3, makers=2)
    assert soon(lambda: pool.num_ready() == 3)
    taken = {pool.take(5), pool.take(5)}
    assert soon(lambda: pool.num_ready() == 3)
    assert len(taken) == 2
    assert len(pool.close()) == 3
    assert next(numbers) == 5


def test_without_a_stock_each_is_made_when_it_is_wanted() -> None:
    numbers = itertools.count()
    pool = Pool(lambda: next(numbers), size=0, makers=2)
    time.sleep(0.05)
    assert next(numbers) == 0
    assert pool.take(5) == 1
    assert pool.close() == []


def test_only_so_many_are_made_at_once() -> None:
    lock, running, most = threading.Lock(), 0, 0

    def make() -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.02)
        with lock:
            running -= 1
        return 0

    pool = Pool(make, size=1, makers=3)
    with ThreadPoolExecutor(16) as takers:
        assert list(takers.map(lambda _: pool.take(10), range(16))) == [0] * 16
    pool.close()
    assert most == 3


def test_a_failure_is_told_to_one_who_waits() -> None:
    outcomes = iter([SandboxDead("no engine"), 1, 2])

    def make() -> int:
        outcome = next(outcomes)
        if isinstance(outcome, SandboxDead):
            raise outcome
        return outcome

    pool = Pool(make, size=0, makers=1)
    with pytest.raises(SandboxDead, match="no engine"):
        pool.take(5)
    assert pool.take(5) == 1
    pool.close()


def test_a_failure_that_nobody_waits_for_is_logged_and_not_repeated_at_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    attempts = itertools.count()
    tried = threading.Event()

    def make() -> int:
        next(attempts)
        tried.set()
        raise SandboxDead("no engine")

    pool = Pool(make, size=2, makers=2)
    assert tried.wait(10)
    pool.close()
    assert next(attempts) <= 2
    assert "sandbox_not_made" in capsys.readouterr().out


def test_waiting_has_an_end() -> None:
    release = threading.Event()
    pool = Pool(lambda: release.wait(5), size=0, makers=1)
    with pytest.raises(SandboxDead, match=r"within 0\.05 s"):
        pool.take(0.05)
    release.set()
    pool.close()
    with pytest.raises(SandboxDead, match="closed"):
        pool.take(1)


def test_closing_wakes_those_who_wait_and_gives_back_what_is_made_meanwhile() -> None:
    began, release = threading.Event(), threading.Event()

    def make() -> bool:
        began.set()
        return release.wait(60)

    pool = Pool(make, size=0, makers=1)  # so that one is made only when somebody waits
    with ThreadPoolExecutor(1) as takers:
        waiting = takers.submit(pool.take, 30)
        waiting.add_done_callback(lambda _: release.set())
        assert began.wait(10)
        left = pool.close()
        with pytest.raises(SandboxDead, match="closed"):
            waiting.result(30)
    assert left == [True]
