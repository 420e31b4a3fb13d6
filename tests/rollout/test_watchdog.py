"""Nothing hangs in silence: who stands still is named, and so is what holds up the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from typing import Any

import pytest
from structlog.testing import capture_logs

from hintloop.rollout import watchdog
from hintloop.rollout.failures import Overdue, Part
from hintloop.rollout.loop_lag import LoopLag
from hintloop.rollout.watchdog import MAX_NAMES, MAX_ROWS, NOBODY, NOTICE_S, Watchdog

NOTICE = 0.05


def test_a_task_that_stands_still_is_named_in_the_log_with_whom_it_waits_for() -> None:
    async def run() -> None:
        dog = Watchdog(NOTICE)
        looking = asyncio.create_task(dog.run())
        with dog.task("episode", "g1-0") as pulse, dog.task("manager"):
            async with pulse.waiting("engine", Part.ENGINE, 30.0):
                await asyncio.sleep(8 * NOTICE)
        looking.cancel()

    with capture_logs() as logs:
        asyncio.run(run())
    named = [log for log in logs if log["event"] == "stands_still" and log["who"] == "episode"]
    assert {(log["longest"], log["waits_for"], log["limit_s"]) for log in named} == {("g1-0", "engine", 30.0)}
    assert all(log["for_s"] >= NOTICE and log["names"] == ["g1-0"] for log in named)


class Clock:
    """A time that passes only when it is told to."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(watchdog, "time", clock)
    return clock


def named_at(dog: Watchdog, clock: Clock, seconds: int) -> list[tuple[int, list[str]]]:
    """Who is named when, while nobody moves."""
    found = []
    for second in range(seconds):
        clock.now += 1.0
        with capture_logs() as logs:
            dog.look()
        found += [(second + 1, log["names"]) for log in logs if log["event"] == "stands_still"]
    return found


def test_a_task_is_named_again_only_when_it_has_stood_still_twice_as_long(clock: Clock) -> None:
    dog = Watchdog(45.0)
    with dog.task("episode", "a") as pulse:
        assert named_at(dog, clock, 200) == [(45, ["a"]), (90, ["a"]), (180, ["a"])]
        pulse.beat()
        assert named_at(dog, clock, 50) == [(45, ["a"])]


def test_a_task_is_named_in_time_whoever_else_waits_for_the_same(clock: Clock) -> None:
    dog = Watchdog(45.0)
    with dog.task("episode", "a") as a, dog.task("episode", "b") as b:
        a.beat("engine")
        clock.now += 130.0
        b.beat("engine")
        assert named_at(dog, clock, 20) == [(1, ["a"])]
        assert named_at(dog, clock, 30) == [(25, ["b"])]
        a.beat()
        assert named_at(dog, clock, 50) == [(40, ["b"]), (45, ["a"])]


def test_one_line_names_few_of_many(clock: Clock) -> None:
    dog = Watchdog(45.0)
    with contextlib.ExitStack() as stack, capture_logs() as logs:
        for number in range(128):
            stack.enter_context(dog.task("episode", f"e{number}"))
        clock.now += 50.0
        dog.look()
    (log,) = logs
    assert (log["count"], len(log["names"])) == (128, MAX_NAMES)


def test_it_says_when_a_task_moves_again() -> None:
    dog = Watchdog(NOTICE)
    with capture_logs() as logs, dog.task("manager") as pulse:
        pulse.beat("the learner's next version", 600.0)
        pulse.since -= 2 * NOTICE
        assert [wait.on for wait in dog.look()] == ["the learner's next version"]
        pulse.beat()
        assert dog.look() == []
    assert [log["event"] for log in logs] == ["stands_still", "moves_again"]


def test_by_default_everything_is_named_within_a_minute() -> None:
    assert NOTICE_S * (1 + 1 / 4) < 60.0


