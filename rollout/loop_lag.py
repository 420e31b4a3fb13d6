"""How late the event loop is, and what it is doing when it does not run at all.

A blocked loop can tell nobody; so a thread watches it, and names the line of code that holds it.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any

import structlog

TICK_S = 0.05
WINDOW_S = 60.0
BLOCKED_S = 5.0
"""A loop that does not run for so long is named."""
_SHOWN_FRAMES = 4
_log = structlog.get_logger(__name__)


class LoopLag:
    """Measures the running loop: ``run`` in it, and ``watch`` for a thread beside it."""

    def __init__(self, *, blocked_s: float = BLOCKED_S) -> None:
        self._blocked_s = blocked_s
        self._lags: deque[float] = deque(maxlen=int(WINDOW_S / TICK_S))
        self._tick = time.monotonic()
        self._thread = threading.get_ident()
        self._stopped = threading.Event()

    async def run(self) -> None:
        """Measure until cancelled."""
        self._thread = threading.get_ident()
        while True:
            self._tick = time.monotonic()
            await asyncio.sleep(TICK_S)
            self._lags.append(max(time.monotonic() - self._tick - TICK_S, 0.0))

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()

    def watch(self, on_blocked: Callable[[dict[str, Any]], None]) -> None:
        """Start the thread. ``on_blocked`` is called in it, again and again, with what is known."""
        args = (on_blocked,)
        threading.Thread(target=self._watch, args=args, name="loop-watch", daemon=True).start()

    def snapshot(self) -> dict[str, Any]:
        """Lateness over the last minute, milliseconds."""
        lags = sorted(self._lags) or [0.0]
        shares = {"p50": 0.5, "p99": 0.99, "max": 1.0}
        return {
            f"lag_{name}_ms": round(1e3 * lags[min(int(share * len(lags)), len(lags) - 1)], 1)
            for name, share in shares.items()
        }

    def _watch(self, on_blocked: Callable[[dict[str, Any]], None]) -> None:
        told = False
        while not self._stopped.wait(self._blocked_s / 2):
            silent = time.monotonic() - self._tick
            if silent < self._blocked_s:
                told = False
                continue
            where = _where(sys._current_frames().get(self._thread))
            if not told:
                _log.error("event_loop_blocked", seconds=round(silent, 1), where=where)
            told = True
            on_blocked({"blocked_s": round(silent, 1), "where": where})


def _where(frame: FrameType | None) -> str:
    """The innermost calls, innermost first."""
    if frame is None:
        return "unknown"
    calls = traceback.extract_stack(frame)[-_SHOWN_FRAMES:]
    return " < ".join(f"{call.filename}:{call.lineno} {call.name}" for call in reversed(calls))
