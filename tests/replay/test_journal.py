"""The journal loses nothing, gives nothing twice, and takes damage and crashes one segment at a time."""

from __future__ import annotations

import json
import os
import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import fsspec
import pytest
import structlog
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hintloop.replay.episode import Episode
from hintloop.replay.journal import DamagedSegment, Journal
from hintloop.replay.segment import seal
from hintloop.replay.table import to_table

Make = Callable[[int], Episode]

APPEND_FOREVER = """
import dataclasses, pickle, sys
from hintloop.replay.journal import Journal

episode = pickle.load(open(sys.argv[2], "rb"))
writer = Journal(sys.argv[1]).writer("w")
while True:
    number = writer.next_seq
    pair = [dataclasses.replace(episode, episode_id=f"{number}-{i}") for i in range(2)]
    print(writer.append(pair), flush=True)
"""


def damage(journal: Journal, segment: str) -> None:
    """Flip one bit in the middle of a segment."""
    fs, root = fsspec.core.url_to_fs(journal.uri)
    content = bytearray(fs.cat_file(f"{root}/{segment}"))
    content[len(content) // 2] ^= 1
    fs.pipe_file(f"{root}/{segment}", bytes(content))


def ids(episodes: list[Episode]) -> list[str]:
    return [episode.episode_id for episode in episodes]


def test_an_append_is_one_segment_that_reads_back(uri: str, make_episode: Make) -> None:
    journal = Journal(uri)
    assert journal.segments() == []
    assert journal.reader().poll() == []
    segment = journal.writer("host-1").append([make_episode(0), make_episode(1)])
    assert segment == "host-1-00000000.parquet"
    assert journal.segments() == [segment]
    assert journal.read(segment) == [make_episode(0), make_episode(1)]


def test_an_empty_append_is_refused(uri: str) -> None:
    journal = Journal(uri)
    with pytest.raises(ValueError, match="at least one"):
        journal.writer("w").append([])
    assert journal.segments() == []


@pytest.mark.parametrize("name", ["", "-w", ".w", "a/b", "a b", "../w"])
def test_a_writer_name_that_is_no_file_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="writer name"):
        Journal(tmp_path).writer(name)


def test_a_new_writer_continues_after_the_highest_number_of_its_name(uri: str, make_episode: Make) -> None:
    journal = Journal(uri)
    for number in range(3):
        journal.writer("w").append([make_episode(number)])
    journal.writer("w-2").append([make_episode(3)])
    assert journal.segments() == [
        "w-00000000.parquet",
        "w-2-00000000.parquet",
        "w-00000001.parquet",
        "w-00000002.parquet",
    ]


def test_a_segment_is_never_overwritten(uri: str, make_episode: Make) -> None:
    journal = Journal(uri)
    first, second = journal.writer("w"), journal.writer("w")
    segment = first.append([make_episode(0)])
    with pytest.raises(FileExistsError, match=segment):
        second.append([make_episode(1)])
    assert journal.read(segment) == [make_episode(0)]


def test_an_append_whose_answer_got_lost_can_be_repeated(uri: str, make_episode: Make) -> None:
    journal = Journal(uri)
    unaware = journal.writer("w")
    journal.writer("w").append([make_episode(0)])
    assert unaware.append([make_episode(0)]) == "w-00000000.parquet"
    assert unaware.append([make_episode(1)]) == "w-00000001.parquet"
    assert ids(journal.reader().poll()) == ["e0", "e1"]


