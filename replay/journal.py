"""The journal: immutable segments of finished episodes, appended by many and read by many.

A segment is what one append wrote: one Parquet file, until it is merged with its neighbours (``compact``). Each
writer numbers its own segments without gaps, so a reader's position is one number per writer and nothing has to be
locked or coordinated. A writer's name must be in use by one live process at a time; a second one is refused as
soon as their numbers meet.
"""

from __future__ import annotations

import errno
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import pyarrow as pa  # type: ignore[import-untyped]
import structlog

from hintloop.replay.compact import Compaction, compact
from hintloop.replay.episode import Episode
from hintloop.replay.filter import Filter
from hintloop.replay.listing import WRITER, File, cover, list_files, load, parse, segment_name
from hintloop.replay.reader import JournalReader, Segment
from hintloop.replay.segment import DamagedSegment, SegmentFile, decode, decode_column, encode
from hintloop.replay.storage import Store

__all__ = ["Compaction", "DamagedSegment", "Filter", "Journal", "JournalReader", "JournalWriter", "Segment"]

COMPACT_EVERY = 64
"""Small files of a writer in a row, after which it merges them."""
MAX_TRIES = 3
"""Attempts to read a segment whose file is merged with others meanwhile."""
HELD = 4
"""Merged files that are held in memory for the next look at them."""

_log = structlog.get_logger(__name__)


class Journal:
    """A folder of segments at ``uri``, any fsspec URI or plain path; the first append makes it."""

    def __init__(self, uri: str | Path) -> None:
        self._store = Store(uri)
        self._held: OrderedDict[File, SegmentFile] = OrderedDict()
        self.uri = self._store.uri

    def writer(self, name: str) -> JournalWriter:
        """A writer that continues after the highest sequence number of that name.

        ``ValueError`` for a name other than letters, digits, ``.``, ``_`` and ``-``.
        """
        if not WRITER.fullmatch(name):
            raise ValueError(
                f"writer name {name!r}: use letters, digits, '.', '_' and '-', a letter or digit first"
            )
        self._store.sweep(f"{name}-")
        mine = [file for file in list_files(self._store) if file.writer == name]
        last = max((file.last for file in mine), default=-1)
        return JournalWriter(self._store, name, last + 1, num_files=len(mine))

    def reader(self, position: Mapping[str, int] | None = None, only: Filter | None = None) -> JournalReader:
        """A reader that continues exactly at ``position``; from the beginning when it is None.

        It gives the episodes that pass ``only``. A position is good for readers with any filter.
        """
        return JournalReader(self._store, position or {}, only or Filter())

    def files(self) -> list[File]:
        """The files that hold all segments, by writer and number. One file may hold many segments."""
        return cover(list_files(self._store))

    def segments(self) -> list[str]:
        """Names of the committed segments, by sequence number and then by writer."""
        found = {(seq, file.writer) for file in self.files() for seq in range(file.first, file.last + 1)}
        return [segment_name(writer, seq) for seq, writer in sorted(found)]

    def read(self, segment: str) -> list[Episode]:
        """The episodes of one segment, in the order of the append.

        ``DamagedSegment`` when its content is not what was written, ``ValueError`` when it is of a newer
        schema version, ``FileNotFoundError`` when there is no such segment, ``OSError`` when the storage fails.
        """
        wanted = parse(segment)
        if wanted is not None and wanted.first == wanted.last:
            for _ in range(MAX_TRIES):
                for file in self._holders(wanted):
                    with suppress(FileNotFoundError):
                        return self._load(file).episodes(wanted.first - file.first)
        raise FileNotFoundError(errno.ENOENT, "there is no such segment", segment)

    def episode_ids(self) -> set[str]:
        """Ids of all episodes; reads only that column. Damaged segments are left out, with a warning."""
        return self._values("episode_id")

    def group_ids(self) -> set[str]:
        """Ids of all groups; reads only that column. Damaged segments are left out, with a warning."""
        return self._values("group_id")

    def compact(self, *, at_least: int = 2) -> Compaction:
        """Merge small files. Positions, readers and writers do not notice."""
        return compact(self._store, at_least=at_least)

    def check(self) -> Iterator[tuple[str, int, str]]:
        """Read all files: the name of each, its number of episodes, and its damage or the empty string."""
        for file in list_files(self._store):
            try:
                found = load(self._store, file)
                yield file.name, sum(len(found.episodes(number)) for number in range(len(found.rows))), ""
            except FileNotFoundError:
                continue  # merged meanwhile
            except (DamagedSegment, ValueError) as error:
                yield file.name, 0, error.reason if isinstance(error, DamagedSegment) else str(error)

    def _holders(self, wanted: File) -> Iterator[File]:
        """Files that may hold a segment, those that cost least first."""
        yield from [file for file in self._held if file.holds(wanted)]
        yield wanted
        yield from (file for file in self.files() if file.holds(wanted))

    def _load(self, file: File) -> SegmentFile:
        found = self._held.pop(file, None) or load(self._store, file)
        if file.first != file.last:
            self._held[file] = found
            if len(self._held) > HELD:
                self._held.popitem(last=False)
        return found

    def _values(self, column: str) -> set[str]:
        found: set[str] = set()
        seen: set[File] = set()
        while new := [file for file in list_files(self._store) if file not in seen]:
            for file in new:
                try:
                    found.update(self._column(file, column))
                except FileNotFoundError:
                    pass  # merged meanwhile; the next listing has what it became
                except DamagedSegment as error:
                    _log.warning("journal.damaged_segment", segment=file.name, reason=error.reason)
            seen.update(new)
        return found

    def _column(self, file: File, column: str) -> list[str]:
        try:
            with self._store.open(file.name) as opened:
                return decode_column(opened, column)
        except FileNotFoundError:
            raise
        except (pa.ArrowException, OSError):
            # Reading the whole file tells damage from a failing storage.
            return [getattr(episode, column) for episode in decode(self._store.read(file.name), file.name)]


