"""Whether somebody has asked this process to stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def sigterm() -> Iterator[Callable[[], bool]]:
    """Whether SIGTERM has come; never, outside the main thread, where no handler can be set."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event.is_set
        return
    before = signal.signal(signal.SIGTERM, lambda *_: event.set())
    try:
        yield event.is_set
    finally:
        signal.signal(signal.SIGTERM, before)
