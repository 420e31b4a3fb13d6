"""What executors that ask a service have in common: jobs start all or not at all, and one that cannot be cancelled
does not keep the others from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from hintloop.learner.executors.protocol import ERROR_CHARS, ExecutorError, ReplicaHandle, ReplicaState

T = TypeVar("T")


def all_or_none(start: Callable[[], T], undo: Callable[[], None]) -> T:
    """What ``start()`` gives; when it fails, ``undo()`` is called first."""
    try:
        return start()
    except BaseException as error:
        try:
            undo()
        except ExecutorError as second:
            raise ExecutorError(f"{error}; what had started goes on: {second}") from error
        raise


def cancel_each(
    handles: Sequence[ReplicaHandle],
    poll: Callable[[ReplicaHandle], ReplicaState],
    cancel: Callable[[ReplicaHandle], None],
) -> None:
    """Cancel those that are not over. ``ExecutorError`` after all were tried, naming those that were not cancelled."""
    failed = []
    for handle in handles:
        try:
            if not poll(handle).over:
                cancel(handle)
        except ExecutorError as error:
            failed.append(f"replica {handle.index} ({handle.id}): {error}")
    if failed:
        raise ExecutorError(f"not cancelled: {'; '.join(failed)}")


def one_line(error: BaseException) -> str:
    """An error of the service's client, with its kind."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:ERROR_CHARS]
