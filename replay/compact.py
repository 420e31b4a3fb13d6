"""Merging the files of a journal, so that there are few to list and to open.

Neighbouring files of one writer become one. The new file is written whole and read back before those that it
replaces are deleted; in between a segment is in two files, and readers take the one with more segments. So it
does not matter when it is killed, and any number of processes may do it at once, beside writers and readers.
What is damaged, or of a newer schema version, stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pyarrow as pa  # type: ignore[import-untyped]

from hintloop.replay.listing import File, cover, grouped, list_files, load
from hintloop.replay.segment import DamagedSegment, SegmentFile, merge
from hintloop.replay.storage import Store

MERGED_BYTES = 8 << 20
"""Files are merged into ones that took at most this much before."""
SMALL_BYTES = MERGED_BYTES // 2
"""A file of this size or more is left alone."""


@dataclass(slots=True)
class Compaction:
    """What was done."""

    merged: int = 0
    """Files that were merged into others."""
    made: int = 0
    """Files that they became."""
    left: dict[str, str] = field(default_factory=dict)
    """Files that cannot be merged, each with the reason."""


def compact(store: Store, writer: str | None = None, *, at_least: int = 2) -> Compaction:
    """Merge small neighbours where there are ``at_least`` so many in a row; of one writer, or of all.

    ``OSError`` when the storage fails; what was done until then is good.
    """
    done = Compaction()
    while True:
        before = done.merged, len(done.left)
        _remove_leftovers(store, writer, done)
        for run in _runs(store, writer, at_least, done):
            _merge(store, run, done)
        if before == (done.merged, len(done.left)):
            return done


def _files(store: Store, writer: str | None, done: Compaction) -> list[File]:
    return [f for f in list_files(store) if writer in (None, f.writer) and f.name not in done.left]


def _remove_leftovers(store: Store, writer: str | None, done: Compaction) -> None:
    """Delete files that another one makes superfluous: a process was killed before it did."""
    for file, inside in grouped(_files(store, writer, done)):
        if inside and _is_whole(store, file, done):
            store.remove_all([each.name for each in inside])


def _runs(store: Store, writer: str | None, at_least: int, done: Compaction) -> Iterator[list[File]]:
    """Small files in a row, each run at least two and small enough for one file."""
    sizes = store.sizes()
    row: list[File] = []
    for file in [*cover(_files(store, writer, done)), None]:
        small = file is not None and sizes.get(file.name, SMALL_BYTES) < SMALL_BYTES
        if row and not (small and file and file.writer == row[-1].writer and file.first == row[-1].last + 1):
            if len(row) >= at_least:
                yield from _cut(row, sizes)
            row = []
        if small and file:
            row.append(file)


def _cut(row: list[File], sizes: dict[str, int]) -> Iterator[list[File]]:
    run: list[File] = []
    space = MERGED_BYTES
    for file in row:
        if sizes[file.name] > space:
            yield run
            run, space = [], MERGED_BYTES
        run.append(file)
        space -= sizes[file.name]
    if len(run) > 1:
        yield run


def _merge(store: Store, run: list[File], done: Compaction) -> None:
    """Put one file in the place of several."""
    names = [file.name for file in run]
    try:
        contents = store.read_all(names)
    except FileNotFoundError:
        return  # another process was quicker
    segments: list[pa.Table] = []
    for file, data in zip(run, contents, strict=True):
        try:
            found = load(store, file, data)
        except (DamagedSegment, ValueError) as error:
            done.left[file.name] = str(error)
            return
        segments += [found.table(number) for number in range(len(found.rows))]
    made = File(run[0].writer, run[0].first, run[-1].last)
    _write(store, made.name, merge(segments))
    if _is_whole(store, made, done):
        store.remove_all(names)
        done.merged += len(run)
        done.made += 1


def _write(store: Store, name: str, data: bytes) -> None:
    try:
        store.create(name, data)
    except FileExistsError:
        try:
            SegmentFile(store.read(name), name)  # another process was quicker
        except DamagedSegment:
            store.replace(name, data)


def _is_whole(store: Store, file: File, done: Compaction) -> bool:
    """Whether a file can be read back, so that others may go."""
    try:
        load(store, file)
    except FileNotFoundError:
        return False  # merged once more by another process
    except (DamagedSegment, ValueError) as error:
        done.left[file.name] = str(error)
        return False
    return True