def test_tasks_that_wait_for_the_same_are_one_row_and_the_longest_comes_first() -> None:
    dog = Watchdog()
    with dog.task("episode", "a") as a, dog.task("episode", "b") as b, dog.task("writer") as writer:
        for pulse, on, ago in ((a, "engine", 9.0), (b, "engine", 5.0), (writer, "journal", 7.0)):
            pulse.beat(on, 60.0)
            pulse.since -= ago
        rows = dog.snapshot()
        assert json.loads(json.dumps(rows)) == rows
        assert [(row["who"], row["count"], row["longest"], row["waits_for"]) for row in rows] == [
            ("episode", 2, "a", "engine"),
            ("writer", 1, "writer", "journal"),
        ]
        assert rows[0]["for_s"] == pytest.approx(9.0, abs=0.5)
        assert not rows[0]["stuck"]
        a.since -= NOTICE_S
        assert dog.snapshot()[0]["stuck"]
    assert dog.snapshot() == []


def test_rows_do_not_grow_without_end() -> None:
    dog = Watchdog()
    with contextlib.ExitStack() as stack:
        for number in range(3 * MAX_ROWS):
            stack.enter_context(dog.task(f"kind {number}"))
        assert len(dog.snapshot()) == MAX_ROWS


def test_a_wait_ends_at_its_deadline_with_the_part_that_is_to_blame() -> None:
    async def run() -> None:
        with Watchdog().task("episode", "g1-0") as pulse:
            async with pulse.waiting("engine", Part.ENGINE, 0.02):
                await asyncio.sleep(30)

    with pytest.raises(Overdue, match=r"g1-0: no answer from engine within 0.02 s") as overdue:
        asyncio.run(run())
    assert overdue.value.part is Part.ENGINE


def test_waits_within_waits_come_back_to_the_outer_one() -> None:
    async def run() -> list[str]:
        seen = []
        with Watchdog().task("episode") as pulse:
            async with pulse.waiting("outer", Part.TEACHER):
                async with pulse.waiting("inner", Part.ENGINE):
                    seen.append(pulse.on)
                seen.append(pulse.on)
            seen.append(pulse.on)
        return seen

    assert asyncio.run(run()) == ["inner", "outer", NOBODY]


def test_waits_side_by_side_end_in_any_order() -> None:
    async def run() -> list[str]:
        seen = []
        with Watchdog().task("episode") as pulse:
            first = pulse.waiting("engine", Part.ENGINE, 30.0)
            second = pulse.waiting("environment server", Part.ENVIRONMENT)
            await first.__aenter__()
            await second.__aenter__()
            seen.append(pulse.on)
            await first.__aexit__(None, None, None)
            seen.append(pulse.on)
            assert pulse.limit_s is None
            await second.__aexit__(None, None, None)
            seen.append(pulse.on)
        return seen

    assert asyncio.run(run()) == ["environment server", "environment server", NOBODY]


def test_a_timeout_of_somebody_else_passes_through() -> None:
    async def run() -> None:
        with Watchdog().task("episode") as pulse:
            async with pulse.waiting("engine", Part.ENGINE, 30.0):
                raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        asyncio.run(run())


def hold_up(seconds: float) -> None:
    time.sleep(seconds)


def test_what_blocks_the_event_loop_is_named_while_it_does() -> None:
    told: list[dict[str, Any]] = []
    heard = threading.Event()

    def on_blocked(loop: dict[str, Any]) -> None:
        told.append(loop)
        heard.set()

    async def run() -> dict[str, Any]:
        lag = LoopLag(blocked_s=0.2)
        measuring = asyncio.create_task(lag.run())
        await asyncio.sleep(0.1)
        lag.watch(on_blocked)
        hold_up(0.8)
        named_meanwhile = heard.is_set()
        await asyncio.sleep(0.1)
        measuring.cancel()
        lag.stop()
        assert named_meanwhile
        return lag.snapshot()

    with capture_logs() as logs:
        lag = asyncio.run(run())
    assert "hold_up" in told[0]["where"]
    assert told[0]["blocked_s"] >= 0.2
    assert {log["event"] for log in logs} == {"event_loop_blocked"}
    assert lag["lag_max_ms"] > 500
    assert lag["lag_p50_ms"] <= lag["lag_p99_ms"] <= lag["lag_max_ms"]
