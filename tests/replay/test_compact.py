"""Merging the files of a journal: nobody who reads or writes notices, whenever it is killed."""

from __future__ import annotations

import dataclasses
import json
import pickle
import random
import threading
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

from hintloop.replay import compact as module
from hintloop.replay.episode import Episode
from hintloop.replay.journal import DamagedSegment, Journal
from hintloop.replay.segment import seal
from hintloop.replay.table import to_table

Make = Callable[[int], Episode]

COMPACT_FOREVER = """
import dataclasses, pickle, sys
from hintloop.replay import journal as module

module.COMPACT_EVERY = 3
episode = pickle.load(open(sys.argv[2], "rb"))
journal = module.Journal(sys.argv[1])
writer = journal.writer("w")
while True:
    writer.append([dataclasses.replace(episode, episode_id=str(writer.next_seq))])
    if writer.next_seq % 7 == 0:
        journal.compact()
    print(writer.next_seq, flush=True)
"""


def ids(episodes: list[Episode]) -> list[str]:
    return [episode.episode_id for episode in episodes]


def fill(journal: Journal, make_episode: Make, counts: dict[str, int]) -> list[str]:
    """Append a segment per episode, by turns; the ids of all in the order of reading."""
    writers = {name: journal.writer(name) for name in counts}
    order = sorted((seq, name) for name, count in counts.items() for seq in range(count))
    for number, (_, name) in enumerate(order):
        writers[name].append([make_episode(number)])
    return [f"e{number}" for number in range(len(order))]


def names(journal: Journal) -> list[str]:
    return [file.name for file in journal.files()]


def put(journal: Journal, name: str, data: bytes) -> None:
    fs, root = fsspec.core.url_to_fs(journal.uri)
    fs.pipe_file(f"{root}/{name}", data)


def get(journal: Journal, name: str) -> bytes:
    fs, root = fsspec.core.url_to_fs(journal.uri)
    return bytes(fs.cat_file(f"{root}/{name}"))


def test_merged_files_are_few_and_read_as_before(uri: str, make_episode: Make) -> None:
    journal = Journal(uri)
    expected = fill(journal, make_episode, {"a": 9, "b": 5, "c": 1})
    before = journal.segments()
    done = journal.compact()
    assert (done.merged, done.made, done.left) == (14, 2, {})
    assert names(journal) == [
        "a-00000000_00000008.parquet",
        "b-00000000_00000004.parquet",
        "c-00000000.parquet",
    ]
    assert journal.segments() == before
    assert [journal.read(segment)[0].episode_id for segment in before] == expected
    assert ids(journal.reader().poll()) == expected
    assert journal.episode_ids() == set(expected)
    assert (journal.compact().merged, journal.writer("a").next_seq) == (0, 9)


def test_a_merged_file_is_merged_again_with_what_came_after_it(uri: str, make_episode: Make) -> None:
    journal = Journal(uri)
    expected = fill(journal, make_episode, {"w": 4})
    journal.compact()
    journal.writer("w").append([make_episode(4), make_episode(5)])
    assert names(journal) == ["w-00000000_00000003.parquet", "w-00000004.parquet"]
    journal.compact()
    assert names(journal) == ["w-00000000_00000004.parquet"]
    assert ids(journal.reader().poll()) == [*expected, "e4", "e5"]
    assert ids(journal.read("w-00000004.parquet")) == ["e4", "e5"]


def test_a_position_from_before_is_good_after_and_in_the_middle_of_a_merged_file(
    uri: str, make_episode: Make
) -> None:
    journal = Journal(uri)
    expected = fill(journal, make_episode, {"a": 6, "b": 6})
    readers = [journal.reader() for _ in range(len(expected) + 1)]
    for count, reader in enumerate(readers):
        for _ in range(count):
            assert reader.poll_segment() is not None
    journal.compact()
    for count, reader in enumerate(readers):
        resumed = journal.reader(json.loads(json.dumps(reader.position)))
        assert ids(reader.poll()) == expected[count:]
        assert ids(resumed.poll()) == expected[count:]
        assert reader.position == resumed.position == {"a": 6, "b": 6}
        assert reader.damaged == []