def test_a_disk_without_hard_links_keeps_the_promises(
    tmp_path: Path, make_episode: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(source: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    journal = Journal(tmp_path)
    stale = journal.writer("w")
    journal.writer("w").append([make_episode(0)])
    with pytest.raises(FileExistsError):
        stale.append([make_episode(1)])
    assert [path.name for path in tmp_path.iterdir()] == ["w-00000000.parquet"]


def test_a_reader_gives_each_episode_once(uri: str, make_episode: Make) -> None:
    journal = Journal(uri)
    writer, reader = journal.writer("w"), journal.reader()
    writer.append([make_episode(0), make_episode(1)])
    assert ids(reader.poll()) == ["e0", "e1"]
    assert reader.poll() == []
    writer.append([make_episode(2)])
    writer.append([make_episode(3)])
    assert ids(reader.poll()) == ["e2", "e3"]
    assert reader.position == {"w": 3}


def test_segments_can_be_read_one_by_one(uri: str, make_episode: Make) -> None:
    journal = Journal(uri)
    writer, reader = journal.writer("w"), journal.reader()
    for number in range(2):
        writer.append([make_episode(number)])
    first = reader.poll_segment()
    assert first is not None
    assert (first.name, ids(first.episodes), first.position) == ("w-00000000.parquet", ["e0"], {"w": 1})
    second = reader.poll_segment()
    assert second is not None
    assert (ids(second.episodes), second.position) == (["e1"], {"w": 2})
    assert reader.poll_segment() is None
    assert ids(journal.reader(first.position).poll()) == ["e1"]


def test_two_writers_share_a_journal(uri: str, make_episode: Make) -> None:
    journal = Journal(uri)
    a, b = journal.writer("a"), journal.writer("b")
    a.append([make_episode(0)])
    b.append([make_episode(1)])
    b.append([make_episode(2)])
    reader = journal.reader()
    assert ids(reader.poll()) == ["e0", "e1", "e2"]
    a.append([make_episode(3)])
    assert ids(reader.poll()) == ["e3"]
    assert reader.position == {"a": 2, "b": 2}


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(["append a", "append b", "poll", "poll_segment", "resume"]), max_size=14))
def test_any_order_of_appends_reads_and_resumes_gives_each_episode_once_in_order(
    make_episode: Make, steps: list[str]
) -> None:
    journal = Journal(f"memory://{uuid4().hex}")
    writers = {name: journal.writer(name) for name in "ab"}
    written: dict[str, list[str]] = {"a": [], "b": []}
    reader, found, number = journal.reader(), list[str](), 0
    for step in [*steps, "resume", "poll"]:
        if step.startswith("append"):
            episode, number = make_episode(number), number + 1
            writers[step[-1]].append([episode])
            written[step[-1]].append(episode.episode_id)
        elif step == "poll":
            found += ids(reader.poll())
        elif step == "poll_segment":
            segment = reader.poll_segment()
            found += ids(segment.episodes) if segment else []
        else:
            reader = journal.reader(json.loads(json.dumps(reader.position)))
    for mine in written.values():
        assert [episode for episode in found if episode in mine] == mine
    assert len(found) == number


def test_the_position_is_a_copy(tmp_path: Path, make_episode: Make) -> None:
    journal = Journal(tmp_path)
    journal.writer("w").append([make_episode(0)])
    start: dict[str, int] = {}
    reader = journal.reader(start)
    reader.position["w"] = 7
    assert ids(reader.poll()) == ["e0"]
    assert start == {}


def test_a_damaged_segment_is_named_and_skipped(uri: str, make_episode: Make) -> None:
    journal = Journal(uri)
    writer = journal.writer("w")
    for number in range(3):
        writer.append([make_episode(number)])
    damage(journal, "w-00000001.parquet")
    with pytest.raises(DamagedSegment, match=r"w-00000001\.parquet") as caught:
        journal.read("w-00000001.parquet")
    assert caught.value.segment == "w-00000001.parquet"
    reader = journal.reader()
    with structlog.testing.capture_logs() as logs:
        assert ids(reader.poll()) == ["e0", "e2"]
    assert reader.damaged == ["w-00000001.parquet"]
    assert [(entry["log_level"], entry["segment"]) for entry in logs] == [("warning", "w-00000001.parquet")]
    assert reader.position == {"w": 3}


def test_a_segment_of_another_schema_version_stops_the_reader_and_loses_nothing(
    tmp_path: Path, make_episode: Make
) -> None:
    journal = Journal(tmp_path)
    writer = journal.writer("w")
    writer.append([make_episode(0)])
    newer = tmp_path / "w-00000001.parquet"
    newer.write_bytes(seal(to_table([make_episode(1)]).replace_schema_metadata({"schema_version": "99"})))
    reader = journal.reader()
    with pytest.raises(ValueError, match=r"w-00000001\.parquet has schema version 99"):
        reader.poll()
    assert reader.position == {}
    newer.unlink()
    assert ids(reader.poll()) == ["e0"]


def test_a_failing_storage_is_not_taken_for_damage(tmp_path: Path, make_episode: Make) -> None:
    journal = Journal(tmp_path)
    journal.writer("w").append([make_episode(0)])
    segment, away = tmp_path / "w-00000000.parquet", tmp_path / "away"
    segment.rename(away)
    segment.mkdir()
    reader = journal.reader()
    with pytest.raises(IsADirectoryError):
        reader.poll_segment()
    segment.rmdir()
    away.rename(segment)
    assert ids(reader.poll()) == ["e0"]
    assert reader.damaged == []


def test_ids_of_episodes_and_groups_are_collected_past_damage(uri: str, make_episode: Make) -> None:
    journal = Journal(uri)
    for name, numbers in (("a", (0, 1)), ("b", (2, 3)), ("a", (4,))):
        journal.writer(name).append([make_episode(number) for number in numbers])
    assert journal.episode_ids() == {"e0", "e1", "e2", "e3", "e4"}
    fs, root = fsspec.core.url_to_fs(uri)
    content = fs.cat_file(f"{root}/b-00000000.parquet")
    fs.pipe_file(f"{root}/b-00000000.parquet", content[:100])
    with structlog.testing.capture_logs() as logs:
        assert journal.group_ids() == {"g0", "g2"}
    assert [entry["segment"] for entry in logs] == ["b-00000000.parquet"]


