"""``hintloop journal``: what is in a journal, whether it is whole, fewer files, a part of it elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from hintloop.cli.main import run_command
from hintloop.replay.episode import Episode, Outcome
from hintloop.replay.journal import Journal
from hintloop.replay.table import SCHEMA

Says = Callable[..., str]


@pytest.fixture
def says(capsys: pytest.CaptureFixture[str]) -> Says:
    """Runs a command and gives what it printed."""

    def run(*words: str, code: int = 0) -> str:
        assert run_command(["journal", *words]) == code, capsys.readouterr().err
        return capsys.readouterr().out

    return run


def episode(number: int) -> Episode:
    solved = number % 2 == 0
    return Episode(
        episode_id=f"e{number}",
        group_id=f"g{number}",
        task_id=f"{'bugfix' if number < 4 else 'exercism'}/{number}",
        env="coding",
        source="rollout",
        created_at=0.0,
        model="student",
        tokenizer_fingerprint="",
        token_ids=(1, 2),
        loss_mask=(0, 1),
        logprobs=(0.0, -1.0),
        policy_versions=(-1, number),
        turns=(),
        outcome=Outcome.SOLVED if solved else Outcome.FAILED,
        reward=float(solved),
    )


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """Six segments of writer ``a``, one of ``b``."""
    made = Journal(tmp_path / "journal")
    writer = made.writer("a")
    for number in range(6):
        writer.append([episode(number)])
    made.writer("b").append([episode(6)])
    return made


def test_writers_are_listed_with_their_segments_and_files(says: Says, journal: Journal) -> None:
    assert json.loads(says("list", journal.uri, "--json")) == [
        {"writer": "a", "segments": 6, "files": 6},
        {"writer": "b", "segments": 1, "files": 1},
    ]
    assert "segments" in says("list", journal.uri)


def test_files_are_merged_and_nothing_else_changes(says: Says, journal: Journal) -> None:
    before = journal.reader().poll()
    assert says("compact", journal.uri) == "6 files merged into 1\n"
    assert json.loads(says("compact", journal.uri, "--json")) == {"merged": 0, "made": 0, "left": {}}
    assert json.loads(says("list", journal.uri, "--json"))[0] == {"writer": "a", "segments": 6, "files": 1}
    assert journal.reader().poll() == before


def test_damage_is_named(says: Says, journal: Journal, tmp_path: Path) -> None:
    assert says("check", journal.uri) == "7 episodes in 7 files, 0 of them damaged\n"
    path = tmp_path / "journal" / "a-00000003.parquet"
    path.write_bytes(path.read_bytes()[:-100])
    assert "a-00000003.parquet: " in says("check", journal.uri, code=1)
    found = json.loads(says("check", journal.uri, "--json", code=1))
    assert (found["files"], found["episodes"], list(found["damaged"])) == (7, 6, ["a-00000003.parquet"])
    assert "left as it is: a-00000003.parquet: " in says("compact", journal.uri)


@pytest.mark.parametrize(
    ("words", "copied"),
    [
        ([], [0, 1, 2, 3, 4, 5, 6]),
        (["--outcome", "solved"], [0, 2, 4, 6]),
        (["--outcome", "solved", "--outcome", "failed", "--task", "exercism/*"], [4, 5, 6]),
        (["--source", "codex"], []),
        (["--model", "stud*", "--max-lag", "1", "--newest", "6"], [5, 6]),
    ],
)
def test_a_part_is_copied(
    says: Says, journal: Journal, tmp_path: Path, words: list[str], copied: list[int]
) -> None:
    to = str(tmp_path / "to")
    found = json.loads(says("copy", journal.uri, "--to", to, *words, "--json"))
    assert found == {"copied": len(copied), "known_already": 0, "damaged": []}
    assert Journal(to).episode_ids() == {f"e{number}" for number in copied}
    assert says("copy", journal.uri, "--to", to, *words).startswith(f"0 episodes copied, {len(copied)} ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--outcome", "nice"], "no outcome 'nice'"),
        (["--max-lag", "2"], "--max-lag and --newest belong together"),
        (["--to", "SAME"], "--to must be another journal"),
    ],
)
def test_a_copy_that_makes_no_sense_is_one_line(
    journal: Journal, tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [journal.uri if word == "SAME" else word for word in words]
    command = ["journal", "copy", journal.uri, "--to", str(tmp_path / "to"), *words]
    assert run_command(command) == 2
    assert message in capsys.readouterr().err


def test_a_copy_is_of_the_newest_schema_version(says: Says, tmp_path: Path) -> None:
    old, to = tmp_path / "old", str(tmp_path / "to")
    old.mkdir()
    recorded = Path(__file__).parent.parent / "replay" / "data" / "schema_1.parquet"
    (old / "w-00000000.parquet").write_bytes(recorded.read_bytes())
    says("copy", str(old), "--to", to)
    assert Journal(to).reader().poll() == Journal(old).reader().poll()
    assert pq.read_schema(tmp_path / "to" / "copy-00000000.parquet").equals(SCHEMA)
