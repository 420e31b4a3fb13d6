"""The pool of servers under what a long run meets: runs that begin anew, rosters with typos, overload, slow turns."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from structlog.testing import capture_logs

from hintloop.agent.engine import EngineError
from hintloop.rollout.config import RolloutConfig
from hintloop.rollout.engines.pool import AFFINITY_SLACK, ERRORS_IN_A_ROW, FIRST_PAUSE_S, Pool
from hintloop.rollout.engines.publish import Fetch, Way
from hintloop.rollout.engines.publish_direct import Direct
from hintloop.rollout.engines.sim_plan import Fault
from hintloop.rollout.engines.vllm import VllmServer

from .world import NEVER_STOPS, QUICK, SLOW_MS, STOP, World, all_ready, looked_at, planned, sample, until


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_run_that_begins_anew_under_its_uri_gives_its_versions_to_a_server_of_the_run_before(
    world: World,
) -> None:
    """The server has higher versions of the same URI in its cache, and one of the same number."""

    async def run() -> None:
        async with world.pool(NEVER_STOPS) as first:
            for version in (5, 6, 7):
                world.publish(version)
                await first.load_weights(world.fetched(version), version)
            await first.close()
            for name in ("weights", "cache", "models"):
                shutil.rmtree(world.folder / name)
            second = world.another()
            for version in (0, 7):
                world.publish(version, scale=2.0)
                await second.load_weights(world.fetched(version), version)
                await all_ready(second, version)
                found = await sample(second, 20)
                assert found.token_ids == world.greedy(20, version=version)
                world.check(found)
            await second.close()

    asyncio.run(run())


def test_a_fetched_version_that_was_deleted_is_fetched_again(world: World) -> None:
    async def run() -> None:
        async with world.pool(NEVER_STOPS) as pool:
            shutil.rmtree(world.folder / "server0")
            world.engines[0].label = "something else"  # so it is brought to its version again
            await until(lambda: world.engines[0].label != "something else")
            await all_ready(pool, 0)
            assert (await sample(pool, 20)).token_ids == world.greedy(20)

    asyncio.run(run())


TYPO = "http://10.0.0.1:80a0"


def test_a_typo_in_the_roster_costs_that_line_alone_and_is_told_once(world: World, tmp_path: Path) -> None:
    async def run() -> None:
        roster = tmp_path / "engines.txt"
        async with world.pool(*[NEVER_STOPS] * 2, roster=roster) as pool:
            with capture_logs() as logs:
                roster.write_text(f"{TYPO}\n127.0.0.1:8000\n{world.urls[1]}\n")
                await until(lambda: [server["url"] for server in pool.servers()] == world.urls[1:])
                assert (await sample(pool, 20)).token_ids == world.greedy(20)
                roster.write_text(f"{TYPO}\n{world.urls[0]}\n")
                await until(lambda: [server["url"] for server in pool.servers()] == world.urls[:1])
            told = [entry["error"] for entry in logs if entry["event"] == "engine_roster_not_read"]
            assert len(told) == 2
            assert "'127.0.0.1:8000' is no URL such as" in told[0]
            assert "Invalid port" in told[1]

    asyncio.run(run())


@pytest.mark.parametrize("url", [TYPO, "http://127.0.0.1:80000", "127.0.0.1:8000", "http://"])
def test_what_is_no_url_is_refused_where_it_is_configured(world: World, url: str) -> None:
    with pytest.raises(ValidationError, match="is no URL such as"):
        RolloutConfig(engines=("http://127.0.0.1:8000", url))
    with pytest.raises(ValueError, match="is no URL such as"):
        Pool([url], weights_uri=world.store.uri, stop_ids=[])


@pytest.mark.parametrize("way", [Fetch, Direct])
def test_a_server_that_is_removed_and_added_again_while_it_changes_has_one_keeper_at_a_time(
    tmp_path: Path, way: type[Way]
) -> None:
    kept, most = Counter[str](), Counter[str]()

    class Watched(way):  # type: ignore[misc, valid-type]
        async def bring_up(self, server: VllmServer, *args: Any, **options: Any) -> None:
            kept[server.url] += 1
            most[server.url] = max(most[server.url], kept[server.url])
            try:
                await super().bring_up(server, *args, **options)
            finally:
                kept[server.url] -= 1

    async def run() -> None:
        world = World(tmp_path, way=Watched)
        async with world.pool(*[planned(load_ms=300)] * 2) as pool:
            await all_ready(pool, 0)
            url = world.urls[0]
            world.publish(1)
            loading = asyncio.create_task(pool.load_weights(world.fetched(1), 1))
            await until(lambda: world.engines[0].paused)
            for _ in range(2):
                pool.remove(url)
                pool.add(url)
            await loading
            await all_ready(pool, 1)
            assert most[url] == 1
            assert [engine.restarts for engine in world.engines] == [0, 0]
            found = [await sample(pool, 20, session=str(number)) for number in range(2)]
            assert {each.token_ids for each in found} == {world.greedy(20, version=1)}

    asyncio.run(run())


def test_a_closed_pool_has_no_task_left_not_even_of_servers_that_are_leaving(world: World) -> None:
    async def run() -> None:
        before = asyncio.all_tasks()
        async with world.pool(*[planned(load_ms=1000)] * 2, load=False) as pool:
            world.publish(0)
            loading = asyncio.create_task(pool.load_weights(world.fetched(0), 0))
            await until(lambda: any(engine.paused for engine in world.engines))
            for url in world.urls:
                pool.remove(url)
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
            await pool.close()
            assert asyncio.all_tasks() == before

    asyncio.run(run())


def test_tokens_of_a_server_that_left_and_came_back_with_other_weights_are_of_those_weights(
    world: World,
) -> None:
    """The request began before the server left, breaks off after it is back, and was vouched for in between."""

    async def run() -> None:
        fault = Fault(kind="drop", tokens=60, skip=1)
        async with world.pool(planned(fault, token_ms=SLOW_MS)) as pool:
            asked = asyncio.create_task(sample(pool, 80, temperature=1.0))
            await world.under_way(1)
            for _ in range(2):
                await looked_at(pool)
            pool.remove(world.urls[0])
            world.publish(1)
            loading = asyncio.create_task(pool.load_weights(world.fetched(1), 1))
            pool.add(world.urls[0])
            await loading
            world.hurry()
            found = await asked
            world.check(found)
            assert len(found.token_ids) == 80

    asyncio.run(run())


def test_a_server_that_was_getting_a_version_when_the_next_one_came_never_serves_it(world: World) -> None:
    async def run() -> None:
        patience = replace(QUICK, lag=0.2)  # the other one does not wait for it
        plans = [NEVER_STOPS, planned(load_ms=2000)]
        async with world.pool(*plans, patience=patience, load=False) as pool:
            for version in (0, 1):
                world.publish(version)
            await pool.load_weights(world.fetched(0), 0)
            await until(lambda: world.engines[1].paused)
            await pool.load_weights(world.fetched(1), 1)
            assert world.engines[1].paused
            world.engines[1].plan = NEVER_STOPS
            served = set()
            while "ready" not in (late := pool.servers()[1])["state"]:
                served |= {server["version"] for server in pool.servers() if server["state"] == "ready"}
                await asyncio.sleep(0.001)
            assert (served, late["version"]) == ({1}, 1)

    asyncio.run(run())


def test_of_two_servers_that_live_one_goes_on_however_many_are_dead(world: World) -> None:
    async def run() -> None:
        async with world.pool(*[planned(load_ms=300)] * 2) as pool:
            for port in range(1, 7):
                pool.add(f"http://127.0.0.1:{port}")
            await until(lambda: pool.stats()["servers_ready"] == 2)
            most = 0
            world.publish(1)
            loading = asyncio.create_task(pool.load_weights(world.fetched(1), 1))
            while not loading.done():
                most = max(most, sum(engine.paused for engine in world.engines))
                await asyncio.sleep(0.001)
            await loading
            assert most == 1

    asyncio.run(run())


def test_servers_that_wait_for_their_turn_to_change_are_not_late(world: World) -> None:
    async def run() -> None:
        patience = replace(QUICK, lag=2.0)
        async with world.pool(*[planned(load_ms=800)] * 5, patience=patience) as pool:
            await all_ready(pool, 0)
            world.publish(1)
            with capture_logs() as logs:
                await pool.load_weights(world.fetched(1), 1)
                await all_ready(pool, 1)
            assert not [entry for entry in logs if entry["event"] == "engine_left"]

    asyncio.run(run())


def test_a_server_that_takes_shorter_episodes_than_there_may_be_is_refused(world: World) -> None:
    """It would lose the long ones alone."""

    async def run() -> None:
        async with world.pool(planned(max_model_len=100), planned(max_model_len=101), load=False) as served:
            await served.close()
            world.publish(0)
            pool = Pool(world.urls, weights_uri=world.store.uri, stop_ids=[STOP], patience=QUICK, room=101)
            with capture_logs() as logs:
                await pool.load_weights(world.fetched(0), 0)
                await until(lambda: "--max-model-len 101" in pool.servers()[0]["reason"])
                assert [server["state"] for server in pool.servers()] == ["out", "ready"]
                await until(lambda: pool._members[world.urls[0]].failures > 2)
            told = [entry["reason"] for entry in logs if entry["event"] == "engine_not_taken"]
            assert told == [pool.servers()[0]["reason"]]
            await pool.close()

    asyncio.run(run())


def test_a_server_whose_log_probabilities_are_of_something_else_is_refused(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hintloop.rollout.engines.sim_routes.LOGPROBS_MODE", "raw_logprobs")

    async def run() -> None:
        patience = replace(QUICK, join=0.5)
        async with world.pool(NEVER_STOPS, patience=patience, load=False) as pool:
            world.publish(0)
            with pytest.raises(
                EngineError, match=r"reports raw_logprobs.*--logprobs-mode processed_logprobs"
            ):
                await pool.load_weights(world.fetched(0), 0)
            assert world.engines[0].label == "default"

    asyncio.run(run())


def test_an_episode_leaves_a_server_that_has_much_more_to_do_than_another(world: World) -> None:
    async def run() -> None:
        async with world.pool(*[planned(token_ms=SLOW_MS)] * 2) as pool:
            await all_ready(pool, 0)
            pool.remove(world.urls[1])
            asked = [
                asyncio.create_task(sample(pool, 100, session=str(number)))
                for number in range(AFFINITY_SLACK + 1)
            ]
            await world.under_way(len(asked))
            pool.add(world.urls[1])
            await all_ready(pool, 0)
            home = pool._members[world.urls[0]]
            home.in_flight -= 1  # as many more as are still borne
            assert await pool._pick("0") is home
            home.in_flight += 1
            assert await pool._pick("0") is pool._members[world.urls[1]]
            world.hurry()
            for each in await asyncio.gather(*asked):
                assert each.token_ids == world.greedy(100)

    asyncio.run(run())


def test_a_server_that_refuses_requests_in_a_row_is_looked_at_before_it_gets_more(world: World) -> None:
    async def run() -> None:
        async with world.pool(NEVER_STOPS) as pool:
            world.engines[0].faults.add([Fault(kind="error", times=ERRORS_IN_A_ROW - 1)])
            with capture_logs() as logs:
                assert (await sample(pool, 20)).token_ids == world.greedy(20)
                assert not [entry for entry in logs if entry["event"] == "engine_left"]
                world.engines[0].faults.add([Fault(kind="error", times=ERRORS_IN_A_ROW)])
                assert (await sample(pool, 20)).token_ids == world.greedy(20)
            (left,) = [entry["reason"] for entry in logs if entry["event"] == "engine_left"]
            assert "HTTP 500: " in left

    asyncio.run(run())


def test_the_pauses_before_a_server_that_fails_is_looked_at_again_double(world: World) -> None:
    async def run() -> None:
        patience = replace(QUICK, poll=1000.0)
        async with world.pool(NEVER_STOPS, patience=patience) as pool:
            looks = []
            look = pool._look

            async def seen(member: Any) -> None:
                looks.append(time.monotonic())
                await look(member)

            pool._look = seen  # type: ignore[method-assign]
            world.engines[0]._start_anew(1000.0)
            pool._drop(pool._members[world.urls[0]], "it is away")
            await until(lambda: len(looks) == 5)
            pauses = [later - earlier for earlier, later in pairwise(looks)]
            assert all(pause >= FIRST_PAUSE_S * 2 ** (1 + place) for place, pause in enumerate(pauses))
            world.engines[0]._up_at = 0.0
            await all_ready(pool, 0)
            assert (await sample(pool, 20)).token_ids == world.greedy(20)
            assert pool._members[world.urls[0]].failures == 0

    asyncio.run(run())
