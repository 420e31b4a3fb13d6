"""The journal: immutable segments of finished episodes, appended by many and read by many.

A segment is one Parquet file ``<writer>-<seq:08d>.parquet``. Each writer numbers its own segments without
gaps, so a reader's position is one number per writer and nothing has to be locked or coordinated. A writer's
name must be in use by one live process at a time; a second one is refused as soon as their numbers meet.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa  # type: ignore[import-untyped]
import structlog

from hintloop.replay.episode import Episode
from hintloop.replay.storage import Store
from hintloop.replay.table import DamagedSegment, decode, decode_column, encode

__all__ = ["DamagedSegment", "Journal", "JournalReader", "JournalWriter", "Segment"]

_WRITER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_SEGMENT = re.compile(rf"({_WRITER.pattern})-(\d{{8,}})\.parquet")

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Segment:
    """What one append wrote, as a reader found it."""

    name: str
    episodes: list[Episode]
    position: dict[str, int]
    """The reader's position right after this segment."""


class Journal:
    """A folder of segments at ``uri``, any fsspec URI or plain path; the first append makes it."""

    def __init__(self, uri: str | Path) -> None:
        self._store = Store(uri)
        self.uri = self._store.uri

    def writer(self, name: str) -> JournalWriter:
        """A writer that continues after the highest sequence number of that name.

        ``ValueError`` for a name other than letters, digits, ``.``, ``_`` and ``-``.
        """
        if not _WRITER.fullmatch(name):
            raise ValueError(
                f"writer name {name!r}: use letters, digits, '.', '_' and '-', a letter or digit first"
            )
        self._store.sweep(f"{name}-")
        last = max((seq for seq, writer in self.scan() if writer == name), default=-1)
        return JournalWriter(self._store, name, last + 1)

    def reader(self, position: Mapping[str, int] | None = None) -> JournalReader:
        """A reader that continues exactly at ``position``; from the beginning when it is None."""
        return JournalReader(self, position or {})

    def segments(self) -> list[str]:
        """Names of the committed segments, by sequence number and then by writer."""
        return [segment_name(writer, seq) for seq, writer in sorted(self.scan())]

    def read(self, segment: str) -> list[Episode]:
        """The episodes of one segment, in the order of the append.

        ``DamagedSegment`` when its content is not what was written, ``ValueError`` when it is of another
        schema version, ``OSError`` when the storage fails.
        """
        return decode(self._store.read(segment), segment)

    def episode_ids(self) -> set[str]:
        """Ids of all episodes; reads only that column. Damaged segments are left out, with a warning."""
        return self._values("episode_id")

    def group_ids(self) -> set[str]:
        """Ids of all groups; reads only that column. Damaged segments are left out, with a warning."""
        return self._values("group_id")

    def scan(self) -> list[tuple[int, str]]:
        """``(sequence number, writer)`` of every committed segment, in no order."""
        matches = (_SEGMENT.fullmatch(name) for name in self._store.names())
        return [(int(match[2]), match[1]) for match in matches if match]

    def _values(self, column: str) -> set[str]:
        found: set[str] = set()
        for segment in self.segments():
            try:
                found.update(self._column(segment, column))
            except DamagedSegment as error:
                _log.warning("journal.damaged_segment", segment=segment, reason=error.reason)
        return found

    def _column(self, segment: str, column: str) -> list[str]:
        try:
            with self._store.open(segment) as file:
                return decode_column(file, column)
        except (pa.ArrowException, OSError):
            # Reading the whole segment tells damage from a failing storage.
            return [getattr(episode, column) for episode in self.read(segment)]


class JournalWriter:
    """Appends segments under one name; made by ``Journal.writer``. Not thread-safe."""

    def __init__(self, store: Store, name: str, next_seq: int) -> None:
        self._store = store
        self.name = name
        self.next_seq = next_seq

    def append(self, episodes: Sequence[Episode]) -> str:
        """Write one segment, there whole or not at all, and on the disk when this returns; gives its name.

        After an ``OSError`` the same append may be repeated: it neither leaves a gap nor writes twice.
        ``FileExistsError`` when another process uses the name; ``ValueError`` when there is nothing to write.
        """
        if not episodes:
            raise ValueError("an append needs at least one episode")
        segment = segment_name(self.name, self.next_seq)
        self._store.create(segment, encode(episodes))
        self.next_seq += 1
        return segment


class JournalReader:
    """Reads each segment once; made by ``Journal.reader``. Damaged segments are skipped and reported."""

    def __init__(self, journal: Journal, position: Mapping[str, int]) -> None:
        self._journal = journal
        self._position = dict(position)
        self._pending: deque[tuple[int, str]] = deque()
        self.damaged: list[str] = []
        """Names of the segments that were skipped."""

    @property
    def position(self) -> dict[str, int]:
        """``{writer: next sequence number}`` after what was read so far; JSON-able, and a copy."""
        return dict(self._position)

    def poll(self) -> list[Episode]:
        """The episodes of all segments not read yet. When nothing is new this costs one listing.

        When it raises (see ``Journal.read``) the position is as before, so nothing is lost.
        """
        before = self.position
        episodes: list[Episode] = []
        try:
            while segment := self.poll_segment():
                episodes.extend(segment.episodes)
        except BaseException:
            self._position = before
            raise
        return episodes

    def poll_segment(self) -> Segment | None:
        """The next segment not read yet, or None. If it raises (see ``Journal.read``) it has not advanced."""
        if not self._pending:
            self._pending.extend(self._unread())
        while self._pending:
            seq, writer = self._pending[0]
            name = segment_name(writer, seq)
            try:
                episodes = self._journal.read(name)
            except DamagedSegment as error:
                episodes = []
                self.damaged.append(name)
                _log.warning("journal.damaged_segment", segment=name, reason=error.reason)
            except BaseException:
                self._pending.clear()  # list again next time
                raise
            self._pending.popleft()
            self._position[writer] = seq + 1
            if episodes:
                return Segment(name, episodes, self.position)
        return None

    def _unread(self) -> list[tuple[int, str]]:
        """Segments past the position. Nothing that was committed before one of them is missing.

        A listing is no snapshot: it may show a segment and miss an older one when both came meanwhile. What
        it shows was committed before it ended, and so was all that is older; a second listing has it.
        """
        found = self._past_position()
        if not self._has_gap(found):
            return found
        newest = {writer: seq for seq, writer in found}
        return [(seq, writer) for seq, writer in self._past_position() if seq <= newest.get(writer, -1)]

    def _past_position(self) -> list[tuple[int, str]]:
        found = self._journal.scan()
        return sorted((seq, writer) for seq, writer in found if seq >= self._position.get(writer, 0))

    def _has_gap(self, found: list[tuple[int, str]]) -> bool:
        expected = self.position
        for seq, writer in found:
            if seq != expected.get(writer, 0):
                return True
            expected[writer] = seq + 1
        return False


def segment_name(writer: str, seq: int) -> str:
    """File name of a segment."""
    return f"{writer}-{seq:08d}.parquet"