class JournalWriter:
    """Appends segments under one name; made by ``Journal.writer``. Not thread-safe.

    Every now and then an append also merges small files of this writer.
    """

    def __init__(self, store: Store, name: str, next_seq: int, *, num_files: int) -> None:
        self._store = store
        self._num_files = num_files
        """Since the last attempt to merge them."""
        self.name = name
        self.next_seq = next_seq

    def append(self, episodes: Sequence[Episode]) -> str:
        """Write one segment, there whole or not at all, and on the disk when this returns; gives its name.

        After an ``OSError`` the same append may be repeated: it neither leaves a gap nor writes twice.
        ``FileExistsError`` when another process uses the name; ``ValueError`` when there is nothing to write.
        """
        if not episodes:
            raise ValueError("an append needs at least one episode")
        segment, data = segment_name(self.name, self.next_seq), encode(episodes)
        self._store.create(segment, data)
        self._refuse_taken(segment, data)
        self.next_seq += 1
        self._num_files += 1
        if self._num_files >= COMPACT_EVERY:
            self._compact()
        return segment

    def _refuse_taken(self, segment: str, data: bytes) -> None:
        """A number whose own file is gone may be taken all the same: by a segment in a merged file."""
        wanted = File(self.name, self.next_seq, self.next_seq)
        for file in list_files(self._store):
            if file.holds(wanted) and file != wanted:
                found = load(self._store, file).episodes(wanted.first - file.first)
                if encode(found) != data:
                    self._store.remove_all([segment])
                    raise FileExistsError(f"{segment} is there already, in {file.name}, with other content")

    def _compact(self) -> None:
        self._num_files = 0
        try:
            compact(self._store, self.name, at_least=COMPACT_EVERY)
        except OSError as error:  # what was appended is safe; the next attempt merges more
            _log.warning("journal.not_compacted", writer=self.name, reason=str(error))
