"""Servers with more to do than they can: late is not dead, and no turn is lost, repeated or left behind."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from hintloop.agent.engine import EngineError, Sample
from hintloop.rollout.engines.pool import Pool
from hintloop.rollout.engines.sim import SimEngine
from hintloop.rollout.engines.sim_plan import Fault

from .world import DEADLINE_S, NEVER_STOPS, QUICK, SLOW_MS, World, looked_at, planned, sample, until

FIRST_S = 4.0
"""A server that has much to do brings a piece twenty times as often."""
PATIENCE = replace(QUICK, turn=DEADLINE_S, first=FIRST_S, stall=2 * FIRST_S)
ONE_BY_ONE = planned(token_ms=SLOW_MS, max_requests=1)
LONG, SHORT = 1000, 40
"""Tokens: far more than can be sampled slowly while something else is done, and few."""


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def crowd(world: World, pool: Pool, count: int = 3) -> list[asyncio.Task[Sample]]:
    """One long turn, which a server is busy with, and turns that wait behind it, one of them too long already."""
    asked = [asyncio.create_task(sample(pool, LONG, session="0", temperature=1.0))]
    await world.under_way(1)
    for number in range(1, count):
        asked.append(asyncio.create_task(sample(pool, SHORT, session=str(number), temperature=1.0)))
    await until(lambda: pool.servers()[0]["state"] == "slow")
    return asked


async def checked(world: World, asked: list[asyncio.Task[Sample]]) -> None:
    whole = await asyncio.gather(*asked)
    for each in whole:
        world.check(each)
    assert [len(each.token_ids) for each in whole] == [LONG, *[SHORT] * (len(asked) - 1)]


def turns(engine: SimEngine) -> list[int]:
    """How many tokens each request of a turn brought; a probe brings one."""
    return sorted(entry["tokens"] for entry in engine.served if entry["tokens"] != 1)


def test_a_server_with_too_much_to_do_stays_and_its_queue_drains(world: World) -> None:
    async def run() -> None:
        with capture_logs() as logs:
            async with world.pool(ONE_BY_ONE, patience=PATIENCE) as pool:
                asked = await crowd(world, pool)
                (server,) = pool.servers()
                assert (server["version"], server["in_flight"]) == (0, 3)
                assert server["reason"].startswith("late with ")
                world.hurry()
                await checked(world, asked)
                assert pool.servers() == [{**server, "in_flight": 0, "state": "ready", "reason": ""}]
                assert (pool.stats()["moves"], pool.stats()["retries"]) == (0, 0)
            assert turns(world.engines[0]) == [SHORT, SHORT, LONG]  # each by its first request
        assert not [entry for entry in logs if entry["event"] == "engine_left"]

    asyncio.run(run())


def test_turns_that_wait_too_long_go_with_their_episodes_to_a_server_with_less_to_do(world: World) -> None:
    async def run() -> None:
        with capture_logs() as logs:
            async with world.pool(ONE_BY_ONE, NEVER_STOPS, patience=PATIENCE) as pool:
                busy, free = world.urls
                pool.remove(free)
                asked = await crowd(world, pool)
                pool.add(free)
                await asyncio.wait(asked[1:])
                assert not asked[0].done()
                places = {session: member.server.url for session, member in pool._homes.items()}
                assert places == {"0": busy, "1": free, "2": free}
                assert [server["in_flight"] for server in pool.servers()] == [1, 0]
                assert pool.stats()["moves"] == 2
                assert len((await sample(pool, SHORT, session="1")).token_ids) == SHORT
                assert pool._homes["1"].server.url == free
                world.hurry()
                await checked(world, asked)
                assert (pool.stats()["retries"], pool.stats()["continued_tokens"]) == (0, 0)
            assert [turns(engine) for engine in world.engines] == [[0, 0, LONG], [SHORT] * 3]
        assert not [entry for entry in logs if entry["event"] == "engine_left"]

    asyncio.run(run())


def test_a_turn_that_waits_at_a_busy_server_ends_with_its_deadline(world: World) -> None:
    async def run() -> None:
        patience = replace(PATIENCE, turn=2 * FIRST_S)
        with capture_logs() as logs:
            async with world.pool(ONE_BY_ONE, patience=patience) as pool:
                long = asyncio.create_task(sample(pool, LONG, session="0"))
                await world.under_way(1)
                with pytest.raises(EngineError, match=r"within 8 s; last: no server was there, or none got"):
                    await sample(pool, SHORT, session="1")
                await asyncio.wait([long])
                assert [(each["state"], each["in_flight"]) for each in pool.servers()] == [("ready", 0)]
                assert isinstance(long.exception(), EngineError)
        assert not [entry for entry in logs if entry["event"] == "engine_left"]

    asyncio.run(run())


def test_a_server_that_was_busy_and_then_hangs_for_all_is_dropped_by_those_that_wait(world: World) -> None:
    async def run() -> None:
        patience = replace(PATIENCE, stall=DEADLINE_S, load=1.0)
        with capture_logs() as logs:
            async with world.pool(ONE_BY_ONE, NEVER_STOPS, patience=patience) as pool:
                pool.remove(world.urls[1])
                first, *others = await crowd(world, pool)
                world.engines[0].plan = planned(token_ms=1e9)
                await until(lambda: pool.servers()[0]["state"] == "out")
                assert "nothing came for too long" in pool.servers()[0]["reason"]
                pool.add(world.urls[1])
                for each in await asyncio.gather(*others):
                    world.check(each)
                    assert len(each.token_ids) == SHORT
                assert not first.done()
                first.cancel()
        left = [entry["url"] for entry in logs if entry["event"] == "engine_left"]
        assert left == world.urls[:1]

    asyncio.run(run())


def test_a_late_request_leaves_a_busy_server_that_is_not_well(world: World) -> None:
    async def run() -> None:
        sick = Fault(kind="error", place="health", status=503)
        with capture_logs() as logs:
            async with world.pool(planned(sick, token_ms=SLOW_MS, max_requests=1), patience=PATIENCE) as pool:
                asked = [asyncio.create_task(sample(pool, LONG, session="0", temperature=1.0))]
                await world.under_way(1)
                asked.append(asyncio.create_task(sample(pool, SHORT, session="1", temperature=1.0)))
                await until(lambda: any(entry["event"] == "engine_left" for entry in logs))
                world.hurry()
                await checked(world, asked)
                assert (pool.stats()["moves"], pool.stats()["retries"]) == (0, 1)
        (left,) = [entry for entry in logs if entry["event"] == "engine_left"]
        assert "nothing came for too long" in left["reason"]

    asyncio.run(run())


def test_a_request_that_a_busy_server_lost_is_made_again(world: World) -> None:
    async def run() -> None:
        with capture_logs() as logs:
            async with world.pool(planned(Fault(kind="hang", skip=1)), patience=PATIENCE) as pool:
                lost = asyncio.create_task(sample(pool, SHORT, session="lost"))
                await until(lambda: not world.engines[0].faults.left())
                while not lost.done():
                    assert len((await sample(pool, SHORT)).token_ids) == SHORT
                assert (await lost).token_ids == world.greedy(SHORT)
                assert (pool.stats()["moves"], pool.stats()["retries"]) == (1, 0)
        assert not [entry for entry in logs if entry["event"] == "engine_left"]

    asyncio.run(run())


def test_only_as_many_leave_a_busy_server_as_is_good_for_both(world: World) -> None:
    async def run() -> None:
        async with world.pool(*[ONE_BY_ONE] * 2, patience=PATIENCE) as pool:
            pool.remove(world.urls[1])
            asked = [asyncio.create_task(sample(pool, LONG, session=str(number))) for number in range(9)]
            await until(lambda: pool._members[world.urls[0]].server.late == 8)
            pool.add(world.urls[1])
            await until(lambda: pool.stats()["moves"] >= 3)
            for _ in range(3):
                await looked_at(pool)
            assert [server["in_flight"] for server in pool.servers()] == [6, 3]
            assert pool.stats()["moves"] == 3
            for engine in world.engines:
                engine.plan = NEVER_STOPS.model_copy(update={"token_ms": 0})
            for each in await asyncio.gather(*asked):
                assert each.token_ids == world.greedy(LONG)

    asyncio.run(run())
