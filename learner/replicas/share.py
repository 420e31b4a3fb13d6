"""Which groups a replica trains: its slice of every step's groups, in one order that all replicas share.

Nobody hands out work. Each replica reads the whole journal and knows from the members of the round whose each group
is: the groups of a step go round the members, in the order of their numbers. So all know what a replica had that
died, and the next steps begin with it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import structlog

from hintloop.learner.source import GroupSource, ReadableJournal, groups_of
from hintloop.replay.episode import Episode
from hintloop.replay.journal import DamagedSegment, Segment
from hintloop.replay.storage import Store

_log = structlog.get_logger(__name__)


class ShareSource:
    """One replica's groups, in the shape of a ``GroupSource``."""

    def __init__(
        self,
        open_source: Callable[[dict[str, Any] | None, set[str]], GroupSource],
        journal: ReadableJournal,
        index: int,
        members: tuple[int, ...],
    ) -> None:
        """``open_source`` opens the groups of all, at a position and with those seen in its epoch."""
        self._open, self._journal, self._index = open_source, journal, index
        self._source = open_source(None, set())
        self.members = members
        """Among whom the groups are shared now."""
        self.took = 0
        """Groups of all in the newest step."""
        self._window: list[tuple[int, str, int]] = []
        """Owner, segment and number in it of each group since the newest quorum."""
        self._closed: list[tuple[int, str, int]] = []
        """The same from there to the quorum before it, until the average is committed."""
        self._lost: list[tuple[str, int]] = []
        """Those of them that are in no average, even so."""
        self._returned: list[tuple[str, int]] = []
        """Groups that somebody took and that entered no average."""
        self._cached: tuple[str, list[list[Episode]]] = "", []

    @property
    def epoch(self) -> int:
        """Of the groups that are not returned ones."""
        return self._source.epoch

    @property
    def position(self) -> dict[str, Any]:
        """In the groups of all; ``state`` has the rest."""
        return self._source.position

    @property
    def repeated(self) -> int:
        """As in ``GroupSource``."""
        return self._source.repeated

    @property
    def unwanted(self) -> int:
        """As in ``GroupSource``."""
        return self._source.unwanted

    @property
    def damaged(self) -> int:
        """As in ``GroupSource``."""
        return self._source.damaged

    def take(
        self,
        count: int,
        *,
        stop: Callable[[], bool] = lambda: False,
        waiting: Callable[[], None] = lambda: None,
    ) -> list[list[Episode]]:
        """This replica's of the next ``count`` groups for each member; perhaps none of the last few."""
        wanted = count * len(self.members)
        again, self._returned = self._returned[:wanted], self._returned[wanted:]
        groups, places = [self._read(*place) for place in again], again
        if len(groups) < wanted:
            groups += self._source.take(wanted - len(groups), stop=stop, waiting=waiting)
            places = [*again, *self._source.places]
        if stop():
            return []
        self.took = len(groups)
        owners = [self.members[number % len(self.members)] for number in range(len(groups))]
        self._window += [(owner, *place) for owner, place in zip(owners, places, strict=True)]
        return [group for owner, group in zip(owners, groups, strict=True) if owner == self._index]

    def at_end(self) -> bool:
        """Whether all groups have been taken for the last time."""
        return not self._returned and self._source.at_end()

    def close(self, members: tuple[int, ...], contributors: tuple[int, ...]) -> None:
        """At a quorum: what was taken since the one before is in, if its owner is among the contributors."""
        self._closed, self._window, self.members = self._window, [], members
        self._lost = [(name, number) for owner, name, number in self._closed if owner not in contributors]

    def settle(self, committed: bool) -> None:
        """The average is committed, or it failed: then nothing is in, nor what was taken while it was on its way."""
        back = self._lost
        if not committed:
            back = [(name, number) for _, name, number in (*self._closed, *self._window)]
            self._window = []
        self._returned, self._closed = [*back, *self._returned], []

    def state(self) -> dict[str, Any]:
        """All that another replica needs to go on with the same groups."""
        return {
            "position": json.dumps(self.position),
            "seen": sorted(self._source.seen),
            "members": self.members,
            "window": self._window,
            "returned": self._returned,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on as another replica would, or as this one did."""
        self._source = self._open(json.loads(state["position"]), set(state["seen"]))
        self.members = tuple(state["members"])
        self._window = [(owner, name, number) for owner, name, number in state["window"]]
        self._returned = [(name, number) for name, number in state["returned"]]

    def _read(self, segment: str, number: int) -> list[Episode]:
        if self._cached[0] != segment:
            self._cached = segment, groups_of(self._journal.read(segment))
        return self._cached[1][number]


class OrderedJournal:
    """A journal that grows, read in one order by all: the order is a log that whoever comes first writes on.

    Entry ``00000012.json`` of the log names the segment that is read after twelve others. Readers of a journal that
    is complete need no log, for they all find the same.
    """

    def __init__(self, journal: ReadableJournal, log: str | Path) -> None:
        """``log``: folder of the log, at any fsspec URI."""
        self.uri = journal.uri
        self._journal, self._log = journal, Store(log)

    def reader(self, position: Mapping[str, int] | None = None) -> _OrderedReader:
        """A reader that continues exactly at ``position``."""
        return _OrderedReader(self._journal, self._log, (position or {}).get("entries", 0))

    def read(self, segment: str) -> list[Episode]:
        """As in ``Journal``."""
        return self._journal.read(segment)


class _OrderedReader:
    """What a ``JournalReader`` does, by the log."""

    def __init__(self, journal: ReadableJournal, log: Store, entries: int) -> None:
        self._journal, self._log, self._entries = journal, log, entries
        before = self._entry(entries - 1) if entries else None
        self._behind: dict[str, int] = before["position"] if before else {}
        self.damaged: list[str] = []

    @property
    def position(self) -> dict[str, int]:
        """Entries of the log that were read."""
        return {"entries": self._entries}

    def poll_segment(self) -> Segment | None:
        """The next segment, or None."""
        while entry := self._entry(self._entries) or self._propose():
            episodes = self._read(entry["segment"])
            self._entries += 1
            self._behind = entry["position"]
            if episodes:
                return Segment(entry["segment"], episodes, self.position)
        return None

    def _read(self, segment: str) -> list[Episode]:
        try:
            return self._journal.read(segment)
        except DamagedSegment as error:
            self.damaged.append(segment)
            _log.warning("journal.damaged_segment", segment=segment, reason=error.reason)
            return []

    def _entry(self, number: int) -> dict[str, Any] | None:
        try:
            entry: dict[str, Any] = json.loads(self._log.read(_entry_name(number)))
        except FileNotFoundError:
            return None
        return entry

    def _propose(self) -> dict[str, Any] | None:
        """Write the next entry if there is a segment for it; the entry, which may be another's."""
        found = self._journal.reader(self._behind).poll_segment()
        if found is None:
            return None
        entry = {"segment": found.name, "position": found.position}
        try:
            self._log.create(_entry_name(self._entries), json.dumps(entry).encode())
        except FileExistsError:
            return self._entry(self._entries)
        return entry


def _entry_name(number: int) -> str:
    return f"{number:08d}.json"
