"""Episodes as Parquet: one explicit schema, one row per episode, and nothing lost on the way.

Token ids are int32, the loss mask uint8, log-probabilities float32 (so a log-probability comes back as the
nearest float32); everything else is exact. A file carries its own SHA-256, so any flipped bit is noticed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import fields
from itertools import pairwise
from typing import IO, Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from hintloop.replay.episode import (
    PER_TOKEN,
    SCHEMA_VERSION,
    Episode,
    HintSite,
    Outcome,
    PreferencePair,
    Turn,
)
from hintloop.replay.vector import Vector

_VERSION_KEY = b"schema_version"
_DIGEST_KEY = b"sha256"
_NO_DIGEST = b"0" * 64
"""Stands where the digest of the whole file goes, while that is computed."""

_TURN = pa.struct(
    [
        ("role", pa.string()),
        ("start", pa.int32()),
        ("end", pa.int32()),
        ("text", pa.string()),
        ("tool_name", pa.string()),
        ("tool_arguments", pa.string()),
        ("error_kind", pa.string()),
        ("error_message", pa.string()),
        ("error_cause", pa.string()),
        ("exit_code", pa.int32()),
        ("seconds", pa.float64()),
    ]
)
_HINT_SITE = pa.struct(
    [
        ("turn", pa.int32()),
        ("kind", pa.string()),
        ("hint", pa.string()),
        ("insert_at", pa.int32()),
        ("start", pa.int32()),
        ("end", pa.int32()),
        ("hint_ids", pa.list_(pa.int32())),
    ]
)
_PAIR = pa.struct(
    [
        ("turn", pa.int32()),
        ("prompt_end", pa.int32()),
        ("chosen_ids", pa.list_(pa.int32())),
        ("rejected_ids", pa.list_(pa.int32())),
        ("chosen_text", pa.string()),
        ("rejected_text", pa.string()),
        ("asked", pa.int32()),
        ("agreed", pa.int32()),
        ("verified", pa.bool_()),
        ("teachers", pa.list_(pa.string())),
        ("cost_usd", pa.float64()),
    ]
)
SCHEMA = pa.schema(
    [
        pa.field("episode_id", pa.string(), nullable=False),
        pa.field("group_id", pa.string(), nullable=False),
        pa.field("task_id", pa.string(), nullable=False),
        pa.field("env", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("created_at", pa.float64(), nullable=False),
        pa.field("model", pa.string(), nullable=False),
        pa.field("tokenizer_fingerprint", pa.string(), nullable=False),
        pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("loss_mask", pa.list_(pa.uint8()), nullable=False),
        pa.field("logprobs", pa.list_(pa.float32()), nullable=False),
        pa.field("policy_versions", pa.list_(pa.int32()), nullable=False),
        pa.field("turns", pa.list_(_TURN), nullable=False),
        pa.field("outcome", pa.string(), nullable=False),
        pa.field("reward", pa.float64()),
        pa.field("reward_parts", pa.map_(pa.string(), pa.float64()), nullable=False),
        pa.field("hint_sites", pa.list_(_HINT_SITE), nullable=False),
        pa.field("pairs", pa.list_(_PAIR), nullable=False),
        pa.field("schema_version", pa.int32(), nullable=False),
    ],
    metadata={_VERSION_KEY: str(SCHEMA_VERSION)},
)
"""The columns, in the order of the fields of ``Episode``; the file metadata holds ``schema_version``."""

_NAMES = {kind: tuple(f.name for f in fields(kind)) for kind in (Episode, Turn, HintSite, PreferencePair)}


class DamagedSegment(Exception):
    """The bytes of a segment are not what was written. ``segment`` is its name."""

    def __init__(self, segment: str, reason: str) -> None:
        super().__init__(f"segment {segment} is damaged: {reason}")
        self.segment = segment
        self.reason = reason

    def __reduce__(self) -> tuple[type[DamagedSegment], tuple[str, str]]:
        return type(self), (self.segment, self.reason)


def to_table(episodes: Sequence[Episode]) -> pa.Table:
    """One row per episode, in order. ``ValueError`` for another schema version or a number out of its range.

    A lone surrogate, which no UTF-8 text can hold, becomes U+FFFD.
    """
    for episode in episodes:
        if (found := episode.schema_version) != SCHEMA_VERSION:
            raise ValueError(
                f"{episode.episode_id} has schema version {found}, this program writes {SCHEMA_VERSION}"
            )
    rows = [_plain(episode) for episode in episodes]
    try:
        return pa.Table.from_pylist(rows, schema=SCHEMA)
    except UnicodeEncodeError:
        return pa.Table.from_pylist(_without_surrogates(rows), schema=SCHEMA)


def from_table(table: pa.Table) -> list[Episode]:
    """The inverse of ``to_table``. ``ValueError`` for another schema version."""
    check_version(table.schema, "table")
    others = [name for name in SCHEMA.names if name not in PER_TOKEN]
    vectors = {name: _vectors(table[name], code) for name, code in PER_TOKEN.items()}
    return [
        _episode({**row, **{name: found[number] for name, found in vectors.items()}})
        for number, row in enumerate(table.select(others).to_pylist())
    ]


def check_version(schema: pa.Schema, name: str) -> None:
    """``ValueError`` unless the metadata of ``schema`` says the schema version of this program."""
    found = (schema.metadata or {}).get(_VERSION_KEY)
    if found is None:
        raise ValueError(f"{name} holds no episodes: its metadata has no schema_version")
    if found != str(SCHEMA_VERSION).encode():
        version = found.decode(errors="replace")
        raise ValueError(f"{name} has schema version {version}, this program reads {SCHEMA_VERSION}")


def encode(episodes: Sequence[Episode]) -> bytes:
    """A whole Parquet file; equal episodes give equal bytes. Errors of ``to_table``."""
    return seal(to_table(episodes))


def seal(table: pa.Table) -> bytes:
    """A whole Parquet file that carries its own SHA-256, taken with zeros in the place of the digest."""
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, table.schema, compression="zstd", write_page_checksum=True) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({_DIGEST_KEY: _NO_DIGEST})
    data = bytes(sink.getvalue())
    return _replace_last(data, _NO_DIGEST, _digest(data))


def decode(data: bytes, name: str) -> list[Episode]:
    """The episodes of a whole Parquet file that errors call ``name``.

    ``DamagedSegment`` when the bytes are not what was written; ``ValueError`` for another schema version.
    """
    try:
        file = pq.ParquetFile(pa.BufferReader(data))
        digest = (file.metadata.metadata or {}).get(_DIGEST_KEY)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DamagedSegment(name, str(error)) from error
    if digest is None or _digest(_replace_last(data, digest, _NO_DIGEST)) != digest:
        raise DamagedSegment(name, "its digest is missing or wrong")
    check_version(file.schema_arrow, name)
    try:
        return from_table(file.read())
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedSegment(name, str(error)) from error


def decode_column(file: IO[bytes], column: str) -> list[Any]:
    """One column of an open Parquet file, without reading the rest. ``pa.ArrowException`` or ``OSError``."""
    table = pq.ParquetFile(file, page_checksum_verification=True).read([column])
    values: list[Any] = table[column].to_pylist()
    return values


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest().encode()


def _replace_last(data: bytes, old: bytes, new: bytes) -> bytes:
    head, found, tail = data.rpartition(old)
    return head + new + tail if found else data


def _plain(item: Episode | Turn | HintSite | PreferencePair) -> dict[str, Any]:
    return {name: _cell(getattr(item, name)) for name in _NAMES[type(item)]}


def _cell(value: Any) -> Any:
    kind = type(value)  # ``isinstance`` of a Sequence costs more than the rest of a turn
    if kind is dict:
        return list(value.items())
    if kind is Vector:
        return np.asarray(value)
    if kind is tuple and value and type(value[0]) in _NAMES:
        return [_plain(item) for item in value]
    return value


def _episode(row: dict[str, Any]) -> Episode:
    row["turns"] = tuple(Turn(**turn) for turn in row["turns"])
    row["hint_sites"] = tuple(HintSite(**_lists_to_tuples(site)) for site in row["hint_sites"])
    row["pairs"] = tuple(PreferencePair(**_lists_to_tuples(pair)) for pair in row["pairs"])
    row["reward_parts"] = dict(row["reward_parts"])
    row["outcome"] = Outcome(row["outcome"])
    return Episode(**row)


def _vectors(column: pa.ChunkedArray, code: str) -> list[Vector[Any]]:
    """The lists of a column, as views of its memory."""
    found = []
    for chunk in column.chunks:
        values, ends = chunk.values.to_numpy(), chunk.offsets.to_numpy()
        found += [Vector(values[start:end], code) for start, end in pairwise(ends)]
    return found


def _lists_to_tuples(row: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {name: _without_surrogates(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_without_surrogates(item) for item in value)
    return value
