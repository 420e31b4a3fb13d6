"""Waits of the executors, each with a deadline, also where the service's own client has none."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from hintloop.learner.executors.protocol import (
    ExecutorError,
    ReplicaHandle,
    ReplicaResult,
    ReplicaState,
    Unreachable,
)

LINE_CHARS = 4096
"""Characters of a line of a log that are kept."""
_WAITING = 1000
"""Items that a reader is ahead of who takes them, at most."""
_LOOK_S = 0.2
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _End:
    error: Exception | None = None


def follow(source: Callable[[], Iterable[T]], *, timeout_s: float) -> Iterator[T]:
    """What ``source()`` gives, until its end or for ``timeout_s``, whatever it blocks on; its errors are raised.

    It is read in a thread, which ends with its next item when nobody listens any more.
    """
    items: queue.Queue[T | _End] = queue.Queue(_WAITING)
    left = threading.Event()

    def put(item: T | _End) -> bool:
        while not left.is_set():
            try:
                items.put(item, timeout=_LOOK_S)
            except queue.Full:
                continue
            return True
        return False

    def read() -> None:
        try:
            for item in source():
                if not put(item):
                    return
            put(_End())
        except Exception as error:  # noqa: BLE001 - the thread's boundary: raised where the items are taken
            put(_End(error))

    deadline = time.monotonic() + timeout_s
    threading.Thread(target=read, name="follow", daemon=True).start()
    try:
        while (remaining := deadline - time.monotonic()) > 0:
            try:
                item = items.get(timeout=remaining)
            except queue.Empty:
                return
            if isinstance(item, _End):
                if item.error:
                    raise item.error
                return
            yield item
    finally:
        left.set()


def within(timeout_s: float, call: Callable[[], T]) -> T:
    """What ``call()`` gives. ``Unreachable`` when it takes longer; its thread then is left to itself."""
    for value in follow(lambda: [call()], timeout_s=timeout_s):
        return value
    raise Unreachable(f"no answer within {timeout_s:g} s")


def collected(
    look: Callable[[ReplicaHandle], ReplicaResult],
    handles: Sequence[ReplicaHandle],
    *,
    timeout_s: float,
    poll_s: float,
) -> tuple[ReplicaResult, ...]:
    """Look at all until they are over, ``timeout_s`` at most. An executor that cannot look is patient or says so."""
    found = {each: ReplicaResult(each.index, ReplicaState.QUEUED) for each in handles}
    deadline = time.monotonic() + timeout_s
    while True:
        for handle, before in found.items():
            if not before.state.over:
                found[handle] = _looked(look, handle, before)
        remaining = deadline - time.monotonic()
        if remaining <= 0 or all(result.state.over for result in found.values()):
            break
        time.sleep(min(poll_s, remaining))
    late = f"has not ended after {timeout_s:g} s"
    results = (found[handle] for handle in handles)
    return tuple(r if r.state.over or r.error else replace(r, error=late) for r in results)


def _looked(
    look: Callable[[ReplicaHandle], ReplicaResult], handle: ReplicaHandle, before: ReplicaResult
) -> ReplicaResult:
    try:
        return look(handle)
    except Unreachable as error:
        return replace(before, error=str(error))
    except ExecutorError as error:
        return ReplicaResult(handle.index, ReplicaState.FAILED, error=str(error))
