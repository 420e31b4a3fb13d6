"""Servers that are slow, break, lie or die: nothing hangs, and nothing is lost, repeated or recorded wrongly."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from hintloop.agent.engine import EngineError
from hintloop.rollout.engines.pool import Pool
from hintloop.rollout.engines.publish import Fetch, Way
from hintloop.rollout.engines.publish_adapter import Adapter
from hintloop.rollout.engines.publish_direct import Direct
from hintloop.rollout.engines.sim_plan import Fault, load_plan
from hintloop.rollout.engines.vllm import Patience
from hintloop.rollout.vllm_extension import CACHE
from hintloop.rollout.weights import WeightsRefused

from .world import (
    DEADLINE_S,
    IMPATIENT,
    NEVER_STOPS,
    PROMPT,
    QUICK,
    SLOW_MS,
    STOP,
    World,
    all_ready,
    looked_at,
    planned,
    sample,
    until,
)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.mark.parametrize(
    ("way", "servers", "fault"),
    [
        (Fetch, 1, Fault(kind="slow", seconds=0.2, skip=2)),
        (Fetch, 1, Fault(kind="error", times=2, skip=2)),
        (Fetch, 1, Fault(kind="error", status=503, skip=2)),
        (Fetch, 1, Fault(kind="drop", skip=2)),
        (Fetch, 1, Fault(kind="drop", tokens=10, skip=2)),
        (Fetch, 2, Fault(kind="drop", tokens=39, times=3, skip=2)),
        (Fetch, 1, Fault(kind="hang", skip=2)),
        (Fetch, 2, Fault(kind="hang", tokens=10, skip=2)),
        (Fetch, 1, Fault(kind="mislabel", skip=2)),
        (Fetch, 2, Fault(kind="restart", tokens=10, seconds=0.2, skip=2)),
        # A broken answer counts without a look at the server, and one that starts anew does not know the adapter.
        (Adapter, 1, Fault(kind="drop", tokens=10, skip=3)),
        (Adapter, 2, Fault(kind="hang", tokens=10, skip=3)),
        (Adapter, 1, Fault(kind="restart", tokens=10, seconds=0.2, skip=3)),
        # One that starts anew needs another sender; all else is as with ``Fetch``.
        (Direct, 1, Fault(kind="restart", tokens=10, seconds=0.2, skip=2)),
    ],
    ids=lambda each: (
        f"{each.kind}-{each.tokens}"
        if isinstance(each, Fault)
        else each.__name__.lower()
        if isinstance(each, type)
        else str(each)
    ),
)
def test_a_fault_in_the_middle_of_a_turn_changes_nothing_about_it(
    tmp_path: Path, way: type[Way], servers: int, fault: Fault
) -> None:
    async def run(world: World) -> None:
        plans = [planned(fault), *[NEVER_STOPS] * (servers - 1)]
        patience = IMPATIENT if fault.kind == "hang" else QUICK
        async with world.pool(*plans, patience=patience) as pool:
            for number in range(3 * servers):
                found = await sample(pool, 40, session=str(number))
                assert found.token_ids == world.greedy(40)
                assert found.finish_reason == "length"
                assert set(found.policy_versions) == {0}
                world.check(found)
            assert pool.stats()["sampled_tokens"] == 40 * 3 * servers
            if fault.kind != "slow":
                assert pool.stats()["retries"] >= 1

    asyncio.run(run(World(tmp_path, way=way)))


def test_what_a_broken_stream_brought_is_kept_and_gone_on_from(world: World) -> None:
    async def run() -> None:
        fault = Fault(kind="drop", tokens=100, skip=1)
        async with world.pool(planned(fault, token_ms=SLOW_MS), NEVER_STOPS) as pool:
            await all_ready(pool, 0)
            broken = asyncio.create_task(sample(pool, 120, session="broken", temperature=1.0))
            await world.under_way(1)
            for _ in range(2):  # one of the looks begins after the first tokens have come here
                await looked_at(pool)
            world.hurry()
            whole = [sample(pool, 120, session=str(number), temperature=1.0) for number in range(2)]
            for each in await asyncio.gather(broken, *whole):
                world.check(each)
                assert len(each.token_ids) == 120
            assert pool.stats()["continued_tokens"] == 100
            prompts = sorted(entry["prompt"] for engine in world.engines for entry in engine.served)
            assert prompts[-1] == len(PROMPT) + 100

    asyncio.run(run())


def test_tokens_that_nobody_vouches_for_are_sampled_again(world: World) -> None:
    """Without a look at the server since the first token, it might have been started again before."""

    async def run() -> None:
        patience = replace(QUICK, poll=30.0)
        async with world.pool(planned(Fault(kind="drop", tokens=20, skip=1)), patience=patience) as pool:
            assert (await sample(pool, 40)).token_ids == world.greedy(40)
            assert pool.stats()["continued_tokens"] == 0

    asyncio.run(run())


def test_a_request_that_spans_an_update_carries_both_versions(world: World) -> None:
    async def run() -> None:
        async with world.pool(planned(token_ms=SLOW_MS)) as pool:
            world.publish(1)
            asked = [
                asyncio.create_task(sample(pool, 150, session=str(i), temperature=1.0)) for i in range(6)
            ]
            await world.under_way(6)
            await pool.load_weights(world.fetched(1), 1)
            world.hurry()
            for each in await asyncio.gather(*asked):
                world.check(each)
                assert len(each.token_ids) == 150
                assert list(each.policy_versions) == sorted(each.policy_versions)
                assert set(each.policy_versions) == {0, 1}
            assert pool.stats()["retries"] == 0

    asyncio.run(run())


def test_servers_change_one_by_one_and_generation_goes_on_elsewhere(world: World) -> None:
    async def run() -> None:
        async with world.pool(*[planned(load_ms=300)] * 3) as pool:
            await all_ready(pool, 0)
            most, answered = 0, 0

            async def watch() -> None:
                nonlocal most
                while True:
                    most = max(most, sum(engine.paused for engine in world.engines))
                    await asyncio.sleep(0.001)

            watching = asyncio.create_task(watch())
            for version in (1, 2):
                world.publish(version)
                loading = asyncio.create_task(pool.load_weights(world.fetched(version), version))
                while not loading.done():
                    world.check(await sample(pool, 8, temperature=1.0, session="brief"))
                    await pool.end_session("brief")
                    answered += any(engine.paused for engine in world.engines)
                await loading
                await all_ready(pool, version)
            watching.cancel()
            assert most == 1
            assert answered >= 1

    asyncio.run(run())


@pytest.mark.parametrize("way", [Fetch, Adapter])
def test_a_version_that_arrives_damaged_is_fetched_again(tmp_path: Path, way: type[Way]) -> None:
    async def run(world: World) -> None:
        async with world.pool(planned(Fault(kind="corrupt", skip=1)), NEVER_STOPS) as pool:
            await all_ready(pool, 0)
            world.publish(1)
            await pool.load_weights(world.fetched(1), 1)
            await all_ready(pool, 1)
            assert not world.engines[0].faults.left()
            found = await sample(pool, 20)
            assert found.token_ids == world.greedy(20, version=1)

    asyncio.run(run(World(tmp_path, way=way)))


def test_a_version_that_nobody_can_fetch_leaves_the_servers_as_they_are(world: World) -> None:
    async def run() -> None:
        async with world.pool(planned(Fault(kind="corrupt", skip=1, times=0))) as pool:
            world.publish(1)
            loading = asyncio.create_task(pool.load_weights(world.fetched(1), 1))
            await until(lambda: "DigestMismatch" in pool.servers()[0]["reason"])
            assert not loading.done()
            assert set((await sample(pool, 20)).policy_versions) == {0}
            loading.cancel()

    asyncio.run(run())


@pytest.mark.parametrize("kind", ["refuse_load", "stale_load", "break_load"])
def test_a_server_whose_load_fails_is_out_until_it_has_the_newest_version(world: World, kind: Any) -> None:
    async def run() -> None:
        plans = [planned(*faults, token_ms=SLOW_MS) for faults in ([Fault(kind=kind, skip=1)], [])]
        async with world.pool(*plans) as pool:
            await all_ready(pool, 0)
            world.publish(1)
            asked = [
                asyncio.create_task(sample(pool, 150, session=str(i), temperature=1.0)) for i in range(6)
            ]
            await world.under_way(6)
            await pool.load_weights(world.fetched(1), 1)
            if kind == "break_load":  # its process has ended; somebody starts it again
                await until(lambda: world.engines[0].restarts == 1)
            world.hurry()
            for each in await asyncio.gather(*asked):
                world.check(each)
                assert len(each.token_ids) == 150
            if kind == "break_load":
                world.engines[0]._up_at = 0.0
            await all_ready(pool, 1)
            many = await asyncio.gather(
                *(sample(pool, 20, session=f"new{i}", temperature=1.0) for i in range(6))
            )
            for each in many:
                world.check(each)
                assert set(each.policy_versions) == {1}

    asyncio.run(run())


def test_a_version_that_no_server_reproduces_ends_the_run(world: World) -> None:
    async def run() -> None:
        plan = planned(Fault(kind="stale_load", skip=1, times=0))
        async with world.pool(plan, plan) as pool:
            await all_ready(pool, 0)
            world.publish(1)
            with pytest.raises(WeightsRefused, match="version 1: the engine's log-probabilities differ"):
                await pool.load_weights(world.fetched(1), 1)

    asyncio.run(run())


def test_without_any_server_a_turn_and_a_load_end_with_a_reason(world: World) -> None:
    async def run() -> None:
        patience = Patience(turn=0.3, join=0.5, connect=0.2, poll=0.05)
        async with world.pool(patience=patience, load=False) as pool:
            pool.add("http://127.0.0.1:9")
            world.publish(0)
            with pytest.raises(EngineError, match=r"no server has version 0 after 0.5 s.*127.0.0.1:9"):
                await pool.load_weights(world.fetched(0), 0)
            with pytest.raises(EngineError, match=r"no complete answer within 0.3 s"):
                await sample(pool, 5)

    asyncio.run(run())


def test_a_server_that_somebody_left_paused_goes_on(world: World) -> None:
    async def run() -> None:
        async with world.pool(NEVER_STOPS) as first:
            await first.close()
            world.engines[0].pause()
            second = Pool(world.urls, weights_uri=world.store.uri, stop_ids=[STOP], patience=QUICK)
            await second.load_weights(world.fetched(0), 0)
            assert (await sample(second, 20)).token_ids == world.greedy(20)
            await second.close()

    asyncio.run(run())


def test_a_server_of_another_run_is_given_the_weights_of_this_one(world: World) -> None:
    """Both have a version 0, and it is not the same."""

    async def run() -> None:
        async with world.pool(NEVER_STOPS) as first:
            await first.close()
            other = World(world.folder / "other", world.engines, world.urls)
            other.folder.mkdir()
            other.publish(0, scale=2.0)
            second = Pool(world.urls, weights_uri=other.store.uri, stop_ids=[STOP], patience=QUICK)
            await second.load_weights(other.fetched(0), 0)
            found = await sample(second, 20)
            assert found.token_ids == other.greedy(20) != world.greedy(20)
            other.check(found)
            await second.close()

    asyncio.run(run())


def test_a_server_that_is_much_later_than_the_others_leaves(world: World) -> None:
    async def run() -> None:
        patience = replace(QUICK, lag=0.3)
        async with world.pool(NEVER_STOPS, NEVER_STOPS, patience=patience) as pool:
            await all_ready(pool, 0)
            world.publish(1)
            fetcher, fetched = world.engines[1].worker.hintloop_fetcher, threading.Event()
            fetch = fetcher._fetch

            def late(uri: str, version: int, under: str) -> Path:
                fetched.wait(DEADLINE_S)
                return fetch(uri, version, under)

            fetcher._fetch = late
            await pool.load_weights(world.fetched(1), 1)
            assert [server["state"] for server in pool.servers()] == ["ready", "out"]
            fetched.set()
            await all_ready(pool, 1)

    asyncio.run(run())


def test_servers_join_and_leave_by_the_roster_while_turns_go_on(world: World, tmp_path: Path) -> None:
    async def run() -> None:
        roster = tmp_path / "engines.txt"
        async with world.pool(*[planned(token_ms=SLOW_MS)] * 2, roster=roster) as pool:
            await all_ready(pool, 0)
            asked = [asyncio.create_task(sample(pool, 150, session=str(i))) for i in range(6)]
            await world.under_way(6)
            roster.write_text(f"{world.urls[1]}/\n")
            await until(lambda: len(pool.servers()) == 1)
            before = world.engines[0].sampled
            world.engines[1].plan = NEVER_STOPS
            assert (await sample(pool, 20)).token_ids == world.greedy(20)
            world.hurry()
            for each in await asyncio.gather(*asked):
                assert each.token_ids == world.greedy(150)
            assert world.engines[0].sampled > before  # what it was doing, it finished
            assert pool.stats()["retries"] == 0
            roster.unlink()
            await until(lambda: len(pool.servers()) == 2)
            await all_ready(pool, 0)

    asyncio.run(run())


def test_the_turns_of_an_episode_go_to_one_server_and_episodes_spread(world: World) -> None:
    async def run() -> None:
        async with world.pool(*[NEVER_STOPS] * 3) as pool:
            await all_ready(pool, 0)

            async def episode(name: str) -> list[int]:
                places = []
                for _ in range(3):
                    await sample(pool, 8, session=name)
                    places.append(world.urls.index(pool._homes[name].server.url))
                return places

            homes = await asyncio.gather(*(episode(str(i)) for i in range(9)))
            assert all(len(set(places)) == 1 for places in homes)
            assert [sum(places[0] == place for places in homes) for place in range(3)] == [3, 3, 3]

    asyncio.run(run())


@contextlib.contextmanager
def process(folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """``hintloop sim-engine`` in a process of its own."""
    ready = folder / f"ready{time.monotonic_ns()}"
    started = subprocess.Popen(
        [sys.executable, "-m", "hintloop.cli.main", "sim-engine", "--ready-file", str(ready), *options],
        env={**os.environ, CACHE: str(folder / "server-cache")},
    )
    try:
        deadline = time.monotonic() + DEADLINE_S
        while not ready.exists():
            assert started.poll() is None, "the server did not start"
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield started, ready.read_text().strip()
    finally:
        started.kill()
        started.wait(10)


def lasting_port() -> int:
    """A free port that nobody who asks for any port is given, so that a server gets it again later."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(max(1024, lowest - 10_000), lowest)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def test_a_killed_server_is_missed_by_no_turn_and_comes_back_at_the_newest_version(
    world: World, tmp_path: Path
) -> None:
    plan, slow = tmp_path / "plan.json", tmp_path / "slow.json"
    plan.write_text(NEVER_STOPS.model_dump_json())
    slow.write_text(planned(token_ms=20).model_dump_json())
    port = str(lasting_port())
    world.publish(0)

    async def run(victim: subprocess.Popen[bytes], urls: Sequence[str]) -> None:
        pool = Pool(urls, weights_uri=world.store.uri, stop_ids=[STOP], patience=QUICK)
        async with asyncio.timeout(DEADLINE_S):
            await pool.load_weights(world.fetched(0), 0)
            await all_ready(pool, 0)
            asked = [asyncio.create_task(sample(pool, 200, session=str(i))) for i in range(8)]
            async with httpx.AsyncClient() as client:
                while (await client.get(f"{urls[0]}/sim")).json()["sampled"] < 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            os.kill(victim.pid, signal.SIGKILL)
            for each in await asyncio.gather(*asked):
                assert each.token_ids == world.greedy(200)
                world.check(each)
            assert pool.stats()["continued_tokens"] > 0
            world.publish(1)
            await pool.load_weights(world.fetched(1), 1)
            with process(tmp_path, "--port", port, "--plan", str(plan)):
                started = time.monotonic()
                await all_ready(pool, 1)
                assert time.monotonic() - started < 30.0
                assert (await sample(pool, 20)).token_ids == world.greedy(20, version=1)
        await pool.close()

    with (
        process(tmp_path, "--port", port, "--plan", str(slow)) as (victim, one),
        process(tmp_path, "--port", "0", "--plan", str(plan)) as (_, other),
    ):
        asyncio.run(run(victim, [one, other]))


def test_a_planned_restart_is_a_new_process_without_weights(world: World, tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    fault = '[[fault]]\nkind = "restart"\ntokens = 8\nskip = 2\nseconds = 0.1\n'
    plan.write_text(f"token_ms = 2\nstop_after = {NEVER_STOPS.stop_after}\n{fault}")
    world.publish(0)

    async def run(url: str) -> None:
        pool = Pool([url], weights_uri=world.store.uri, stop_ids=[STOP], patience=QUICK)
        async with asyncio.timeout(DEADLINE_S):
            await pool.load_weights(world.fetched(0), 0)
            for _ in range(3):
                assert (await sample(pool, 40)).token_ids == world.greedy(40)
            assert pool.stats()["retries"] >= 1
        await pool.close()

    with process(tmp_path, "--port", "0", "--plan", str(plan)) as (_, url):
        asyncio.run(run(url))


def test_a_plan_that_cannot_be_read_says_where(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text('[[fault]]\nkind = "explode"\n')
    with pytest.raises(ValueError, match=r"fault\.0\.kind"):
        load_plan(path)
    path.write_text("token_ms = ")
    with pytest.raises(ValueError, match="is not a plan"):
        load_plan(path)