def test_leftovers_of_crashed_writers_are_never_listed_and_go_away(
    tmp_path: Path, make_episode: Make
) -> None:
    journal = Journal(tmp_path)
    journal.writer("w").append([make_episode(0)])
    old, young, other = (tmp_path / f".{name}-00000001.parquet.0.tmp" for name in ("w", "w", "x"))
    young = tmp_path / ".w-00000001.parquet.1.tmp"
    for path in (old, young, other):
        path.write_bytes(b"half")
    for path in (old, other):
        os.utime(path, (time.time() - 7200, time.time() - 7200))
    assert journal.segments() == ["w-00000000.parquet"]
    journal.writer("w")
    assert (old.exists(), young.exists(), other.exists()) == (False, True, True)


def test_files_that_are_no_segments_are_ignored(tmp_path: Path, make_episode: Make) -> None:
    journal = Journal(tmp_path)
    journal.writer("w").append([make_episode(0)])
    names = ["README.md", "w-1.parquet", "-00000001.parquet", "w-00000001.parquet.bak", "w-000000001.parquet"]
    for name in (*names, "w-00000001_00000001.parquet", "w-00000002_00000001.parquet"):
        (tmp_path / name).write_text("no segment")
    assert journal.segments() == ["w-00000000.parquet"]


class Listings(MemoryFileSystem):  # type: ignore[misc]
    """Storage whose listings are cached until told otherwise, and can miss one file once, as real ones do."""

    protocol = "listings"
    cachable = True
    store: dict[str, Any] = {}  # noqa: RUF012 - MemoryFileSystem keeps its files in the class
    pseudo_dirs = [""]  # noqa: RUF012
    cached: dict[str, Any] = {}  # noqa: RUF012
    miss: set[str] = set()  # noqa: RUF012

    def invalidate_cache(self, path: str | None = None) -> None:
        self.cached.clear()

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        if path not in self.cached:
            found = [info for info in super().ls(path, detail=True) if info["name"] not in self.miss]
            self.miss.clear()
            self.cached[path] = found
        return self.cached[path] if detail else [info["name"] for info in self.cached[path]]


@pytest.fixture
def listings() -> Iterator[type[Listings]]:
    fsspec.register_implementation("listings", Listings, clobber=True)
    yield Listings
    Listings.store.clear()
    Listings.cached.clear()


def test_cached_listings_do_not_hide_new_segments(listings: type[Listings], make_episode: Make) -> None:
    journal = Journal("listings://journal")
    writer, reader = journal.writer("w"), journal.reader()
    for number in range(3):
        writer.append([make_episode(number)])
        assert ids(reader.poll()) == [f"e{number}"]


def test_a_listing_that_misses_an_older_segment_loses_nothing(
    listings: type[Listings], make_episode: Make
) -> None:
    journal = Journal("listings://torn")
    writer = journal.writer("w")
    for number in range(3):
        writer.append([make_episode(number)])
    reader = journal.reader({"w": 1})
    listings.miss.add("/torn/w-00000001.parquet")
    assert ids(reader.poll()) == ["e1", "e2"]


def test_a_deleted_segment_does_not_stop_a_reader(tmp_path: Path, make_episode: Make) -> None:
    journal = Journal(tmp_path)
    writer = journal.writer("w")
    for number in range(3):
        writer.append([make_episode(number)])
    (tmp_path / "w-00000000.parquet").unlink()
    assert ids(journal.reader().poll()) == ["e1", "e2"]


def test_killing_a_writer_at_any_moment_loses_and_repeats_nothing(
    tmp_path: Path, make_episode: Make, run_and_kill: Callable[..., list[str]]
) -> None:
    (tmp_path / "episode").write_bytes(pickle.dumps(make_episode(0)))
    journal = Journal(tmp_path / "journal")
    reader, confirmed, found = journal.reader(), list[str](), list[str]()
    for lines, after in ((1, 0.003), (3, 0.011), (3, 0.07)):
        before = len(journal.segments())
        arguments = (str(tmp_path / "journal"), str(tmp_path / "episode"))
        printed = run_and_kill(APPEND_FOREVER, *arguments, lines=lines, after=after)
        confirmed += printed
        assert len(printed) <= len(journal.segments()) - before <= len(printed) + 1  # at most one unconfirmed
        found += ids(reader.poll())
    segments = journal.segments()
    assert len(confirmed) >= 7
    assert set(confirmed) <= set(segments)
    assert segments == [f"w-{number:08d}.parquet" for number in range(len(segments))]
    assert found == [f"{number}-{i}" for number in range(len(segments)) for i in range(2)]
    assert reader.damaged == []
