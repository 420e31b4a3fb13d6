"""Groups of episodes from a journal, in order, each exactly once, from an exact position.

A segment may hold more groups than one step takes, so a position is the reader's position plus how many
groups of the last segment were taken.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from hintloop.replay.episode import Episode
from hintloop.replay.journal import Filter, Segment

POLL_SECONDS = 0.2


class IdleTimeout(Exception):
    """A live journal gave nothing new for too long."""


class SegmentReader(Protocol):
    """What a source needs of a ``JournalReader``."""

    damaged: list[str]

    @property
    def position(self) -> dict[str, int]:
        """Behind what was read."""
        ...

    def poll_segment(self) -> Segment | None:
        """The next segment, or None."""
        ...


class ReadableJournal(Protocol):
    """What a source needs of a ``Journal``."""

    uri: str

    def reader(self, position: Mapping[str, int] | None = None) -> SegmentReader:
        """A reader that continues at ``position``."""
        ...

    def read(self, segment: str) -> list[Episode]:
        """The episodes of one segment."""
        ...


class GroupSource:
    """Takes whole groups from a journal. Not for use from several threads."""

    def __init__(
        self,
        journal: ReadableJournal,
        *,
        position: dict[str, Any] | None = None,
        seen: set[str] | None = None,
        follow: bool = True,
        epochs: int = 1,
        idle_timeout_s: float = 600.0,
        only: Filter | None = None,
    ) -> None:
        """Continue at ``position``, as ``take`` left it; ``seen`` are the groups taken in the present epoch.

        ``follow`` waits for more at the end of the journal; otherwise it is read ``epochs`` times. Groups without
        an episode that passes ``only`` are passed over; a position does not depend on it.
        """
        start = position or {"reader": {}, "segment": None, "taken": 0, "epoch": 0}
        self._journal = journal
        self._follow = follow
        self._epochs = epochs
        self._idle_timeout_s = idle_timeout_s
        self.epoch = int(start["epoch"])
        self.repeated = 0
        """Groups that were skipped because a group of that id was taken before in the same epoch."""
        self.unwanted = 0
        """Groups that were skipped because of ``only``."""
        self._only = only or Filter()
        self._seen = set(seen or ())
        self.places: list[tuple[str, int]] = []
        """Segment and number within it of each group that was taken last."""
        self._reader = journal.reader(start["reader"])
        self._segment: str | None = start["segment"]
        self._taken = 0
        self._pending: deque[list[Episode]] = deque()
        if self._segment is not None:
            self._load(self._segment, journal.read(self._segment), skip=int(start["taken"]))

    @property
    def position(self) -> dict[str, Any]:
        """JSON-able; behind the last group taken."""
        partial = self._segment if self._pending else None
        taken = self._taken if self._pending else 0
        return {"reader": self._reader.position, "segment": partial, "taken": taken, "epoch": self.epoch}

    @property
    def seen(self) -> frozenset[str]:
        """Groups taken in the present epoch."""
        return frozenset(self._seen)

    @property
    def damaged(self) -> int:
        """Segments that could not be read and were skipped since the start of the epoch or the process."""
        return len(self._reader.damaged)

    def take(
        self,
        count: int,
        *,
        stop: Callable[[], bool] = lambda: False,
        waiting: Callable[[], None] = lambda: None,
    ) -> list[list[Episode]]:
        """The next ``count`` groups; fewer only at the end of a pass over a recorded journal.

        None at its very end, or when ``stop`` says so.

        ``waiting`` is called every ``POLL_SECONDS`` while there is nothing. ``IdleTimeout`` as configured;
        errors of ``JournalReader.poll_segment``.
        """
        groups: list[list[Episode]] = []
        self.places = []
        deadline = time.monotonic() + self._idle_timeout_s
        while len(groups) < count:
            if stop():
                return []
            if self._fill():
                groups.append(self._next())
                deadline = time.monotonic() + self._idle_timeout_s
            elif self._follow:
                waiting()
                if time.monotonic() > deadline:
                    raise IdleTimeout(f"no new group in {self._journal.uri} for {self._idle_timeout_s:.0f} s")
                time.sleep(POLL_SECONDS)
            elif groups or not self._restart():
                break
        return groups

    def at_end(self) -> bool:
        """Whether a recorded journal has been read for the last time. Takes nothing."""
        return not self._follow and not self._fill() and self.epoch + 1 >= self._epochs

    def _next(self) -> list[Episode]:
        assert self._segment is not None, "pending groups come from a segment"
        group = self._pending.popleft()
        self.places.append((self._segment, self._taken))
        self._taken += 1
        self._seen.add(group[0].group_id)
        return group

    def _fill(self) -> bool:
        """Make the first pending group the next one; False when there is nothing now."""
        while True:
            while self._pending and self._passes_over(self._pending[0]):
                self._pending.popleft()
                self._taken += 1
            if self._pending:
                return True
            segment = self._reader.poll_segment()
            if segment is None:
                return False
            self._load(segment.name, segment.episodes, skip=0)

    def _passes_over(self, group: list[Episode]) -> bool:
        """Whether a group is not for this source; counts why."""
        if not any(self._only.passes(episode) for episode in group):
            self.unwanted += 1
            return True
        if group[0].group_id in self._seen:
            self.repeated += 1
            return True
        return False

    def _restart(self) -> bool:
        """Begin the next pass; False when there is none."""
        if self.epoch + 1 >= self._epochs:
            return False
        self.epoch += 1
        self._reader = self._journal.reader()
        self._seen.clear()
        return True

    def _load(self, name: str, episodes: list[Episode], *, skip: int) -> None:
        self._segment, self._taken = name, skip
        self._pending = deque(groups_of(episodes)[skip:])


def groups_of(episodes: Iterable[Episode]) -> list[list[Episode]]:
    """The groups of a segment, each where its first episode is."""
    by_group: dict[str, list[Episode]] = {}
    for episode in episodes:
        by_group.setdefault(episode.group_id, []).append(episode)
    return list(by_group.values())