def test_two_readers_of_the_same_position_get_the_same_whether_files_are_merged_or_not(
    tmp_path: Path, make_episode: Make
) -> None:
    merged, plain = Journal(tmp_path / "merged"), Journal(tmp_path / "plain")
    for journal in (merged, plain):
        fill(journal, make_episode, {"a": 7, "b": 3, "c": 5})
    merged.compact()
    left, right = merged.reader({"a": 2}), plain.reader({"a": 2})
    for _ in range(14):
        assert left.poll_segment() == right.poll_segment()


@pytest.fixture
def every_sixth(monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer merges its files when there are six."""
    monkeypatch.setattr("hintloop.replay.journal.COMPACT_EVERY", 6)


@pytest.mark.usefixtures("every_sixth")
def test_a_writer_merges_its_own_files_by_itself(tmp_path: Path, make_episode: Make) -> None:
    journal = Journal(tmp_path)
    other, writer = journal.writer("other"), journal.writer("w")
    other.append([make_episode(0)])
    other.append([make_episode(1)])
    for number in range(8):
        writer.append([make_episode(number)])
    assert names(journal) == [
        "other-00000000.parquet",
        "other-00000001.parquet",
        "w-00000000_00000005.parquet",
        "w-00000006.parquet",
        "w-00000007.parquet",
    ]
    assert len(list(tmp_path.iterdir())) == 5


@pytest.mark.usefixtures("every_sixth")
def test_processes_that_append_little_each_get_their_files_merged_too(uri: str, make_episode: Make) -> None:
    journal = Journal(uri)
    for number in range(7):
        journal.writer("w").append([make_episode(number)])
    assert names(journal) == ["w-00000000_00000005.parquet", "w-00000006.parquet"]


def test_large_files_are_left_alone_and_merged_ones_are_bounded(
    tmp_path: Path, make_episode: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MERGED_BYTES", 400_000)
    monkeypatch.setattr(module, "SMALL_BYTES", 200_000)
    random_ = random.Random(0)
    writer = Journal(tmp_path).writer("w")
    for number, size in enumerate([60_000, 250_000, *[60_000] * 10]):
        writer.append([dataclasses.replace(make_episode(number), model=random_.randbytes(size).hex())])
    Journal(tmp_path).compact()
    assert [(file.first, file.last) for file in Journal(tmp_path).files()] == [
        (0, 0),
        (1, 1),
        (2, 6),
        (7, 11),
    ]
    assert ids(Journal(tmp_path).reader().poll()) == [f"e{number}" for number in range(12)]


def test_row_groups_of_a_merged_file_are_bounded_and_hold_whole_segments(
    tmp_path: Path, make_episode: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hintloop.replay.segment.ROW_GROUP_BYTES", 3000)
    journal = Journal(tmp_path)
    expected = fill(journal, make_episode, {"w": 20})
    journal.compact()
    assert len(names(journal)) == 1
    assert ids(journal.reader().poll()) == expected
    assert [ids(journal.read(segment)) for segment in journal.segments()[::-1]] == [
        [e] for e in expected[::-1]
    ]


def test_a_damaged_segment_is_left_for_all_to_see_and_its_neighbours_are_merged(
    uri: str, make_episode: Make
) -> None:
    journal = Journal(uri)
    fill(journal, make_episode, {"w": 7})
    broken = get(journal, "w-00000003.parquet")[:-900]
    put(journal, "w-00000003.parquet", broken)
    done = journal.compact()
    assert list(done.left) == ["w-00000003.parquet"]
    assert names(journal) == [
        "w-00000000_00000002.parquet",
        "w-00000003.parquet",
        "w-00000004_00000006.parquet",
    ]
    assert get(journal, "w-00000003.parquet") == broken
    reader = journal.reader()
    assert ids(reader.poll()) == ["e0", "e1", "e2", "e4", "e5", "e6"]
    assert reader.damaged == ["w-00000003.parquet"]


def test_a_newer_schema_version_is_left_as_it_is(tmp_path: Path, make_episode: Make) -> None:
    journal = Journal(tmp_path)
    fill(journal, make_episode, {"w": 3})
    newer = to_table([make_episode(9)]).replace_schema_metadata({"schema_version": "99"})
    put(journal, "w-00000003.parquet", seal(newer))
    assert list(journal.compact().left) == ["w-00000003.parquet"]
    assert names(journal) == ["w-00000000_00000002.parquet", "w-00000003.parquet"]


@pytest.mark.parametrize("after", ["more", "nothing"])
def test_a_damaged_merged_file_is_named_once_and_skipped(uri: str, make_episode: Make, after: str) -> None:
    journal = Journal(uri)
    fill(journal, make_episode, {"w": 4})
    journal.compact()
    (name,) = names(journal)
    put(journal, name, get(journal, name)[:-5])
    if after == "more":
        journal.writer("w").append([make_episode(4)])
    reader = journal.reader({"w": 1})
    with structlog.testing.capture_logs() as logs:
        assert ids(reader.poll()) == (["e4"] if after == "more" else [])
        assert reader.poll() == []
    assert reader.damaged == [name]
    assert [entry["segment"] for entry in logs] == [name]
    assert reader.position == {"w": 5 if after == "more" else 4}
    with pytest.raises(DamagedSegment, match=name):
        journal.read("w-00000002.parquet")


def test_a_half_copied_merged_file_costs_nothing_while_its_segments_are_there(
    uri: str, make_episode: Make
) -> None:
    journal = Journal(uri)
    expected = fill(journal, make_episode, {"w": 4})
    contents = {name: get(journal, name) for name in names(journal)}
    journal.compact()
    (name,) = names(journal)
    half = get(journal, name)[:3000]
    put(journal, name, half)
    for segment, data in contents.items():
        put(journal, segment, data)
    reader = journal.reader()
    assert ids(reader.poll()) == expected
    assert reader.damaged == [name]
    assert ids(journal.read("w-00000002.parquet")) == ["e2"]
    assert journal.episode_ids() == set(expected)
    journal.compact()  # writes it again
    assert names(journal) == [name]
    assert get(journal, name) != half
    assert ids(journal.reader().poll()) == expected


def test_a_file_whose_name_promises_other_segments_is_damaged(tmp_path: Path, make_episode: Make) -> None:
    journal = Journal(tmp_path)
    fill(journal, make_episode, {"w": 3})
    journal.compact()
    (tmp_path / "w-00000000_00000002.parquet").rename(tmp_path / "w-00000000_00000004.parquet")
    reader = journal.reader()
    assert reader.poll() == []
    assert reader.damaged == ["w-00000000_00000004.parquet"]


def test_a_second_process_of_the_name_is_refused_also_when_its_number_is_in_a_merged_file(
    uri: str, make_episode: Make
) -> None:
    journal = Journal(uri)
    stale = journal.writer("w")
    expected = fill(journal, make_episode, {"w": 3})
    journal.compact()
    with pytest.raises(FileExistsError, match="w-00000000"):
        stale.append([make_episode(7)])
    assert names(journal) == ["w-00000000_00000002.parquet"]
    assert stale.append([make_episode(0)]) == "w-00000000.parquet"  # its answer got lost: the same again
    assert ids(journal.reader().poll()) == expected


def test_two_that_merge_different_ranges_lose_nothing(uri: str, make_episode: Make) -> None:
    journal = Journal(uri)
    expected = fill(journal, make_episode, {"w": 6})
    contents = {name: get(journal, name) for name in names(journal)}
    fs, root = fsspec.core.url_to_fs(uri)
    for gone in ("w-00000004.parquet", "w-00000005.parquet"):
        fs.rm_file(f"{root}/{gone}")
    journal.compact()
    made = get(journal, "w-00000000_00000003.parquet")
    fs.rm_file(f"{root}/w-00000000_00000003.parquet")
    for name in list(contents)[2:]:
        put(journal, name, contents[name])
    journal.compact()
    put(journal, "w-00000000_00000003.parquet", made)
    assert names(journal) == ["w-00000000_00000003.parquet", "w-00000002_00000005.parquet"]
    for start in range(6):
        assert ids(journal.reader({"w": start}).poll()) == expected[start:]
    journal.writer("w").append([make_episode(6)])
    journal.compact()
    assert ids(journal.reader().poll()) == [*expected, "e6"]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.sampled_from(["append a", "append b", "poll_segment", "resume", "compact"]), max_size=25),
    st.integers(2, 4),
)
def test_any_order_of_appends_reads_and_merges_gives_each_episode_once_in_order(
    make_episode: Make, steps: list[str], at_least: int
) -> None:
    journal = Journal(f"memory://{uuid4().hex}")
    writers = {name: journal.writer(name) for name in "ab"}
    written: dict[str, list[str]] = {"a": [], "b": []}
    reader, found, number = journal.reader(), list[str](), 0
    for step in steps:
        if step.startswith("append"):
            episode, number = make_episode(number), number + 1
            writers[step[-1]].append([episode])
            written[step[-1]].append(episode.episode_id)
        elif step == "poll_segment":
            segment = reader.poll_segment()
            found += ids(segment.episodes) if segment else []
        elif step == "compact":
            journal.compact(at_least=at_least)
        else:
            reader = journal.reader(json.loads(json.dumps(reader.position)))
    found += ids(reader.poll())
    for mine in written.values():
        assert [episode for episode in found if episode in mine] == mine
    assert len(found) == number


class Killed(BaseException):
    """The process is gone."""


class Mortal(MemoryFileSystem):  # type: ignore[misc]
    """Storage of a process that is killed at a certain one of its changes: before it, or when half is written."""

    protocol = "mortal"
    store: dict[str, Any] = {}  # noqa: RUF012 - MemoryFileSystem keeps its files in the class
    pseudo_dirs = [""]  # noqa: RUF012
    lives: int | None = None
    half = False
    lock = threading.Lock()

    def _die(self) -> bool:
        with self.lock:
            if self.lives is None:
                return False
            type(self).lives = self.lives - 1
            return self.lives < 0

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> Any:
        if self._die():
            if self.half:
                super().pipe_file(path, value[: len(value) // 2], mode=mode, **kwargs)
            raise Killed
        return super().pipe_file(path, value, mode=mode, **kwargs)

    def rm_file(self, path: str) -> None:
        if self._die():
            raise Killed
        super().rm_file(path)


@pytest.fixture
def mortal() -> Iterator[type[Mortal]]:
    fsspec.register_implementation("mortal", Mortal, clobber=True)
    yield Mortal
    Mortal.store.clear()
    Mortal.lives = None


@pytest.mark.parametrize("half", [False, True])
def test_it_may_die_at_every_single_change(mortal: type[Mortal], make_episode: Make, half: bool) -> None:
    mortal.half, died, lives = half, True, 0
    while died:
        mortal.lives = None
        journal = Journal(f"mortal://{uuid4().hex}")
        expected = fill(journal, make_episode, {"a": 3, "b": 2})
        reader = journal.reader()
        found = ids(segment.episodes) if (segment := reader.poll_segment()) else []
        mortal.lives, died = lives, False
        try:
            journal.compact()
        except Killed:
            died = True
        mortal.lives = None
        assert found + ids(reader.poll()) == ids(journal.reader().poll()) == expected
        assert journal.episode_ids() == set(expected)
        assert journal.writer("a").append([make_episode(90)]) == "a-00000003.parquet"
        journal.compact()
        assert names(journal) == ["a-00000000_00000003.parquet", "b-00000000_00000001.parquet"]
        assert ids(journal.reader().poll()) == [*expected, "e90"]
        lives += 1
    assert lives == 2 + 5 + 1  # two files made, five deleted, and once nothing happened


def test_readers_beside_writers_and_merges_that_are_killed_get_each_episode_once(
    tmp_path: Path, make_episode: Make, run_and_kill: Callable[..., list[str]]
) -> None:
    (tmp_path / "episode").write_bytes(pickle.dumps(make_episode(0)))
    journal = Journal(tmp_path / "journal")
    reader, found = journal.reader(), list[str]()
    stop = threading.Event()
    beside: list[str] = []

    def follow() -> None:
        mine = Journal(tmp_path / "journal").reader()
        while not stop.is_set():
            beside.extend(ids(mine.poll()))
        beside.extend(ids(mine.poll()))

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        for lines, after in ((5, 0.001), (9, 0.01), (8, 0.06)):
            arguments = (str(tmp_path / "journal"), str(tmp_path / "episode"))
            confirmed = run_and_kill(COMPACT_FOREVER, *arguments, lines=lines, after=after)
            found += ids(reader.poll())
            assert len(found) >= int(confirmed[-1])
    finally:
        stop.set()
        thread.join(60)
    assert found == beside == [str(number) for number in range(len(found))]
    assert reader.damaged == []
    journal.compact()
    assert ids(journal.reader().poll()) == found
