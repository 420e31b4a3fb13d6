"""A journal is Parquet that anybody opens as it is, before and after its files are merged."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from hintloop.replay.episode import Episode, Outcome
from hintloop.replay.journal import Journal

Make = Callable[[int], Episode]


@pytest.fixture(params=["plain", "merged"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, make_episode: Make) -> Path:
    """A journal of five episodes, the last of which has nothing that it could do without."""
    bare = dataclasses.replace(
        make_episode(4), outcome=Outcome.UNGRADED, reward=None, reward_parts={}, hint_sites=(), pairs=()
    )
    journal = Journal(tmp_path / "journal")
    for number in range(4):
        journal.writer("w").append([make_episode(number)])
    if request.param == "merged":
        journal.compact()
    journal.writer("w").append([bare])
    assert len(list((tmp_path / "journal").iterdir())) == (5 if request.param == "plain" else 2)
    return tmp_path / "journal"


def test_hugging_face_datasets_opens_it(folder: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="needs datasets, of the extra train")
    files = sorted(map(str, folder.glob("*.parquet")))
    found = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=str(tmp_path / "hf"))
    assert found["episode_id"][:] == [f"e{number}" for number in range(5)]
    assert found[0]["reward_parts"] == [{"name": "tests", "value": 1.0}]
    assert found[1]["turns"][1]["tool_name"] == "run"
    assert found[4]["reward"] is None


def test_pandas_opens_it(folder: Path) -> None:
    pandas = pytest.importorskip("pandas", reason="needs pandas, which comes with the extra train")
    found = pandas.read_parquet(folder)
    assert list(found["episode_id"]) == [f"e{number}" for number in range(5)]
    assert [list(ids) for ids in found["token_ids"]] == [[number, 7, 8, 9] for number in range(5)]
    assert found["turns"][0][1]["text"] == "run"
    assert found["reward"].mean() == 1.0


def test_duckdb_opens_it(folder: Path) -> None:
    duckdb = pytest.importorskip("duckdb", reason="needs duckdb, of the extra dev")
    query = (
        f"select episode_id, len(token_ids), turns[2].tool_name, reward_parts[1].value "
        f"from '{folder}/*.parquet' where outcome = 'solved' order by episode_id"
    )
    assert duckdb.sql(query).fetchall() == [(f"e{number}", 4, "run", 1.0) for number in range(4)]
