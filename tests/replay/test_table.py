"""Episodes survive Parquet exactly, and damage or another schema never passes for episodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hintloop.replay.episode import SCHEMA_VERSION, Episode, HintSite, Outcome, PreferencePair, Turn
from hintloop.replay.segment import DamagedSegment, SegmentFile, decode, encode, seal
from hintloop.replay.table import SCHEMA, from_table, to_table

INT32 = st.integers(-(2**31), 2**31 - 1)
DOUBLE = st.floats(allow_nan=False)
IDS = st.lists(INT32, max_size=4).map(tuple)
TEXT = st.text(max_size=8)
MAYBE_TEXT = st.none() | TEXT

TURNS = st.builds(
    Turn,
    role=TEXT,
    start=INT32,
    end=INT32,
    text=TEXT,
    tool_name=MAYBE_TEXT,
    tool_arguments=MAYBE_TEXT,
    error_kind=MAYBE_TEXT,
    error_message=MAYBE_TEXT,
    error_cause=MAYBE_TEXT,
    exit_code=st.none() | INT32,
    seconds=DOUBLE,
)
SITES = st.builds(HintSite, INT32, TEXT, TEXT, INT32, INT32, INT32, IDS)
PAIRS = st.builds(
    PreferencePair,
    INT32,
    INT32,
    IDS,
    IDS,
    TEXT,
    TEXT,
    INT32,
    INT32,
    st.booleans(),
    st.lists(TEXT, max_size=2).map(tuple),
    DOUBLE,
    st.lists(TEXT, max_size=2).map(tuple),
)


@st.composite
def episodes(draw: st.DrawFn) -> Episode:
    n = draw(st.integers(0, 5))

    def column(values: st.SearchStrategy[Any]) -> tuple[Any, ...]:
        return tuple(draw(st.lists(values, min_size=n, max_size=n)))

    outcome = draw(st.sampled_from(Outcome))
    return Episode(
        *(draw(TEXT) for _ in range(5)),
        created_at=draw(DOUBLE),
        model=draw(TEXT),
        tokenizer_fingerprint=draw(TEXT),
        token_ids=column(INT32),
        loss_mask=column(st.integers(0, 1)),
        logprobs=column(st.floats(width=32, allow_nan=False)),
        policy_versions=column(INT32),
        turns=tuple(draw(st.lists(TURNS, max_size=2))),
        outcome=outcome,
        reward=None if outcome in (Outcome.INFRA_ERROR, Outcome.UNGRADED) else draw(DOUBLE),
        reward_parts=draw(st.dictionaries(TEXT, DOUBLE, max_size=2)),
        hint_sites=tuple(draw(st.lists(SITES, max_size=2))),
        pairs=tuple(draw(st.lists(PAIRS, max_size=2))),
    )


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(episodes(), min_size=1, max_size=3))
def test_episodes_come_back_exactly(written: list[Episode]) -> None:
    found = decode(encode(written), "segment")
    assert found == written
    assert repr(found) == repr(written)  # types too: tuples, enum members, -0.0


def test_the_schema_has_the_fields_of_an_episode_in_order() -> None:
    assert SCHEMA.names == [field.name for field in dataclasses.fields(Episode)]
    for column, kind in (("turns", Turn), ("hint_sites", HintSite), ("pairs", PreferencePair)):
        struct = SCHEMA.field(column).type.value_type
        assert [struct.field(i).name for i in range(struct.num_fields)] == [
            f.name for f in dataclasses.fields(kind)
        ]


def test_logprobs_become_the_nearest_float32(make_episode: Callable[[int], Episode]) -> None:
    episode = dataclasses.replace(make_episode(0), logprobs=(0.0, 0.0, -0.1, -1e-3))
    (found,) = decode(encode([episode]), "segment")
    assert found.logprobs == pytest.approx(episode.logprobs, rel=2**-24)


def test_equal_episodes_give_equal_bytes(make_episode: Callable[[int], Episode]) -> None:
    assert encode([make_episode(0), make_episode(1)]) == encode([make_episode(0), make_episode(1)])


def test_a_lone_surrogate_costs_one_character_and_not_the_episode(
    make_episode: Callable[[int], Episode],
) -> None:
    turn = Turn("tool", 0, 2, "caf\udce9 \U0001f600")
    (found,) = decode(encode([dataclasses.replace(make_episode(0), turns=(turn,))]), "segment")
    assert found == dataclasses.replace(
        make_episode(0), turns=(dataclasses.replace(turn, text="caf\ufffd \U0001f600"),)
    )


def test_other_parquet_tools_read_a_segment(make_episode: Callable[[int], Episode], tmp_path: Any) -> None:
    path = tmp_path / "segment.parquet"
    path.write_bytes(encode([make_episode(0)]))
    table = pq.read_table(path)
    assert table.schema.equals(SCHEMA)
    assert from_table(table) == [make_episode(0)]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"schema_version": "99"}, f"schema version 99, this program reads those up to {SCHEMA_VERSION}"),
        ({}, "holds no episodes"),
    ],
)
def test_another_schema_version_is_a_clear_error(
    make_episode: Callable[[int], Episode], metadata: dict[str, str], message: str
) -> None:
    table = to_table([make_episode(0)]).replace_schema_metadata(metadata)
    with pytest.raises(ValueError, match=f"s-1.* {message}"):
        decode(seal(table), "s-1")


@pytest.mark.parametrize("version", range(1, SCHEMA_VERSION))
def test_a_file_of_an_old_schema_version_reads_as_one_of_today(
    version: int, make_episode: Callable[[int], Episode]
) -> None:
    data = (
        Path(__file__).parent / "data" / f"schema_{version}.parquet"
    ).read_bytes()  # as the program then wrote it
    assert not pq.read_schema(pa.BufferReader(data)).equals(SCHEMA)
    assert decode(data, "s-1") == [make_episode(0), make_episode(1)]
    assert encode(decode(data, "s-1")) == encode([make_episode(0), make_episode(1)])


def test_a_part_of_an_upgraded_table_is_the_right_part(make_episode: Callable[[int], Episode]) -> None:
    data = (Path(__file__).parent / "data" / "schema_1.parquet").read_bytes()
    table = SegmentFile(data, "s-1").table(0)
    assert table.schema.equals(SCHEMA, check_metadata=True)
    assert from_table(table.slice(1)) == [make_episode(1)]


def test_episodes_of_another_schema_version_are_not_written(make_episode: Callable[[int], Episode]) -> None:
    with pytest.raises(ValueError, match="e0 has schema version 99"):
        encode([dataclasses.replace(make_episode(0), schema_version=99)])


def test_a_token_id_beyond_int32_is_refused(make_episode: Callable[[int], Episode]) -> None:
    with pytest.raises(ValueError, match="e0: token_ids has other than int32 numbers"):
        encode([dataclasses.replace(make_episode(0), token_ids=(2**31, 1, 2, 3))])


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_flipped_bit_is_noticed(make_episode: Callable[[int], Episode], data: st.DataObject) -> None:
    content = bytearray(encode([make_episode(0)]))
    bit = data.draw(st.integers(0, len(content) * 8 - 1))
    content[bit // 8] ^= 1 << (bit % 8)
    with pytest.raises(DamagedSegment, match="s-1"):
        decode(bytes(content), "s-1")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_cut_file_is_noticed(make_episode: Callable[[int], Episode], data: st.DataObject) -> None:
    content = encode([make_episode(0)])
    with pytest.raises(DamagedSegment):
        decode(content[: data.draw(st.integers(0, len(content) - 1))], "s-1")


def test_content_that_is_no_valid_episode_is_damage(make_episode: Callable[[int], Episode]) -> None:
    table = to_table([make_episode(0)])
    position = table.schema.names.index("outcome")
    wrong = table.set_column(position, table.schema.field(position), [["flying"]])
    with pytest.raises(DamagedSegment, match="flying"):
        decode(seal(wrong), "s-1")
