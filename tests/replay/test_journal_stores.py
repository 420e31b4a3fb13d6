"""Segments are there whole or not at all on an S3-compatible server, where nothing can be renamed."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from hintloop.replay.episode import Episode
from hintloop.replay.journal import Journal

Make = Callable[[int], Episode]

APPEND_FOREVER = """
import dataclasses, pickle, sys
from hintloop.replay import journal as module

module.COMPACT_EVERY = 4
episode = pickle.load(open(sys.argv[2], "rb"))
writer = module.Journal(sys.argv[1]).writer("w")
while True:
    writer.append([dataclasses.replace(episode, episode_id=str(writer.next_seq))])
    print(writer.next_seq, flush=True)
"""


def test_a_segment_is_never_overwritten_and_a_put_can_be_repeated(bucket: str, make_episode: Make) -> None:
    journal = Journal(f"{bucket}/put")
    unaware, stale = journal.writer("w"), journal.writer("w")
    journal.writer("w").append([make_episode(0)])
    assert unaware.append([make_episode(0)]) == "w-00000000.parquet"
    with pytest.raises(FileExistsError, match="w-00000000"):
        stale.append([make_episode(1)])
    assert journal.reader().poll() == [make_episode(0)]


def test_files_are_merged_and_a_reader_in_the_middle_goes_on(bucket: str, make_episode: Make) -> None:
    journal = Journal(f"{bucket}/merged")
    writer = journal.writer("w")
    for number in range(6):
        writer.append([make_episode(number)])
    reader = journal.reader()
    for _ in range(3):
        assert reader.poll_segment() is not None
    assert journal.compact().merged == 6
    assert [file.name for file in journal.files()] == ["w-00000000_00000005.parquet"]
    assert reader.poll() == [make_episode(number) for number in range(3, 6)]
    assert journal.episode_ids() == {f"e{number}" for number in range(6)}


def test_killing_a_writer_leaves_whole_segments_only(
    bucket: str, tmp_path: Path, make_episode: Make, run_and_kill: Callable[..., list[str]]
) -> None:
    (tmp_path / "episode").write_bytes(pickle.dumps(make_episode(0)))
    journal = Journal(f"{bucket}/killed")
    reader, found = journal.reader(), list[str]()
    for lines, after in ((5, 0.004), (5, 0.03)):
        confirmed = run_and_kill(
            APPEND_FOREVER, journal.uri, str(tmp_path / "episode"), lines=lines, after=after
        )
        found += [episode.episode_id for episode in reader.poll()]
        assert len(found) >= int(confirmed[-1])
    assert found == [str(number) for number in range(len(found))]
    assert reader.damaged == []
    assert [damage for _, _, damage in journal.check() if damage] == []
