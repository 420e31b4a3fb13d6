"""Reading a journal: each segment once and in order, while others append to it and merge its files."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import structlog

from hintloop.replay.episode import Episode
from hintloop.replay.filter import Filter
from hintloop.replay.listing import File, cover, list_files, load, segment_name
from hintloop.replay.segment import DamagedSegment, SegmentFile
from hintloop.replay.storage import Store

MAX_LISTINGS = 5
"""Listings that are made at most until two agree."""

_log = structlog.get_logger(__name__)
_Place = tuple[int, str, File]
"""Sequence number and writer of a segment, and the file that holds it."""


@dataclass(frozen=True, slots=True)
class Segment:
    """What one append wrote, as a reader found it."""

    name: str
    episodes: list[Episode]
    """Those that pass the reader's filter: at least one."""
    position: dict[str, int]
    """The reader's position right after this segment."""


class JournalReader:
    """Reads each segment once; made by ``Journal.reader``. Damaged files are skipped and reported.

    Segments come by sequence number and then by writer. Of each writer one merged file is held in memory at most.
    """

    def __init__(self, store: Store, position: Mapping[str, int], only: Filter) -> None:
        self._store = store
        self._position = dict(position)
        self._only = only
        self._pending: deque[_Place] = deque()
        self._open: dict[str, SegmentFile] = {}
        self._damaged_files: set[str] = set()
        self.damaged: list[str] = []
        """Names of the files and segments that were skipped."""

    @property
    def position(self) -> dict[str, int]:
        """``{writer: next sequence number}`` after what was read so far; JSON-able, and a copy."""
        return dict(self._position)

    def poll(self, version: int | None = None) -> list[Episode]:
        """The episodes of all segments not read yet. When nothing is new this costs one listing.

        When it raises (see ``poll_segment``) the position is as before, so nothing is lost.
        """
        before = self.position
        episodes: list[Episode] = []
        try:
            while segment := self.poll_segment(version):
                episodes.extend(segment.episodes)
        except BaseException:
            self._position = before
            self._pending.clear()
            raise
        return episodes

    def poll_segment(self, version: int | None = None) -> Segment | None:
        """The next segment that has something for the reader, or None when there is nothing new.

        ``version`` is the one that the filter's ``max_lag`` counts from. ``ValueError`` for a newer schema version,
        ``OSError`` when the storage fails; the position has then not advanced beyond the segment.
        """
        if not self._pending:
            self._damaged_files.clear()
            self._pending.extend(self._unread())
        while self._pending:
            seq, writer, file = self._pending[0]
            try:
                episodes = self._read(seq, file)
                wanted = [episode for episode in episodes or () if self._only.passes(episode, version)]
            except BaseException:
                self._pending.clear()  # list again next time
                raise
            if episodes is None:
                self._pending = deque(self._unread())
                continue
            self._pending.popleft()
            self._position[writer] = seq + 1
            if wanted:
                return Segment(segment_name(writer, seq), wanted, self.position)
        return None

    def _read(self, seq: int, file: File) -> list[Episode] | None:
        """The episodes of a segment, none when they are damaged; None when the file cannot be used any more."""
        try:
            held = self._open.get(file.writer)
            if held is None or held.name != file.name:
                held = self._open[file.writer] = load(self._store, file)
        except DamagedSegment as error:
            self._report(file.name, error.reason)
            self._give_up(file)
            return None
        except FileNotFoundError:
            if file in self._files():
                raise
            self._damaged_files.clear()  # one may have been written again
            return None  # merged into another file, or deleted
        try:
            return held.episodes(seq - file.first)
        except DamagedSegment as error:
            self._report(segment_name(file.writer, seq), error.reason)
            return []
        finally:
            if seq == file.last:
                del self._open[file.writer]

    def _report(self, name: str, reason: str) -> None:
        if name in self.damaged:
            return
        self.damaged.append(name)
        _log.warning("journal.damaged_segment", segment=name, reason=reason)

    def _give_up(self, file: File) -> None:
        """Use the file no more, and pass over the segments that are nowhere else."""
        self._damaged_files.add(file.name)
        seq = self._position.get(file.writer, 0)
        others = [other for other in self._files() if other.writer == file.writer and other.last >= seq]
        self._position[file.writer] = min([file.last + 1, *(max(other.first, seq) for other in others)])

    def _files(self) -> list[File]:
        return cover(each for each in list_files(self._store) if each.name not in self._damaged_files)

    def _unread(self) -> list[_Place]:
        """Segments past the position. Nothing that was committed before one of them is missing.

        A listing is no snapshot: it may show a segment and miss an older one when both came meanwhile, or both of
        two files of which one took the other's place. What it shows was committed before it ended, and so was
        all that is older; another listing has it.
        """
        found = self._past_position()
        newest = {writer: seq for seq, writer, _ in found}
        for _ in range(MAX_LISTINGS):
            if not self._has_gap(found):
                break
            before, again = found, self._past_position()
            found = [place for place in again if place[0] <= newest.get(place[1], -1)]
            if [place[:2] for place in found] == [place[:2] for place in before]:
                break
        return found

    def _past_position(self) -> list[_Place]:
        found: dict[tuple[int, str], File] = {}
        for file in self._files():
            for seq in range(max(file.first, self._position.get(file.writer, 0)), file.last + 1):
                found.setdefault((seq, file.writer), file)
        return sorted((seq, writer, file) for (seq, writer), file in found.items())

    def _has_gap(self, found: list[_Place]) -> bool:
        expected = self.position
        for seq, writer, _ in found:
            if seq != expected.get(writer, 0):
                return True
            expected[writer] = seq + 1
        return False
