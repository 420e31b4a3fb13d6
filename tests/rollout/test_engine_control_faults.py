"""Servers whose control calls are late, fail, get lost or never end, or that start anew in the middle of one.

Each kind of fault at each call that brings a server to a version, while turns are under way.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from hintloop.agent.engine import Sample
from hintloop.rollout.engines.pool import Pool
from hintloop.rollout.engines.publish import Fetch, Way
from hintloop.rollout.engines.publish_adapter import Adapter
from hintloop.rollout.engines.publish_direct import Direct
from hintloop.rollout.engines.sim import SimEngine
from hintloop.rollout.engines.sim_plan import ANYWHERE, Fault, Kind, Place, Plan, load_plan
from hintloop.rollout.engines.sim_server import in_thread

from .world import DEADLINE_S, NEVER_STOPS, QUICK, SLOW_MS, World, all_ready, planned, sample, until

WAYS: dict[str, type[Way]] = {"fetch": Fetch, "adapter": Adapter, "direct": Direct}
BREAKS = Fault(kind="break_load")
NOT_PAUSED = Fault(kind="error", place="pause")
NOT_RESUMED = Fault(kind="error", place="resume")
PLACES: dict[str, dict[Place, Sequence[Fault]]] = {
    "fetch": {
        "weight_info": [],
        "hintloop_fetch": [],
        "hintloop_status": [],
        "pause": [],
        "hintloop_load": [],
        "update_weight_version": [],
        "resume": [],
        "generate": [],
        "is_paused": [NOT_RESUMED],
        "models": [NOT_RESUMED],
        "server_info": [NOT_RESUMED],
        "abort_requests": [BREAKS],
        "hintloop_quit": [BREAKS],
    },
    "adapter": {
        "models": [],
        "hintloop_fetch": [],
        "hintloop_status": [],
        "load_lora_adapter": [],
        "unload_lora_adapter": [],
    },
    "direct": {
        "hintloop_suits": [],
        "pause": [],
        "hintloop_end_in": [],
        "update_weight_version": [],
        "start_weight_update": [],
        "update_weights": [],
        "finish_weight_update": [],
        "resume": [],
        "get_world_size": [NOT_PAUSED],
        "shutdown_weight_transfer_engine": [NOT_PAUSED],
        "init_weight_transfer_engine": [NOT_PAUSED],
    },
}
"""Where each way calls a server that it brings to a version, and what must go wrong before it comes to that."""
ALONE: list[tuple[str, Place]] = [
    ("fetch", "hintloop_fetch"),
    ("fetch", "hintloop_status"),
    ("fetch", "pause"),
    ("fetch", "hintloop_load"),
    ("fetch", "update_weight_version"),
    ("fetch", "resume"),
    ("fetch", "generate"),
    ("adapter", "load_lora_adapter"),
    ("direct", "update_weights"),
]
LIES: list[tuple[str, Place]] = [
    ("fetch", "generate"),
    ("fetch", "weight_info"),
    ("fetch", "update_weight_version"),
    ("fetch", "hintloop_status"),
    ("adapter", "models"),
    ("adapter", "hintloop_fetch"),
    ("direct", "finish_weight_update"),
]
"""Where a server may tell a wrong version; the other places in each way are read by the same code."""
MANY = 10_000
TURNS = 4
PATIENCE = replace(QUICK, first=1.0, stall=1.0, control=1.0, load=1.0)
"""Where the machine is slow, servers may seem to hang that do not: nothing is different in the end."""


def plan_for(place: Place) -> Plan:
    """A fetch that is over at once is not asked about."""
    return planned(fetch_ms=100 if place == "hintloop_status" else 0)


async def turns(world: World, pool: Pool) -> list[asyncio.Task[Sample]]:
    """Turns that are under way."""
    for engine in world.engines:
        engine.plan = planned(token_ms=SLOW_MS)
    asked = [sample(pool, 100, session=str(number), temperature=1.0) for number in range(TURNS)]
    tasks = [asyncio.create_task(each) for each in asked]
    await world.under_way(TURNS)
    return tasks


async def end_well(world: World, asked: Sequence[asyncio.Task[Sample]]) -> None:
    world.hurry()
    for each in await asyncio.gather(*asked):
        world.check(each)
        assert len(each.token_ids) == 100


async def sampled_from(world: World, pool: Pool, version: int) -> None:
    """New turns are of this version alone, on all servers that may sample."""
    names = [f"new{number}" for number in range(TURNS)]
    for each in await asyncio.gather(*(sample(pool, 12, session=name) for name in names)):
        assert each.token_ids == world.greedy(12, version)
        assert set(each.policy_versions) == {version}
    for name in names:
        await pool.end_session(name)


@contextlib.asynccontextmanager
async def started_again(world: World) -> AsyncIterator[None]:
    """Meanwhile somebody starts servers again that ended."""

    async def watch() -> None:
        while True:
            for engine in world.engines:
                engine._up_at = 0.0
            await asyncio.sleep(0.05)

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()


@pytest.mark.parametrize(
    ("way", "place"), [(way, place) for way, places in PLACES.items() for place in places]
)
def test_a_server_with_a_lasting_fault_costs_nothing_and_has_the_version_when_it_is_over(
    tmp_path: Path, way: str, place: Place
) -> None:
    async def run(world: World) -> None:
        plans = [plan_for(place)] * 2
        async with world.pool(*plans, patience=PATIENCE) as pool, started_again(world):
            faults = world.engines[0].faults
            for version, kind in enumerate(ANYWHERE, 1):
                await all_ready(pool, version - 1)
                asked = await turns(world, pool)
                faults.add([*PLACES[way][place], Fault(kind=kind, place=place, seconds=0.1, times=MANY)])
                world.publish(version)
                await pool.load_weights(world.fetched(version), version)
                await end_well(world, asked)
                await sampled_from(world, pool, version)
                await until(lambda: faults.left()[-1]["times"] < MANY)
                faults._left.clear()
                await all_ready(pool, version)
                await sampled_from(world, pool, version)

    asyncio.run(run(World(tmp_path, way=WAYS[way])))


@pytest.mark.parametrize(("way", "place"), ALONE)
def test_a_fault_of_the_only_server_delays_a_version_and_loses_nothing(
    tmp_path: Path, way: str, place: Place
) -> None:
    async def run(world: World) -> None:
        async with world.pool(plan_for(place), patience=PATIENCE) as pool, started_again(world):
            faults = world.engines[0].faults
            for version, kind in enumerate(ANYWHERE, 1):
                asked = await turns(world, pool)
                faults.add([Fault(kind=kind, place=place, seconds=0.1)])
                world.publish(version)
                await pool.load_weights(world.fetched(version), version)
                await end_well(world, asked)
                await sampled_from(world, pool, version)
                assert not faults.left()

    asyncio.run(run(World(tmp_path, way=WAYS[way])))


@pytest.mark.parametrize(("way", "place"), LIES)
def test_a_server_that_tells_a_wrong_version_is_left_until_it_tells_the_right_one(
    tmp_path: Path, way: str, place: Place
) -> None:
    async def run(world: World) -> None:
        # one that cannot be seen to have the version goes on with its old one until the others have waited enough
        patience = replace(PATIENCE, lag=0.5)
        async with world.pool(*[plan_for(place)] * 2, patience=patience) as pool:
            await all_ready(pool, 0)
            asked = await turns(world, pool)
            faults = world.engines[0].faults
            faults.add([Fault(kind="mislabel", place=place, times=MANY)])
            world.publish(1)
            await pool.load_weights(world.fetched(1), 1)
            await end_well(world, asked)
            await sampled_from(world, pool, 1)
            while pool.servers()[0]["state"] != "out":  # as long as it is in, it is the first to be asked
                found = await sample(pool, 12)
                assert (found.token_ids, set(found.policy_versions)) == (world.greedy(12, 1), {1})
            assert faults.left()[0]["times"] < MANY
            faults._left.clear()
            await all_ready(pool, 1)
            await sampled_from(world, pool, 1)

    asyncio.run(run(World(tmp_path, way=WAYS[way])))


def test_a_server_whose_model_is_lost_ends_though_its_requests_cannot_be_aborted(tmp_path: Path) -> None:
    async def run(world: World) -> None:
        async with world.pool(NEVER_STOPS, patience=PATIENCE) as pool:
            engine = world.engines[0]
            engine.faults.add([BREAKS, Fault(kind="error", place="abort_requests", times=MANY)])
            world.publish(1)
            loading = asyncio.create_task(pool.load_weights(world.fetched(1), 1))
            await until(lambda: engine.restarts == 1)
            engine._up_at = 0.0  # somebody starts it again
            await loading
            await sampled_from(world, pool, 1)

    asyncio.run(run(World(tmp_path)))


@pytest.mark.parametrize("kind", ANYWHERE)
def test_a_fault_strikes_the_call_that_it_names_and_no_other(tmp_path: Path, kind: Kind) -> None:
    seconds = 0.1 if kind == "slow" else DEADLINE_S  # one that starts anew is not up again in this test
    strikes = Fault(kind=kind, place="health", status=503, seconds=seconds)
    faults = (strikes, Fault(kind=kind, place="hintloop_status"))
    engine = SimEngine(NEVER_STOPS.model_copy(update={"fault": faults}), cache=tmp_path)

    def say(client: httpx.Client, path: str, method: str = "", *, timeout: float = DEADLINE_S) -> str:
        try:
            if method:
                said = client.post(path, json={"method": method, "kwargs": {"delay": 0}})
            else:
                said = client.get(path, timeout=timeout)
            return str(said.status_code)
        except httpx.TransportError as error:
            return type(error).__name__

    with in_thread(engine) as url, httpx.Client(base_url=url, timeout=DEADLINE_S) as client:
        assert say(client, "/v1/models") == "200"
        assert say(client, "/collective_rpc", "hintloop_end_in") == "200"
        assert len(engine.faults.left()) == 2
        found = say(client, "/health", timeout=2.0 if kind == "hang" else DEADLINE_S)
        assert found == {"slow": "200", "error": "503", "hang": "ReadTimeout"}.get(
            kind, "RemoteProtocolError"
        )
        assert [fault["place"] for fault in engine.faults.left()] == ["hintloop_status"]
        assert engine.restarts == (kind == "restart")
        if kind == "restart":
            assert say(client, "/health") == "503"
        elif kind != "hang":
            assert say(client, "/health") == "200"


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ('kind = "mislabel"\nplace = "pause"', "mislabel strikes generate, .* alone, not pause"),
        ('kind = "stale_load"\nplace = "hintloop_load"', "stale_load strikes load alone"),
        ('kind = "drop"\nplace = "resume"\ntokens = 3', "resume has no tokens after which drop could strike"),
        ('kind = "drop"\nplace = "hintloop_dance"', r"fault\.0\.place"),
    ],
)
def test_a_fault_at_a_place_that_it_cannot_strike_is_refused(
    tmp_path: Path, lines: str, problem: str
) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(f"[[fault]]\n{lines}\n")
    with pytest.raises(ValueError, match=problem):
        load_plan(path)
