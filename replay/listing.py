"""What lies in the folder of a journal: which files there are, and which segments each of them holds.

``<writer>-<seq>.parquet`` is one segment. ``<writer>-<first>_<last>.parquet`` holds all segments of that writer from
the first to the last, merged; those that it replaced may still lie beside it for a moment, or for ever after a crash.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from operator import itemgetter
from typing import NamedTuple

from hintloop.replay.segment import DamagedSegment, SegmentFile
from hintloop.replay.storage import Store

WRITER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""Names that a writer may have."""
_NUMBER = r"(\d{8}|[1-9]\d{8,})"
_FILE = re.compile(rf"({WRITER.pattern})-{_NUMBER}(?:_{_NUMBER})?\.parquet")


class File(NamedTuple):
    """A file with the segments ``first`` to ``last`` of a writer."""

    writer: str
    first: int
    last: int

    @property
    def name(self) -> str:
        """Of the file."""
        if self.first == self.last:
            return segment_name(self.writer, self.first)
        return f"{self.writer}-{self.first:08d}_{self.last:08d}.parquet"

    def holds(self, other: File) -> bool:
        """Whether every segment of the other file is in this one."""
        return self.writer == other.writer and self.first <= other.first and other.last <= self.last


def segment_name(writer: str, seq: int) -> str:
    """The name of a segment; also that of its file, until it is merged with others."""
    return f"{writer}-{seq:08d}.parquet"


def parse(name: str) -> File | None:
    """What a file of that name holds; None when it is no file of a journal."""
    match = _FILE.fullmatch(name)
    if match is None:
        return None
    writer, first, last = match.groups()
    if last is None:
        return File(writer, int(first), int(first))
    return File(writer, int(first), int(last)) if int(first) < int(last) else None


def list_files(store: Store) -> list[File]:
    """All files of a journal, by writer and first segment, the one with most segments first."""
    found = [file for name in store.names() if (file := parse(name))]
    found.sort(key=lambda file: -file.last)
    found.sort(key=itemgetter(0, 1))
    return found


def grouped(files: Iterable[File]) -> list[tuple[File, list[File]]]:
    """Of a sorted listing, the files that hold everything, each with the files that it makes superfluous."""
    kept: list[tuple[File, list[File]]] = []
    writer, reach = "", -1
    for file in files:
        if file[0] == writer and file[2] <= reach:
            kept[-1][1].append(file)
        else:
            kept.append((file, []))
            writer, _, reach = file
    return kept


def cover(files: Iterable[File]) -> list[File]:
    """Of a sorted listing, the files that hold everything."""
    return [file for file, _ in grouped(files)]


def load(store: Store, file: File, data: bytes | None = None) -> SegmentFile:
    """A file with its content, ``data`` if that was read before. Errors of ``SegmentFile`` and ``Store.read``."""
    found = SegmentFile(store.read(file.name) if data is None else data, file.name)
    if len(found.rows) != file.last - file.first + 1:
        raise DamagedSegment(file.name, f"it holds {len(found.rows)} segments, other than its name says")
    return found
