"""Episodes as tables: one explicit schema, one row per episode, and nothing lost on the way.

Token ids are int32, the loss mask uint8, log-probabilities float32 (so a log-probability comes back as the
nearest float32); everything else is exact. Only types that every Parquet reader knows: no maps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from itertools import accumulate, chain, pairwise
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]

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

VERSION_KEY = b"schema_version"
"""Where the metadata of a schema has its version."""

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
        ("others", pa.list_(pa.string())),
    ]
)
_PART = pa.struct([("name", pa.string()), ("value", pa.float64())])
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
        pa.field("reward_parts", pa.list_(_PART), nullable=False),
        pa.field("hint_sites", pa.list_(_HINT_SITE), nullable=False),
        pa.field("pairs", pa.list_(_PAIR), nullable=False),
        pa.field("schema_version", pa.int32(), nullable=False),
    ],
    metadata={VERSION_KEY: str(SCHEMA_VERSION)},
)
"""The columns, in the order of the fields of ``Episode``; the file metadata holds ``schema_version``."""

_PARTS: dict[str, Callable[..., Any]] = {
    "turns": Turn,
    "hint_sites": HintSite,
    "pairs": PreferencePair,
}
"""The columns that are lists of our own classes; the struct has the fields of the class in the same order."""


def to_table(episodes: Sequence[Episode]) -> pa.Table:
    """One row per episode, in order. ``ValueError`` for another schema version or a number out of its range.

    A lone surrogate, which no UTF-8 text can hold, becomes U+FFFD.
    """
    for episode in episodes:
        if (found := episode.schema_version) != SCHEMA_VERSION:
            raise ValueError(
                f"{episode.episode_id} has schema version {found}, this program writes {SCHEMA_VERSION}"
            )
    columns = [_column([getattr(each, field.name) for each in episodes], field) for field in SCHEMA]
    return pa.Table.from_arrays(columns, schema=SCHEMA)


def from_table(table: pa.Table) -> list[Episode]:
    """The inverse of ``to_table``."""
    columns = [_values(table[name], name) for name in SCHEMA.names]
    return [Episode(*row) for row in zip(*columns, strict=True)]


def _column(rows: Sequence[Any], field: pa.Field) -> pa.Array:
    """One column of the table, column by column of what is in it: several times faster than row by row."""
    if field.name in PER_TOKEN:
        values = np.concatenate(rows) if rows else ()
        return pa.ListArray.from_arrays(_offsets(rows), pa.array(values, field.type.value_type))
    if field.name in _PARTS:
        return _structs(rows, field.type, [attrgetter(inner.name) for inner in field.type.value_type])
    if field.name == "reward_parts":
        return _structs([row.items() for row in rows], field.type, [itemgetter(0), itemgetter(1)])
    return _array(rows, field.type)


def _structs(rows: Sequence[Any], kind: pa.ListType, getters: Iterable[Callable[[Any], Any]]) -> pa.Array:
    flat = list(chain.from_iterable(rows))
    fields = list(kind.value_type)
    columns = [_array(list(map(get, flat)), field.type) for get, field in zip(getters, fields, strict=True)]
    return pa.ListArray.from_arrays(_offsets(rows), pa.StructArray.from_arrays(columns, fields=fields))


def _array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    try:
        return pa.array(values, kind)
    except UnicodeEncodeError:
        return pa.array(list(map(_without_surrogates, values)), kind)


def _offsets(rows: Iterable[Sized]) -> pa.Array:
    return pa.array(list(accumulate(map(len, rows), initial=0)), pa.int32())


def _values(column: pa.ChunkedArray, name: str) -> list[Any]:
    if name in PER_TOKEN:
        return _vectors(column, PER_TOKEN[name])
    if name in _PARTS:
        return [tuple(row) for row in _rows(column, _PARTS[name])]
    if name == "reward_parts":
        return [dict(row) for row in _rows(column, lambda *pair: pair)]
    values = column.to_pylist()
    return list(map(Outcome, values)) if name == "outcome" else values


def _rows(column: pa.ChunkedArray, make: Callable[..., Any]) -> Iterator[list[Any]]:
    """What ``make`` makes of each struct in each list of a column."""
    for chunk in column.chunks:
        ends = chunk.offsets.to_numpy()
        made = list(map(make, *map(_leaf, chunk.flatten().flatten())))
        yield from (made[start - ends[0] : end - ends[0]] for start, end in pairwise(ends.tolist()))


def _leaf(values: pa.Array) -> list[Any]:
    found = values.to_pylist()
    return list(map(tuple, found)) if pa.types.is_list(values.type) else found


def _vectors(column: pa.ChunkedArray, code: str) -> list[Vector[Any]]:
    """The lists of a column, as views of its memory."""
    found = []
    for chunk in column.chunks:
        values, ends = chunk.values.to_numpy(), chunk.offsets.to_numpy()
        found += [Vector(values[start:end], code) for start, end in pairwise(ends)]
    return found


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, tuple):
        return tuple(map(_without_surrogates, value))
    return value
