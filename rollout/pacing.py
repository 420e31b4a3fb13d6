"""Bounded staleness by pacing: how far the rollout side may run ahead of the learner.

The learner makes one version of ``groups_per_step`` groups, in the order of the journal. A group that starts
at version ``v`` must therefore be among the first ``(v + 1 + max_staleness) * groups_per_step`` of the
journal. So a group may start only while fewer than that are journalled or being played; and a group that has
finished early is held back while its place is needed for one that started with older weights. Then nothing is
ever trained on more than ``max_staleness`` versions late, and nothing is thrown away for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator


class LearnerSilent(Exception):
    """No new weights came for too long."""


class Pacer:
    """Counts groups and versions: says when a group may start, and when be journalled. For one event loop."""

    def __init__(self, *, groups_per_step: int, max_staleness: int, journalled: int, version: int) -> None:
        """``journalled`` are the groups of the whole run so far, earlier processes included."""
        self.journalled = journalled
        self.version = version
        self.held = 0
        """Groups that are finished and held back."""
        self._reserved = 0
        self.waited_s = 0.0
        self._groups_per_step = groups_per_step
        self._max_staleness = max_staleness
        self._playing: Counter[int] = Counter()
        self._changed = asyncio.Event()
        self._progress = time.monotonic()
        self._looking = True

    @property
    def playing(self) -> int:
        """Groups that have started, and have neither a place in the journal nor been dropped."""
        return self._playing.total()

    @property
    def limit(self) -> int:
        """How many groups may have been started by now, dropped ones left out."""
        return self._places(self.version)

    @property
    def open(self) -> bool:
        """Whether a group may start now."""
        return self.journalled + self._reserved + self.playing < self.limit

    @property
    def learner_is_next(self) -> bool:
        """Whether the learner has all that it can get, and its next version would be noticed."""
        return self._looking and not self.playing and not self._reserved

    @contextlib.contextmanager
    def not_looking(self) -> Iterator[None]:
        """Within it nobody looks for new weights: that none come says nothing of the learner."""
        self._looking = False
        try:
            yield
        finally:
            self._looking = True
            self._move()

    async def start(self, timeout_s: float, on_wait: Callable[[], None] = lambda: None) -> int:
        """Wait until a group may start, and count it as playing; returns the version that it starts with.

        ``on_wait`` is called before each wait. Raises ``LearnerSilent`` when only the learner can move, and has not
        for ``timeout_s``.
        """
        started = time.monotonic()
        while not self.open:
            on_wait()
            left = max(started, self._progress) + timeout_s - time.monotonic()
            try:
                async with asyncio.timeout(left):  # unlike wait_for, never swallows a cancellation
                    await self._change()
            except TimeoutError:
                if (
                    not self.learner_is_next
                ):  # groups that are played, and evaluations, have deadlines of their own
                    self._move()
                    continue
                raise LearnerSilent(
                    f"no weights after version {self.version} for {timeout_s:g} s, although "
                    f"{self.journalled} groups are in the journal; is the learner running?"
                ) from None
        self.waited_s += time.monotonic() - started
        self._playing[self.version] += 1
        return self.version

    def may_journal(self, version: int) -> bool:
        """Whether a group that started with ``version`` leaves room for all with older weights."""
        others = self._playing - Counter({version: 1})
        taken = self.journalled + self._reserved + 1
        return all(
            taken + sum(count for other, count in others.items() if other <= oldest) <= self._places(oldest)
            for oldest in others
        )

    async def reserve(self, version: int) -> None:
        """Take the next place in the journal for a playing group, once it may have it.

        Waits only for groups that are being played, which have deadlines of their own.
        """
        self.held += 1
        try:
            while not self.may_journal(version):
                await self._change()
        finally:
            self.held -= 1
        self._reserved += 1
        self._leave(version)

    def appended(self) -> None:
        """The group with the oldest reservation is in the journal."""
        self._reserved -= 1
        self.journalled += 1
        self._move()

    def drop(self, version: int) -> None:
        """A playing group will not be journalled; another may take its place."""
        self._leave(version)

    def restart(self, version: int) -> int:
        """A playing group is played anew in its own place; returns the version that it starts with now."""
        self._playing[self.version] += 1
        self._leave(version)
        return self.version

    def loaded(self, version: int) -> None:
        """The engine samples from ``version`` now."""
        self.version = version
        self._move()

    def _places(self, version: int) -> int:
        """A group that starts with ``version`` must be among so many first ones of the journal."""
        return (version + 1 + self._max_staleness) * self._groups_per_step

    def _leave(self, version: int) -> None:
        self._playing -= Counter({version: 1})
        self._move()

    def _move(self) -> None:
        self._progress = time.monotonic()
        self._changed.set()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()
