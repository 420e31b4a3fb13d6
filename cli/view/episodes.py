"""The episodes of a journal, newest first and page by page; no look at them reads more than it shows.

A page is made of whole segments, read one at a time, of which only a short row per episode is kept. A search
that finds little stops after a while and says where to go on.
"""

from __future__ import annotations

import re
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hintloop.cli.examples import load_episode
from hintloop.cli.view.text import name
from hintloop.replay.episode import NOT_SAMPLED, Episode
from hintloop.replay.journal import DamagedSegment, Journal

PAGE_ROWS = 50
SEARCH_S = 1.5
"""How long one request may look for episodes."""
CACHE_ROWS = 20_000
"""Rows kept, each of less than a kilobyte."""
SLOW_LISTING_S = 0.1
LISTING_SHARE = 30
"""A slow listing of the segments is made at most once in so many times as it takes."""
MAX_KINDS = 8
MAX_UNREADABLE = 20
"""Segments left out on one page at most."""
_CURSOR = re.compile(r"(.+)~(\d{1,9})")


class NotThere(Exception):
    """There is no such page; the text says what is missing."""


@dataclass(frozen=True, slots=True)
class Row:
    """One episode in a list."""

    segment: str
    number: int
    """Place in its segment, from 0."""
    episode_id: str
    group_id: str
    task_id: str
    outcome: str
    reward: float | None
    created_at: float
    turns: int
    """Those of the agent."""
    errors: tuple[tuple[str, int], ...]
    """Tool errors by kind, the most frequent first."""
    hints: int
    pairs: int
    versions: tuple[int, int] | None
    """First and last version that it was played with."""

    def has(self, words: str) -> bool:
        """Whether one of its names holds ``words``, which are in lower case."""
        names = (self.episode_id, self.task_id, self.outcome, *(kind for kind, _ in self.errors))
        return any(words in each.casefold() for each in names)


@dataclass(frozen=True, slots=True)
class Page:
    """A part of the list."""

    rows: tuple[Row, ...]
    older: str | None
    """Where the list goes on; None at its end."""
    segments: int
    """In the whole journal."""
    looked_at: int
    """Episodes that were looked at for it."""
    unreadable: tuple[str, ...] = ()
    """Segments left out, with the reason."""


class EpisodeList:
    """The list of one journal. Not thread-safe."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._cache: OrderedDict[str, tuple[Row, ...]] = OrderedDict()
        self._listing: list[str] = []
        self._listing_until = 0.0

    def page(
        self, *, before: str | None = None, find: str = "", outcome: str = "", size: int = PAGE_ROWS
    ) -> Page:
        """Up to ``size`` episodes before a place in the list. ``NotThere`` when that is no such place."""
        words, until = find.strip().casefold(), 0.0
        names = self._names()
        rows: list[Row] = []
        unreadable: list[str] = []
        looked_at = 0

        def made(older: str | None) -> Page:
            return Page(tuple(rows), older, len(names), looked_at, tuple(unreadable))

        for segment, limit in _places(names, before):
            try:
                found = self._rows(segment)[:limit]
            except (DamagedSegment, ValueError, OSError) as error:
                unreadable.append(name(f"{segment}: {error}"))
                found = ()
            for row in reversed(found):
                looked_at += 1
                if (not outcome or row.outcome == outcome) and row.has(words):
                    rows.append(row)
                    if len(rows) == size:
                        return made(f"{segment}~{row.number}")
            until = until or time.monotonic() + SEARCH_S  # the first segment also loads what reading needs
            if time.monotonic() > until or len(unreadable) == MAX_UNREADABLE:
                return made(f"{segment}~0")
        return made(None)

    def open(self, segment: str, number: int) -> tuple[Episode, tuple[Row, ...]]:
        """An episode, and the rows of its group. ``NotThere`` when there is none that can be read."""
        if segment not in self._names():
            raise NotThere("the journal has no such segment")
        try:
            episodes = self._journal.read(segment)
        except (DamagedSegment, ValueError, OSError) as error:
            raise NotThere(f"cannot read {segment}: {error}") from error
        if number >= len(episodes):
            raise NotThere(f"{segment} has {len(episodes)} episodes, counted from 0")
        episode = episodes[number]
        group = [_row(segment, at, e) for at, e in enumerate(episodes) if e.group_id == episode.group_id]
        return episode, tuple(group)

    def _names(self) -> list[str]:
        """The segments. A listing that took long is used for a while, so that looking costs little always."""
        started = time.monotonic()
        if started < self._listing_until:
            return self._listing
        try:
            self._listing = self._journal.segments()
        except OSError as error:
            raise NotThere(f"cannot list {self._journal.uri}: {error}") from error
        if not self._cache.keys() <= set(self._listing):  # the journal is another one of the same name
            self._cache.clear()
        took = time.monotonic() - started
        self._listing_until = started + LISTING_SHARE * took if took > SLOW_LISTING_S else 0.0
        return self._listing

    def _rows(self, segment: str) -> tuple[Row, ...]:
        if segment in self._cache:
            self._cache.move_to_end(segment)
            return self._cache[segment]
        found = tuple(_row(segment, at, episode) for at, episode in enumerate(self._journal.read(segment)))
        self._cache[segment] = found
        while len(self._cache) > 1 and sum(map(len, self._cache.values())) > CACHE_ROWS:
            self._cache.popitem(last=False)
        return found


def _places(names: list[str], before: str | None) -> Iterator[tuple[str, int | None]]:
    """Segments, newest first, and how many of the episodes of each come before the place."""
    at = len(names)
    if before is not None:
        match = _CURSOR.fullmatch(before)
        if match is None or match[1] not in names:
            raise NotThere("the list of episodes has no such place")
        at = names.index(match[1])
        if limit := int(match[2]):
            yield match[1], limit
    yield from ((segment, None) for segment in reversed(names[:at]))


class Examples:
    """Whole episodes that evaluations kept, one JSON file each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def names(self) -> list[str]:
        """File names, sorted."""
        return sorted(path.name for path in self._folder.glob("*.json"))

    def open(self, file: str) -> Episode:
        """The episode of a file. ``NotThere`` when there is none, or it is no episode."""
        if file not in self.names():
            raise NotThere("there is no such example")
        try:
            return load_episode(self._folder / file)
        except (ValueError, TypeError, KeyError, OSError) as error:
            raise NotThere(f"this example is no episode: {error}") from error


def _row(segment: str, number: int, episode: Episode) -> Row:
    kinds = Counter(name(turn.error_kind) for turn in episode.turns if turn.error_kind)
    versions = [version for version in set(episode.policy_versions) if version != NOT_SAMPLED]
    return Row(
        segment=segment,
        number=number,
        episode_id=name(episode.episode_id),
        group_id=name(episode.group_id),
        task_id=name(episode.task_id),
        outcome=str(episode.outcome),
        reward=episode.reward,
        created_at=episode.created_at,
        turns=sum(turn.role == "assistant" for turn in episode.turns),
        errors=tuple(kinds.most_common(MAX_KINDS)),
        hints=len(episode.hint_sites),
        pairs=len(episode.pairs),
        versions=(min(versions), max(versions)) if versions else None,
    )
