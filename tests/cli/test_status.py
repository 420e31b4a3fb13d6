"""``hintloop status``: who waits for whom, who is stuck, and what failed."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from hintloop.cli.main import run_command
from hintloop.cli.runfolder import RunFolder
from hintloop.cli.status import SILENT_S, look
from hintloop.rollout.asking import PairCounts
from hintloop.rollout.failures import Part
from hintloop.rollout.status import Board, write_json
from hintloop.rollout.watchdog import NOTICE_S, Watchdog


def write(run: RunFolder, **changes: Any) -> None:
    """What the rollout side writes, by the code that writes it."""
    board, dog = Board(state="playing episodes"), Watchdog()
    board.lose_to(Part.ENGINE, "engine")
    board.fail(Part.STORAGE)
    board.groups_resampled = 3
    board.details |= {
        "waits": dog.snapshot,
        "version": lambda: 2,
        "loop": lambda: {"lag_p50_ms": 0.1, "lag_p99_ms": 2.0, "lag_max_ms": 9.0},
        "env_servers": lambda: [{"url": "ws://one", "in_use": 4, "state": "down", "reason": "refused"}],
        "servers": lambda: [
            {"url": "http://two", "version": 2, "in_flight": 5, "state": "ready", "reason": ""}
        ],
    }
    with dog.task("episode", "g000001-2") as pulse, dog.task("manager") as manager:
        pulse.beat("engine", 300.0)
        pulse.since -= 2 * NOTICE_S
        manager.beat("a free place among the episodes in flight")
        snapshot = board.snapshot()
    write_json(run.path / "status" / "rollout.json", {**snapshot, **changes})
    write_json(
        run.path / "status" / "learner.json",
        {"state": "training step 5", "since": time.time(), "updated": time.time(), "version": 4},
    )


def state(run: RunFolder, part: str) -> str:
    found: str = next(row["state"] for row in look(run)["parts"] if row["part"] == part)
    return found


def test_it_says_who_waits_for_whom_and_for_how_long(run: RunFolder) -> None:
    write(run)
    found = look(run)
    first = found["waits"][0]
    assert (first["who"], first["longest"], first["waits_for"]) == ("episode", "g000001-2", "engine")
    assert (first["limit_s"], first["stuck"], found["waits"][1]["stuck"]) == (300.0, True, False)
    assert first["for_s"] == pytest.approx(2 * NOTICE_S, abs=2.0)
    assert "; g000001-2 waits for engine for 9" in state(run, "rollout")
    assert state(run, "learner") == "training step 5"


def test_counts_tell_failures_by_part_versions_lag_and_lateness(run: RunFolder) -> None:
    write(run)
    counts = {row["what"]: row["count"] for row in look(run)["counts"]}
    assert counts["failures by part: engine"] == counts["failures by part: storage"] == 1
    assert counts["episodes lost: engine"] == 1
    assert counts["groups played anew for that"] == 3
    assert counts["versions behind the learner"] == 2
    assert counts["event loop lag_p99_ms"] == 2.0
    servers = [(row["kind"], row["url"], row["state"], row["in_use"]) for row in look(run)["servers"]]
    assert servers == [("engine", "http://two", "ready", 5), ("environment", "ws://one", "down", 4)]


def test_counts_tell_what_the_agent_did_wrong_and_what_came_of_it(run: RunFolder) -> None:
    counts = PairCounts(asked_turns=4, pairs=3, cost_usd=0.5)
    ledger = {"spent_usd": 0.75, "reserved_usd": 0.0, "left_usd": None}
    write(
        run,
        hint_sites=7,
        pairs=3,
        tool_errors={"file_not_found": 8},
        dropped_sites={"no call": 1},
        teachers={**counts.snapshot(), "ledger": ledger},
    )
    shown = {row["what"]: row["count"] for row in look(run)["counts"]}
    assert (shown["hint sites"], shown["preference pairs"]) == (7, 3)
    assert shown["tool errors: file_not_found"] == 8
    assert shown["hint sites dropped: no call"] == 1
    assert (shown["turns that teachers were asked about"], shown["pairs per US dollar"]) == (4, 6.0)
    assert shown["US dollars spent in the whole run"] == 0.75
    assert "US dollars left of the budget" not in shown


def test_a_blocked_event_loop_is_named_with_its_place(run: RunFolder) -> None:
    write(run, loop={"blocked_s": 12.0, "where": "slow.py:3 hash_all"})
    assert state(run, "rollout").endswith("; its event loop is blocked in slow.py:3 hash_all")


def test_a_part_that_fell_silent_is_told_from_one_that_has_ended(run: RunFolder) -> None:
    ago = time.time() - 2 * SILENT_S
    write(run, updated=ago, waits=[])
    assert state(run, "rollout") == "playing episodes; no word since"
    write(run, updated=ago, waits=[], state="finished")
    assert state(run, "rollout") == "finished"


def test_the_status_of_an_older_version_or_of_none_can_be_shown(run: RunFolder, empty_run: RunFolder) -> None:
    write_json(
        run.path / "status" / "rollout.json",
        {"state": "playing episodes", "since": time.time(), "updated": time.time()},
    )
    found = look(run)
    assert (found["waits"], found["servers"], found["counts"]) == ([], [], [])


def test_it_is_printed_as_tables_and_as_json(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    write(run)
    assert run_command(["status", str(run.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out).keys() == {"parts", "waits", "servers", "counts"}
    assert run_command(["status", str(run.path)]) == 0
    shown = capsys.readouterr().out
    for text in ("Who waits for whom", "Servers", "Since the rollout process started", "failures by part"):
        assert text in shown
