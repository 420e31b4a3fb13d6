"""Files of a journal: Parquet that carries its own SHA-256, and is read whatever schema version wrote it.

A file holds one segment, or several that were merged; its metadata then says how many episodes each has. No
segment is split between two row groups, so a part of a large file is read without the rest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import IO, Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from hintloop.replay.episode import SCHEMA_VERSION, Episode
from hintloop.replay.table import SCHEMA, VERSION_KEY, from_table, to_table

ROW_GROUP_BYTES = 8 << 20
"""A row group of merged segments is full once it holds this much, uncompressed."""

_DIGEST_KEY = b"sha256"
_ROWS_KEY = b"rows_of_segments"
_NO_DIGEST = b"0" * 64
"""Stands where the digest of the whole file goes, while that is computed."""


class DamagedSegment(Exception):
    """The bytes of a segment are not what was written. ``segment`` is its name."""

    def __init__(self, segment: str, reason: str) -> None:
        super().__init__(f"segment {segment} is damaged: {reason}")
        self.segment = segment
        self.reason = reason

    def __reduce__(self) -> tuple[type[DamagedSegment], tuple[str, str]]:
        return type(self), (self.segment, self.reason)


class SegmentFile:
    """A whole file, found to be as it was written. Holds its bytes, and one row group uncompressed."""

    def __init__(self, data: bytes, name: str) -> None:
        """``DamagedSegment`` when it is not; ``ValueError`` for a newer schema version, or none."""
        self.name = name
        try:
            self._file = pq.ParquetFile(pa.BufferReader(data))
            metadata = self._file.metadata.metadata or {}
        except (pa.ArrowException, OSError, ValueError) as error:
            raise DamagedSegment(name, str(error)) from error
        digest = metadata.get(_DIGEST_KEY)
        if digest is None or _digest(_replace_last(data, digest, _NO_DIGEST)) != digest:
            raise DamagedSegment(name, "its digest is missing or wrong")
        self._version = _version_of(self._file.schema_arrow, name)
        self.rows: list[int] = json.loads(metadata.get(_ROWS_KEY, b"null")) or [self._file.metadata.num_rows]
        """Episodes of each segment in it."""
        self._held: tuple[int, pa.Table] | None = None
        sizes = [
            self._file.metadata.row_group(number).num_rows for number in range(self._file.num_row_groups)
        ]
        self._group_ends = list(accumulate(sizes))
        self._starts = list(accumulate(self.rows, initial=0))

    def table(self, number: int) -> pa.Table:
        """The rows of one segment, in the schema of this program."""
        start = self._starts[number]
        group = next(at for at, end in enumerate(self._group_ends) if start < end)
        if self._held is None or self._held[0] != group:
            self._held = group, _upgraded(self._file.read_row_group(group, use_threads=False), self._version)
        before = self._group_ends[group - 1] if group else 0
        return self._held[1].slice(start - before, self.rows[number])

    def episodes(self, number: int) -> list[Episode]:
        """The episodes of one segment, in the order of the append."""
        try:
            return from_table(self.table(number))
        except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
            raise DamagedSegment(self.name, str(error)) from error


def encode(episodes: Sequence[Episode]) -> bytes:
    """A whole file; equal episodes give equal bytes. Errors of ``to_table``."""
    return seal(to_table(episodes))


def decode(data: bytes, name: str) -> list[Episode]:
    """All episodes of a whole file that errors call ``name``. Errors of ``SegmentFile``."""
    file = SegmentFile(data, name)
    return [episode for number in range(len(file.rows)) for episode in file.episodes(number)]


def seal(table: pa.Table) -> bytes:
    """A file with one segment, which carries its own SHA-256, taken with zeros in the place of the digest."""
    return _sealed([table], {})


def merge(segments: Sequence[pa.Table]) -> bytes:
    """A file with several segments."""
    groups: list[list[pa.Table]] = []
    space = 0
    for segment in segments:
        if not groups or space < segment.nbytes:
            groups.append([])
            space = ROW_GROUP_BYTES
        groups[-1].append(segment)
        space -= segment.nbytes
    rows = json.dumps([len(segment) for segment in segments], separators=(",", ":")).encode()
    return _sealed([pa.concat_tables(group) for group in groups], {_ROWS_KEY: rows})


def decode_column(file: IO[bytes], column: str) -> list[Any]:
    """One column of an open file, without reading the rest. ``pa.ArrowException`` or ``OSError``."""
    # Without threads: one that still holds Python's buffer when the interpreter ends would abort the process.
    table = pq.ParquetFile(file, page_checksum_verification=True).read([column], use_threads=False)
    values: list[Any] = table[column].to_pylist()
    return values


def _sealed(groups: Sequence[pa.Table], metadata: dict[bytes, bytes]) -> bytes:
    sink = pa.BufferOutputStream()
    # Dictionaries cost time, and space too in the many small columns of a single segment.
    how = {"compression": "zstd", "use_dictionary": False, "write_page_checksum": True}
    with pq.ParquetWriter(sink, groups[0].schema, **how) as writer:
        for group in groups:
            writer.write_table(group, row_group_size=max(len(group), 1))
        writer.add_key_value_metadata({**metadata, _DIGEST_KEY: _NO_DIGEST})
    data = bytes(sink.getvalue())
    return _replace_last(data, _NO_DIGEST, _digest(data))


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest().encode()


def _replace_last(data: bytes, old: bytes, new: bytes) -> bytes:
    head, found, tail = data.rpartition(old)
    return head + new + tail if found else data


def _version_of(schema: pa.Schema, name: str) -> int:
    found = (schema.metadata or {}).get(VERSION_KEY)
    if found is None:
        raise ValueError(f"{name} holds no episodes: its metadata has no schema_version")
    text = found.decode(errors="replace")
    if not text.isdecimal() or not int(text) or int(text) > SCHEMA_VERSION:
        raise ValueError(f"{name} has schema version {text}, this program reads those up to {SCHEMA_VERSION}")
    return int(text)


def _upgraded(table: pa.Table, version: int) -> pa.Table:
    """A table that was written in schema ``version``, in the present one."""
    if version == SCHEMA_VERSION:
        return table
    for each in range(version, SCHEMA_VERSION):
        table = UPGRADES[each](table)
    versions = pa.array([SCHEMA_VERSION] * len(table), pa.int32())
    at = SCHEMA.get_field_index("schema_version")
    return table.set_column(at, SCHEMA.field(at), versions).cast(SCHEMA)


def _list_reward_parts(table: pa.Table) -> pa.Table:
    """Version 1 had a map, which the library ``datasets`` does not open."""
    at = SCHEMA.get_field_index("reward_parts")
    field = SCHEMA.field(at)
    chunks = [
        pa.ListArray.from_arrays(
            chunk.offsets,
            pa.StructArray.from_arrays([chunk.keys, chunk.items], fields=list(field.type.value_type)),
        )
        for chunk in table["reward_parts"].chunks
    ]
    return table.set_column(at, field, pa.chunked_array(chunks, field.type))


def _say_nothing_of_others(table: pa.Table) -> pa.Table:
    """Version 2 kept of a pair only what the agreeing teachers said."""
    at = SCHEMA.get_field_index("pairs")
    field = SCHEMA.field(at)
    chunks = []
    for chunk in table["pairs"].chunks:
        pairs = chunk.values
        nothing = pa.array([[]] * len(pairs), pa.list_(pa.string()))
        columns = [pairs.field(index) for index in range(pairs.type.num_fields)]
        made = pa.StructArray.from_arrays([*columns, nothing], fields=list(field.type.value_type))
        chunks.append(pa.ListArray.from_arrays(chunk.offsets, made))
    return table.set_column(at, field, pa.chunked_array(chunks, field.type))


UPGRADES: dict[int, Callable[[pa.Table], pa.Table]] = {1: _list_reward_parts, 2: _say_nothing_of_others}
"""By schema version: what makes a table of it one of the next version."""
