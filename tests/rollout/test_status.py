"""The status file: always whole, and says who waits for whom."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from pathlib import Path

from hintloop.rollout.status import MAX_REASONS, Board, StatusFile, write_json


def test_the_file_is_written_again_and_again_until_cancelled(tmp_path: Path) -> None:
    board = Board()
    path = tmp_path / "status" / "rollout.json"

    async def run() -> None:
        heart = asyncio.create_task(StatusFile(board, path).beat())
        await asyncio.sleep(0.05)
        heart.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await heart

    board.say("playing episodes")
    asyncio.run(run())
    assert json.loads(path.read_text())["state"] == "playing episodes"
    assert [each.name for each in path.parent.iterdir()] == ["rollout.json"]


def test_the_same_state_keeps_its_beginning() -> None:
    board = Board()
    board.say("playing episodes")
    since = board.since
    board.say("playing episodes")
    assert board.since == since


def test_it_says_when_all_episodes_wait_for_the_environment() -> None:
    board = Board(state="playing episodes", in_flight=3, waiting_for_environment=3)
    assert board.snapshot()["state"] == "playing episodes; all of them wait for the environment server"
    board.waiting_for_environment = 2
    board.evaluation = "evaluating x: 1 of 5"
    assert board.snapshot()["state"] == "playing episodes; evaluating x: 1 of 5"


def test_reasons_without_end_do_not_make_the_file_grow_without_end() -> None:
    board = Board()
    for number in range(10 * MAX_REASONS):
        board.lose(f"reason {number}")
    assert len(board.lost) <= MAX_REASONS + 1
    assert board.lost["other"] == 9 * MAX_REASONS
    assert isinstance(board.lost, Counter)


def test_details_are_read_at_each_beat(tmp_path: Path) -> None:
    board = Board(details={"version": lambda: 7})
    write_json(tmp_path / "s.json", board.snapshot())
    assert json.loads((tmp_path / "s.json").read_text())["version"] == 7
