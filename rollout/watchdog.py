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
MAX_NAMES = 5
"""Names of tasks in one line of the log."""
NOBODY = "nobody: it is busy"
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _On:
    """Who is waited for, and for how long at most."""

    name: str
    limit_s: float | None


class Pulse:
    """One task: what it waits for, and since when. For one event loop."""

    def __init__(self, kind: str, name: str) -> None:
        self.kind = kind
        self.name = name
        self._waits = [_On(NOBODY, None)]
        """The first is what ``beat`` said; the others are under way, and need not end in their order."""
        self.since = time.monotonic()

    @property
    def on(self) -> str:
        """Who is waited for; of several, whoever was asked last."""
        return self._waits[-1].name

    @property
    def limit_s(self) -> float | None:
        """When that is given up."""
        return self._waits[-1].limit_s

    def beat(self, on: str = NOBODY, limit_s: float | None = None) -> None:
        """The task has moved; from now on it waits for ``on``, ``limit_s`` at most (None: others see to that)."""
        self._waits[0], self.since = _On(on, limit_s), time.monotonic()

    @contextlib.asynccontextmanager
    async def waiting(self, on: str, part: Part, limit_s: float | None = None) -> AsyncIterator[None]:
        """Within it the task waits for ``on``. Raises ``Overdue`` (of ``part``) after ``limit_s``."""
        own = _On(on, limit_s)
        self._waits.append(own)
        self.since = time.monotonic()
        deadline = asyncio.timeout(limit_s)
        try:
            async with deadline:
                yield
        except TimeoutError:
            if not deadline.expired():
                raise
            raise Overdue(part, f"{self.name}: no answer from {on} within {limit_s:g} s") from None
        finally:
            self._waits.remove(own)
            self.since = time.monotonic()


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


@dataclass(frozen=True, slots=True)
class _Told:
    """What the log has of a pulse: whom it waits for, since when, and for how long it had when it was named."""

    key: tuple[str, str]
    since: float
    for_s: float


class Watchdog:
    """All pulses."""

    def __init__(self, notice_s: float = NOTICE_S) -> None:
        self.notice_s = notice_s
        self._pulses: set[Pulse] = set()
        self._told: dict[Pulse, _Told] = {}

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
        return [wait for wait, _ in self._groups()]

    def _groups(self) -> list[tuple[Wait, list[Pulse]]]:
        """The same with the pulses of each, the longest wait first."""
        now = time.monotonic()
        groups: dict[tuple[str, str], list[Pulse]] = {}
        for pulse in sorted(self._pulses, key=lambda pulse: pulse.since):
            groups.setdefault((pulse.kind, pulse.on), []).append(pulse)
        return [
            (Wait(kind, on, len(pulses), pulses[0].name, now - pulses[0].since, pulses[0].limit_s), pulses)
            for (kind, on), pulses in groups.items()
        ]

    def snapshot(self) -> list[dict[str, Any]]:
        """The waits as JSON data."""
        return [wait.row(self.notice_s) for wait in self.waits()[:MAX_ROWS]]

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            await asyncio.sleep(self.notice_s / LOOKS)
            self.look()

    def look(self) -> list[Wait]:
        """Log who stands still, each again whenever that has lasted twice as long; gives them."""
        before, self._told = self._told, {}
        stuck = [(wait, pulses) for wait, pulses in self._groups() if wait.for_s >= self.notice_s]
        for wait, pulses in stuck:
            if names := self._due(wait, pulses, before):
                _log.warning("stands_still", **wait.row(self.notice_s), names=names[:MAX_NAMES])
        for who, on in {told.key for told in before.values()} - {(wait.kind, wait.on) for wait, _ in stuck}:
            _log.info("moves_again", who=who, waited_for=on)
        return [wait for wait, _ in stuck]

    def _due(self, wait: Wait, pulses: list[Pulse], before: dict[Pulse, _Told]) -> list[str]:
        """Who of a wait is to be named now; ``before`` is what was told by the last look."""
        now, names = time.monotonic(), []
        for pulse in pulses:
            for_s, told = now - pulse.since, before.get(pulse)
            if for_s < self.notice_s:
                continue
            if told is None or told.since != pulse.since or for_s >= 2 * told.for_s:
                told = _Told((wait.kind, wait.on), pulse.since, for_s)
                names.append(pulse.name)
            self._told[pulse] = told
        return names
