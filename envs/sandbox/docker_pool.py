"""A pool of things that take long to make: some are kept ready, and only so many are made at once."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

import structlog

from hintloop.envs.sandbox.base import SandboxDead

T = TypeVar("T")
_RETRY = 5.0
"""Seconds before the pool tries again after a failure that nobody waited for."""
_STOP = 70.0
"""Seconds for what is being made to come to an end."""


class Pool(Generic[T]):
    """Keeps ``size`` things ready, made by ``makers`` threads with ``make`` (which may raise ``SandboxDead``).

    Whoever waits comes before the stock, and a failure to make one is told to one who waits.
    """

    def __init__(self, make: Callable[[], T], *, size: int, makers: int):
        self._make = make
        self._size = size
        self._changed = threading.Condition()
        self._ready: deque[T] = deque()
        self._failures: deque[SandboxDead] = deque()
        self._num_making = 0
        self._num_waiting = 0
        self._not_before = 0.0
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"sandbox-maker-{n}", daemon=True) for n in range(makers)
        ]
        for thread in self._threads:
            thread.start()

    def take(self, timeout: float) -> T:
        """One that is ready, or the next that is made within ``timeout`` seconds. ``SandboxDead``."""
        with self._changed:
            self._num_waiting += 1
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: self._ready or self._failures or self._closed, timeout)
                if self._closed:
                    raise SandboxDead("the provider is closed")
                if self._ready:
                    return self._ready.popleft()
                if self._failures:
                    raise self._failures.popleft()
                raise SandboxDead(f"no sandbox was ready within {timeout:g} s")
            finally:
                self._num_waiting -= 1
                if not self._num_waiting:
                    self._failures.clear()
                self._changed.notify_all()

    def num_ready(self) -> int:
        """How many can be taken at once."""
        with self._changed:
            return len(self._ready)

    def close(self) -> list[T]:
        """Stop making; gives what was ready."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        deadline = time.monotonic() + _STOP
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        with self._changed:
            left = list(self._ready)
            self._ready.clear()
            return left

    def _wanted(self) -> bool:
        unserved = self._num_waiting - len(self._failures)
        if len(self._ready) + self._num_making >= self._size + unserved:
            return False
        return unserved > self._num_making or time.monotonic() >= self._not_before

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._closed and not self._wanted():
                    self._changed.wait(_RETRY)
                if self._closed:
                    return
                self._num_making += 1
            made: T | SandboxDead
            try:
                made = self._make()
            except SandboxDead as error:
                made = error
            except Exception as error:  # noqa: BLE001 - the thread goes on; whoever waits is told
                made = SandboxDead(f"{type(error).__name__}: {error}")
            with self._changed:
                self._num_making -= 1
                self._keep(made)
                self._changed.notify_all()

    def _keep(self, made: T | SandboxDead) -> None:
        if not isinstance(made, SandboxDead):
            self._ready.append(made)
        elif self._num_waiting > len(self._failures):
            self._failures.append(made)
        else:
            self._not_before = time.monotonic() + _RETRY
            structlog.get_logger().warning("sandbox_not_made", error=str(made))
