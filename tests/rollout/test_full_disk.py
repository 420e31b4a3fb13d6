"""A disk that is full for a while costs only the while: what is on it stays whole, and the rest is written later.

No file may grow beyond a size meanwhile, which fails as a full disk does: in the middle of a write.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hintloop.replay.journal import Journal
from hintloop.replay.weights import WeightStore
from hintloop.rollout.evaluate import Evaluation
from hintloop.rollout.failures import Part
from hintloop.rollout.offload import persist
from hintloop.rollout.status import Board, StatusFile, append_line
from hintloop.rollout.vllm_extension import Fetcher, fetch
from hintloop.rollout.weights import next_version

from ..learner.factory import make_groups
from .full_disk import full_disk
from .world import until

ROOM, MUCH = 16 << 10, 64 << 10
"""Bytes that fit into a file while the disk is full, and more than that."""
DEADLINE_S = 60.0


def publish(folder: Path) -> WeightStore:
    """A version whose file is large, and its manifest too."""
    made = folder / "made"
    made.mkdir()
    (made / "weights.txt").write_text("w" * MUCH)
    store = WeightStore(folder / "weights")
    store.publish(0, made, metadata={"note": "n" * MUCH})
    return store


def test_a_group_is_journalled_when_there_is_room_for_it_and_no_part_of_it_is_seen_before(
    tmp_path: Path,
) -> None:
    groups, heard = make_groups(3, 2), list[OSError]()
    journal = Journal(tmp_path)
    writer, reader = journal.writer("rollout"), journal.reader()
    first = tmp_path / writer.append(groups[0])
    assert reader.poll() == groups[0]

    async def run() -> None:
        appending = persist(
            partial(writer.append, groups[1]),
            what="writing to the journal",
            patience_s=DEADLINE_S,
            on_failure=heard.append,
        )
        async with asyncio.timeout(DEADLINE_S):
            with full_disk(first.stat().st_size // 2):
                writing = asyncio.create_task(appending)
                await until(lambda: len(heard) >= 2 or writing.done())
                assert journal.segments() == [first.name]
                assert reader.poll() == []
            await writing

    asyncio.run(run())
    assert {type(error) for error in heard} == {OSError}
    writer.append(groups[2])
    assert reader.poll() == [*groups[1], *groups[2]]
    assert reader.damaged == []
    assert sorted(path.name for path in tmp_path.iterdir()) == journal.segments()


@pytest.mark.parametrize("whole", [True, False])
def test_weights_are_fetched_when_there_is_room_for_them(tmp_path: Path, whole: bool) -> None:
    store, heard = publish(tmp_path), list[OSError]()

    async def run() -> Path:
        following = next_version(
            store,
            tmp_path / "cache",
            after=-1,
            poll_s=0.01,
            fetch_s=DEADLINE_S,
            whole=whole,
            on_failure=heard.append,
        )
        async with asyncio.timeout(DEADLINE_S):
            with full_disk(ROOM):
                fetching = asyncio.create_task(following)
                await until(lambda: len(heard) >= 2 or fetching.done())
            return (await fetching).folder

    folder = asyncio.run(run())
    assert {type(error) for error in heard} == {OSError}
    assert (folder / "manifest.json").read_bytes() == store.manifest(0).to_json()
    assert {path.name for path in folder.iterdir()} == {"manifest.json", *(["weights.txt"] if whole else [])}
    assert [path.name for path in folder.parent.iterdir()] == ["v000000"]


def test_a_server_that_could_not_fetch_says_why_and_can_be_asked_again(tmp_path: Path) -> None:
    uri = publish(tmp_path).uri
    fetcher = Fetcher(lambda *version: fetch(*version, cache=tmp_path / "cache"))

    async def ask() -> dict[str, Any]:
        fetcher.start(uri, 0)
        async with asyncio.timeout(DEADLINE_S):
            await until(lambda: fetcher.status()["state"] != "fetching")
        return fetcher.status()

    with full_disk(ROOM):
        failed = asyncio.run(ask())
    assert failed["state"] == "failed"
    assert "File too large" in failed["error"]
    done = asyncio.run(ask())
    assert done["state"] == "ready"
    folder = Path(done["folder"])
    assert (folder / "weights.txt").stat().st_size == MUCH
    assert {path.name for path in folder.parent.iterdir()} == {".lock", "v000000"}


def test_the_status_stays_as_it_was_and_is_written_again(tmp_path: Path) -> None:
    path, board = tmp_path / "rollout.json", Board()
    status = StatusFile(board, path)
    board.say("playing")
    status.write()
    board.details["note"] = lambda: "n" * MUCH
    with full_disk(ROOM):
        board.say("playing on a full disk")
        status.write()
    assert json.loads(path.read_text())["state"] == "playing"
    status.write()
    assert json.loads(path.read_text())["state"] == "playing on a full disk"
    assert [each.name for each in tmp_path.iterdir()] == ["rollout.json"]


def test_a_line_for_which_there_is_no_room_leaves_no_part_of_it(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    append_line(path, {"fits": "a" * (ROOM - 100)})
    with full_disk(ROOM), pytest.raises(OSError, match=r"File too large|No space left"):
        append_line(path, {"does not": "b" * 200})
    append_line(path, {"later": 1})
    assert [list(json.loads(line)) for line in path.read_text().splitlines()] == [["fits"], ["later"]]


def test_the_row_of_an_evaluation_is_kept_until_it_can_be_written(
    make_player: Callable[..., Any], world: Any, tmp_path: Path
) -> None:
    heard: list[str] = []
    evaluation = Evaluation(
        tmp_path,
        {"heldfn": ["bugfix/t0"]},
        (0.0,),
        400,
        4,
        0,
        on_lost=lambda part, reason: heard.append(f"{part}: {reason}"),
    )
    before = json.dumps({"label": "before", "version": 0, "split": "heldfn", "temperature": 0.0})
    evaluation.rows_file.write_text(before.ljust(ROOM - 1) + "\n")

    async def run() -> list[dict[str, Any]]:
        async with asyncio.timeout(DEADLINE_S):
            with full_disk(ROOM):
                running = evaluation.run("after", 3, 1, make_player(), world().session, lambda said: None)
                measuring = asyncio.create_task(running)
                await until(lambda: len(heard) >= 2 or measuring.done())
            return await measuring

    (row,) = asyncio.run(run())
    assert [each["label"] for each in evaluation.rows()] == ["before", "after"]
    assert evaluation.rows()[-1] == row
    assert (row["label"], row["version"], row["n"], row["lost"]) == ("after", 3, 1, 0)
    assert all(each.startswith(Part.STORAGE) for each in heard)
