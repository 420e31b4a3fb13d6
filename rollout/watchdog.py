"""Who waits for whom, and for how long: every long-lived task has a pulse, and what does not move is named.

A task says by its ``Pulse`` what it waits for; the ``Watchdog`` looks at all pulses now and then.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import structlog

from hintloop.rollout.failures import Overdue, Part

NOTICE_S = 45.0
"""A task that stands still for so long is named."""
LOOKS = 4
"""Looks at all tasks within that time."""
MAX_ROWS = 20
"""Rows of a snapshot at most: those with the longest waits."""
NOBODY = "nobody: it is busy"
_log = structlog.get_logger(__name__)


class Pulse:
    """One task: what it waits for, and since when. For one event loop."""

    def __init__(self, kind: str, name: str) -> None:
        self.kind = kind
        self.name = name
        self.on = NOBODY
        self.limit_s: float | None = None
        self.since = time.monotonic()

    def beat(self, on: str = NOBODY, limit_s: float | None = None) -> None:
        """The task has moved; from now on it waits for ``on``, ``limit_s`` at most (None: others see to that)."""
        self.on, self.limit_s, self.since = on, limit_s, time.monotonic()

    @contextlib.asynccontextmanager
    async def waiting(self, on: str, part: Part, limit_s: float | None = None) -> AsyncIterator[None]:
        """Within it the task waits for ``on``. Raises ``Overdue`` (of ``part``) after ``limit_s``."""
        before = self.on, self.limit_s
        self.beat(on, limit_s)
        deadline = asyncio.timeout(limit_s)
        try:
            async with deadline:
                yield
        except TimeoutError:
            if not deadline.expired():
                raise
            raise Overdue(part, f"{self.name}: no answer from {on} within {limit_s:g} s") from None
        finally:
            self.beat(*before)


@dataclass(frozen=True, slots=True)
class Wait:
    """All tasks of a kind that wait for the same."""

    kind: str
    on: str
    count: int
    longest: str
    """The task that has waited longest."""
    for_s: float
    """For how long that one has."""
    limit_s: float | None
    """When it gives up."""

    def row(self, notice_s: float) -> dict[str, Any]:
        """As JSON data; ``stuck`` says whether it is to be named."""
        return {
            "who": self.kind,
            "count": self.count,
            "longest": self.longest,
            "waits_for": self.on,
            "for_s": round(self.for_s, 1),
            "limit_s": self.limit_s,
            "stuck": self.for_s >= notice_s,
        }


class Watchdog:
    """All pulses."""

    def __init__(self, notice_s: float = NOTICE_S) -> None:
        self.notice_s = notice_s
        self._pulses: set[Pulse] = set()
        self._told: dict[tuple[str, str], float] = {}

    @contextlib.contextmanager
    def task(self, kind: str, name: str = "") -> Iterator[Pulse]:
        """A pulse, for as long as the task runs."""
        pulse = Pulse(kind, name or kind)
        self._pulses.add(pulse)
        try:
            yield pulse
        finally:
            self._pulses.discard(pulse)

    def waits(self) -> list[Wait]:
        """Who waits for whom, the longest wait first."""
        now = time.monotonic()
        groups: dict[tuple[str, str], list[Pulse]] = {}
        for pulse in self._pulses:
            groups.setdefault((pulse.kind, pulse.on), []).append(pulse)
        found = []
        for (kind, on), pulses in groups.items():
            oldest = min(pulses, key=lambda pulse: pulse.since)
            found.append(Wait(kind, on, len(pulses), oldest.name, now - oldest.since, oldest.limit_s))
        return sorted(found, key=lambda wait: -wait.for_s)

    def snapshot(self) -> list[dict[str, Any]]:
        """The waits as JSON data."""
        return [wait.row(self.notice_s) for wait in self.waits()[:MAX_ROWS]]

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            await asyncio.sleep(self.notice_s / LOOKS)
            self.look()

    def look(self) -> list[Wait]:
        """Log who stands still, again whenever that has lasted twice as long; gives them."""
        stuck = [wait for wait in self.waits() if wait.for_s >= self.notice_s]
        for wait in stuck:
            if wait.for_s >= 2 * self._told.get((wait.kind, wait.on), 0.0):
                self._told[wait.kind, wait.on] = wait.for_s
                _log.warning("stands_still", **wait.row(self.notice_s))
        for key in self._told.keys() - {(wait.kind, wait.on) for wait in stuck}:
            del self._told[key]
            _log.info("moves_again", who=key[0], waited_for=key[1])
        return stuck
