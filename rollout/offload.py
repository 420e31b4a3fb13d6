"""What runs beside: blocking calls, each in a thread that the end of the process does not wait for.

A storage that never answers would keep a thread of asyncio's own pool, and with it the whole process, for ever.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import structlog

from hintloop.replay.patience import pauses, too_long

T = TypeVar("T")
_log = structlog.get_logger(__name__)


async def aside(call: Callable[[], T], *, name: str, limit_s: float | None = None) -> T:
    """What ``call`` returns or raises, from a thread called ``name``.

    Raises ``TimeoutError`` after ``limit_s``; the thread is then left to itself, as it is when this is cancelled.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if answer.done():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(result)  # type: ignore[arg-type]

    def work() -> None:
        result, problem = None, None
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001 - raised again by whoever waits
            problem = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, problem)

    threading.Thread(target=work, name=name, daemon=True).start()
    async with asyncio.timeout(limit_s):
        return await answer


async def persist(
    call: Callable[[], T], *, what: str, patience_s: float, on_failure: Callable[[OSError], None]
) -> T:
    """What ``call`` returns, tried again while the storage fails; calls never overlap.

    ``on_failure`` hears of each failure. Raises ``StorageFailed`` after ``patience_s``, and at once what no second
    try can change: ``FileExistsError`` and whatever is no ``OSError``.
    """
    last: OSError | None = None
    pause = pauses()
    try:
        async with asyncio.timeout(patience_s):
            while True:
                try:
                    return await aside(call, name=what)
                except FileExistsError:
                    raise
                except OSError as error:
                    last = error
                    on_failure(error)
                    _log.warning("storage_failed", what=what, error=repr(error))
                await asyncio.sleep(next(pause))
    except TimeoutError:
        raise too_long(what, patience_s, last) from last


def housekeeping(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """A task of the run's own housekeeping, which should not end before the run."""
    task = asyncio.create_task(work)

    def tell(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("housekeeping_failed", task=repr(task.get_coro()), error=repr(error))

    task.add_done_callback(tell)
    return task
