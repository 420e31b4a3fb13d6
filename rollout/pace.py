"""How fast one teacher may be asked: so many requests a minute, and not before it said."""

from __future__ import annotations

import asyncio
import random
import time
from email.utils import parsedate_to_datetime

MINUTE = 60.0
_BURST_SHARE = 10
"""A tenth of a minute's requests may go out at once."""
_JITTER = 0.25
"""Whoever waits for the same moment comes up to this much of the wait later, so that not all come together."""


class Pace:
    """A token bucket: no 60 seconds see more than ``per_minute`` requests (None: no limit)."""

    def __init__(self, per_minute: float | None):
        self._burst = max(1.0, (per_minute or 0.0) // _BURST_SHARE)
        # A full bucket and what flows in during one minute are together just less than one token over the limit.
        self._rate = None if per_minute is None else (per_minute + 1 - self._burst) / MINUTE
        self._tokens = self._burst
        self._filled_at = time.monotonic()
        self._not_before = 0.0
        self._turn = asyncio.Lock()

    async def take(self) -> None:
        """Wait until a request may go out. First come, first served; cancelling takes nothing."""
        await self._hold()
        if self._rate is None:
            return
        async with self._turn:
            self._fill()
            while self._tokens < 1.0:
                await asyncio.sleep((1.0 - self._tokens) / self._rate)
                self._fill()
            self._tokens -= 1.0

    def hold_for(self, seconds: float) -> None:
        """No request goes out for so long: the teacher asked for it."""
        self._not_before = max(self._not_before, time.monotonic() + seconds)

    async def _hold(self) -> None:
        while (left := self._not_before - time.monotonic()) > 0:  # noqa: ASYNC110 - it waits for the clock
            await asyncio.sleep(left * (1.0 + _JITTER * random.random()))

    def _fill(self) -> None:
        assert self._rate is not None
        now = time.monotonic()
        self._tokens = min(self._burst, self._tokens + (now - self._filled_at) * self._rate)
        self._filled_at = now


def seconds_to_wait(retry_after: str) -> float | None:
    """The value of a ``Retry-After`` header (seconds or a date) in seconds from now; None when it says nothing."""
    text = retry_after.strip()
    if text.isascii() and text.isdigit():
        return float(text)
    try:
        return max(parsedate_to_datetime(text).timestamp() - time.time(), 0.0)
    except ValueError:
        return None
