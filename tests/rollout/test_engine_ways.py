"""Versions that get to the servers as adapters, or straight from this process: as safe as those that are fetched."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hintloop.rollout.engines.pool import Pool
from hintloop.rollout.engines.publish import Way
from hintloop.rollout.engines.publish_adapter import FOLDER, Adapter
from hintloop.rollout.engines.publish_direct import UNFINISHED, Direct
from hintloop.rollout.engines.sim_plan import Fault
from hintloop.rollout.engines.vllm import ServerError
from hintloop.rollout.vllm_sender import Sender
from hintloop.rollout.weights import WeightsRefused

from .world import NEVER_STOPS, QUICK, SLOW_MS, World, all_ready, looked_at, planned, sample, until

BOTH = pytest.mark.parametrize("way", [Adapter, Direct])


@pytest.fixture
def world(tmp_path: Path) -> Callable[[type[Way]], World]:
    return lambda way: World(tmp_path, way=way)


Worlds = Callable[[type[Way]], World]


@BOTH
def test_a_request_that_spans_an_update_has_the_version_of_each_token(world: Worlds, way: type[Way]) -> None:
    async def run(world: World) -> None:
        async with world.pool(planned(token_ms=SLOW_MS)) as pool:
            world.publish(1)
            asked = [
                asyncio.create_task(sample(pool, 200, session=str(i), temperature=1.0)) for i in range(6)
            ]
            await world.under_way(6)
            await pool.load_weights(world.fetched(1), 1)
            world.hurry()
            later = await sample(pool, 20, temperature=1.0)
            world.check(later)
            assert set(later.policy_versions) == {1}
            for each in await asyncio.gather(*asked):
                world.check(each)
                assert len(each.token_ids) == 200
                # A request keeps the adapter that it began with; weights change under it.
                assert set(each.policy_versions) == ({0} if way is Adapter else {0, 1})
            assert pool.stats()["retries"] == 0

    asyncio.run(run(world(way)))


@BOTH
@pytest.mark.parametrize("kind", ["refuse_load", "stale_load", "break_load"])
def test_a_server_whose_load_fails_is_out_until_it_has_the_newest_version(
    world: Worlds, way: type[Way], kind: Any
) -> None:
    async def run(world: World) -> None:
        plans = [planned(*faults, token_ms=SLOW_MS) for faults in ([Fault(kind=kind, skip=1)], [])]
        async with world.pool(*plans) as pool:
            await all_ready(pool, 0)
            world.publish(1)
            asked = [
                asyncio.create_task(sample(pool, 150, session=str(i), temperature=1.0)) for i in range(6)
            ]
            await world.under_way(6)
            await pool.load_weights(world.fetched(1), 1)
            ended = way is Direct and kind != "stale_load"  # a transfer that has begun cannot be taken back
            await until(lambda: world.engines[0].restarts == ended)
            world.hurry()
            for each in await asyncio.gather(*asked):
                world.check(each)
                assert len(each.token_ids) == 150
            world.engines[0]._up_at = 0.0  # somebody starts it again
            await all_ready(pool, 1)
            many = await asyncio.gather(
                *(sample(pool, 20, session=f"new{i}", temperature=1.0) for i in range(6))
            )
            for each in many:
                world.check(each)
                assert set(each.policy_versions) == {1}

    asyncio.run(run(world(way)))


@BOTH
def test_a_version_that_no_server_reproduces_ends_the_run(world: Worlds, way: type[Way]) -> None:
    async def run(world: World) -> None:
        async with world.pool(planned(Fault(kind="stale_load", skip=1, times=0))) as pool:
            world.publish(1)
            with pytest.raises(WeightsRefused, match="version 1: the engine's log-probabilities differ"):
                await pool.load_weights(world.fetched(1), 1)

    asyncio.run(run(world(way)))


@BOTH
def test_a_server_that_starts_anew_gets_the_newest_version_before_work(world: Worlds, way: type[Way]) -> None:
    async def run(world: World) -> None:
        fault = Fault(kind="restart", tokens=10, seconds=0.2, skip=4)
        async with world.pool(planned(fault), NEVER_STOPS) as pool:
            await all_ready(pool, 0)
            world.publish(1)
            await pool.load_weights(world.fetched(1), 1)
            await all_ready(pool, 1)
            for number in range(8):
                found = await sample(pool, 40, session=str(number))
                assert found.token_ids == world.greedy(40, version=1)
                assert set(found.policy_versions) == {1}
            await all_ready(pool, 1)
            assert world.engines[0].restarts == 1
            world.publish(2)
            await pool.load_weights(world.fetched(2), 2)
            await all_ready(pool, 2)
            assert (await sample(pool, 40)).token_ids == world.greedy(40, version=2)

    asyncio.run(run(world(way)))


@BOTH
def test_another_process_takes_a_server_over_with_what_it_has(world: Worlds, way: type[Way]) -> None:
    async def run(world: World) -> None:
        async with world.pool(NEVER_STOPS) as first:
            await first.close()
            world.engines[0].faults.add([Fault(kind="refuse_load", times=0)])  # nothing is loaded again
            second = world.another()
            await second.load_weights(world.fetched(0), 0)
            assert (await sample(second, 20)).token_ids == world.greedy(20)
            await second.close()

    asyncio.run(run(world(way)))


# Adapters


def test_servers_fetch_the_adapter_alone_and_are_never_paused(world: Worlds, tmp_path: Path) -> None:
    async def run(world: World) -> None:
        async with world.pool(NEVER_STOPS) as pool:
            world.engines[0].pause = lambda: pytest.fail("it was paused")  # type: ignore[method-assign]
            world.publish(1)
            await pool.load_weights(world.fetched(1), 1)
            assert (await sample(pool, 20)).token_ids == world.greedy(20, version=1)
            assert world.engines[0].label == "default"

    asyncio.run(run(world(Adapter)))
    files = {path.relative_to(tmp_path / "server0") for path in (tmp_path / "server0").rglob("*.*")}
    names = {Path(*path.parts[2:]).as_posix() for path in files if len(path.parts) > 2}
    assert names == {
        "manifest.json",
        f"{FOLDER}adapter_config.json",
        f"{FOLDER}adapter_model.safetensors",
    }


def test_an_adapter_goes_when_no_request_uses_it_any_more(world: Worlds) -> None:
    async def run(world: World) -> None:
        async with world.pool(planned(token_ms=SLOW_MS)) as pool:
            worker = world.engines[0].worker
            world.publish(1)
            asked = asyncio.create_task(sample(pool, 250, session="long"))
            await world.under_way(1)
            await pool.load_weights(world.fetched(1), 1)
            for _ in range(2):  # a look unloads what nobody needs after it has seen what is there
                await looked_at(pool)
            assert len(worker.adapters) == 2
            world.hurry()
            found = await asked
            assert found.token_ids == world.greedy(250)
            await until(lambda: len(worker.adapters) == 1)

    asyncio.run(run(world(Adapter)))


def test_no_adapter_is_loaded_over_those_that_requests_need(world: Worlds) -> None:
    async def run(world: World) -> None:
        async with world.pool(planned(token_ms=SLOW_MS)) as pool:
            asked = []
            for version in (1, 2, 3):
                world.publish(version)
            for version in (0, 1, 2):
                await pool.load_weights(world.fetched(version), version)
                asked.append(asyncio.create_task(sample(pool, 300, session=f"{version}")))
                await world.under_way(len(asked))
            loading = asyncio.create_task(pool.load_weights(world.fetched(3), 3))
            await until(lambda: "still answers with the adapters" in pool.servers()[0]["reason"])
            assert not loading.done()
            world.hurry()
            for version, task in enumerate(asked):
                assert (await task).token_ids == world.greedy(300, version=version)
            await loading
            assert pool.stats()["retries"] == 0

    asyncio.run(run(world(Adapter)))


def test_what_a_broken_stream_of_an_adapter_brought_is_certain(world: Worlds) -> None:
    """Nobody has looked at the server since, but only the version that the request named can have sampled it."""

    async def run(world: World) -> None:
        patience = replace(QUICK, poll=30.0)
        async with world.pool(planned(Fault(kind="drop", tokens=20, skip=2)), patience=patience) as pool:
            assert (await sample(pool, 40)).token_ids == world.greedy(40)
            assert pool.stats()["continued_tokens"] == 20

    asyncio.run(run(world(Adapter)))


def test_a_version_without_an_adapter_is_named_as_the_reason(world: Worlds) -> None:
    async def run(world: World) -> None:
        made = world.folder / "whole"
        made.mkdir()
        (made / "config.json").write_text("{}")
        async with world.pool(NEVER_STOPS) as pool:
            world.store.publish(1, made, metadata={})
            loading = asyncio.create_task(pool.load_weights(world.fetched(1), 1))
            await until(lambda: "version 1 has no files below adapter/" in pool.servers()[0]["reason"])
            assert set((await sample(pool, 20)).policy_versions) == {0}
            loading.cancel()

    asyncio.run(run(world(Adapter)))


# Straight from this process


def sender_of(pool: Pool) -> Any:
    (sender,) = pool._way._senders.values()  # type: ignore[attr-defined]
    return sender._process


def test_one_sender_serves_a_server_until_that_starts_anew(world: Worlds) -> None:
    async def run(world: World) -> None:
        async with world.pool(NEVER_STOPS) as pool:
            first = sender_of(pool)
            world.publish(1)
            await pool.load_weights(world.fetched(1), 1)
            assert sender_of(pool).pid == first.pid
            world.engines[0]._start_anew(0.0)
            await until(lambda: pool.servers()[0]["state"] == "out")
            await all_ready(pool, 1)
            second = sender_of(pool)
            assert second.pid != first.pid
            assert first.returncode is not None
        assert second.returncode is not None

    asyncio.run(run(world(Direct)))


def test_a_sender_that_dies_in_the_middle_costs_the_server_its_model(world: Worlds) -> None:
    async def run(world: World) -> None:
        async with world.pool(NEVER_STOPS) as pool:
            engine, sender = world.engines[0], sender_of(pool)
            start = engine.worker.start_update

            def start_and_stop() -> None:
                start()
                os.kill(sender.pid, signal.SIGKILL)

            engine.worker.start_update = start_and_stop  # type: ignore[method-assign]
            world.publish(1)
            loading = asyncio.create_task(pool.load_weights(world.fetched(1), 1))
            await until(lambda: "broke the model" in pool.servers()[0]["reason"])
            await until(lambda: engine.restarts == 1)
            engine._up_at = 0.0
            await loading
            assert (await sample(pool, 20)).token_ids == world.greedy(20, version=1)

    asyncio.run(run(world(Direct)))


def test_a_sender_that_is_gone_before_a_transfer_is_replaced_and_nothing_is_lost(world: Worlds) -> None:
    async def run(world: World) -> None:
        async with world.pool(NEVER_STOPS) as pool:
            os.kill(sender_of(pool).pid, signal.SIGKILL)
            world.publish(1)
            await pool.load_weights(world.fetched(1), 1)
            assert (await sample(pool, 20)).token_ids == world.greedy(20, version=1)
            assert world.engines[0].restarts == 0

    asyncio.run(run(world(Direct)))


def test_a_server_that_somebody_left_in_the_middle_of_a_transfer_ends(world: Worlds) -> None:
    async def run(world: World) -> None:
        async with world.pool(NEVER_STOPS) as first:
            engine = world.engines[0]
            await first.close()
            engine.pause()
            engine.worker.start_update()
            engine.label = UNFINISHED
            second = world.another()
            loading = asyncio.create_task(second.load_weights(world.fetched(0), 0))
            await until(lambda: engine.restarts == 1)
            engine._up_at = 0.0
            await loading
            assert (await sample(second, 20)).token_ids == world.greedy(20)
            await second.close()

    asyncio.run(run(world(Direct)))


def test_a_server_ends_by_itself_when_this_process_dies_in_the_middle(world: Worlds) -> None:
    async def run(world: World) -> None:
        patience = replace(QUICK, load=2.0, control=2.0)
        async with world.pool(planned(load_ms=10_000), load=False, patience=patience) as pool:
            world.publish(0)
            loading = asyncio.create_task(pool.load_weights(world.fetched(0), 0))
            await until(lambda: world.engines[0].label == UNFINISHED)
            await pool.close()
            await until(lambda: world.engines[0].restarts == 1)
            assert world.engines[0].label != UNFINISHED
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)

    asyncio.run(run(world(Direct)))


def test_a_server_that_was_started_without_a_transfer_says_so(
    world: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(world: World) -> None:
        async with world.pool(NEVER_STOPS, load=False) as pool:
            world.publish(0)
            loading = asyncio.create_task(pool.load_weights(world.fetched(0), 0))
            await until(lambda: bool(pool.servers()))
            await until(lambda: "the backend is one of nccl, sim" in pool.servers()[0]["reason"])
            assert not loading.done()
            loading.cancel()

    monkeypatch.setattr("hintloop.rollout.engines.sim_routes.BACKEND", "ipc")
    asyncio.run(run(world(Direct)))


def test_a_sender_answers_each_command_and_ends_with_its_input(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.publish(0)
    folder = world.fetched(0)
    asked = [
        {"do": "offer", "host": "127.0.0.1", "workers": 2},
        {"do": "describe", "folder": str(folder)},
        {"do": "dance"},
    ]
    lines = "".join(json.dumps(each) + "\n" for each in asked)
    command = [sys.executable, "-m", "hintloop.rollout.vllm_sender", "--backend", "sim"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin
        assert process.stdout
        process.stdin.write(lines)
        process.stdin.flush()
        offer, told, odd = (json.loads(process.stdout.readline()) for _ in asked)
        process.stdin.close()
        assert process.wait(10) == 0
    assert (offer["ok"], offer["init_info"]["world_size"]) == (True, 3)
    assert told["update_info"] == {"names": ["weight"], "dtype_names": ["float32"], "shapes": [[8, 8]]}
    assert not odd["ok"]
    assert "dance" in odd["error"]


def test_a_version_that_is_not_what_was_published_is_not_described(tmp_path: Path) -> None:
    world, sender = World(tmp_path), Sender("sim")
    for version in (0, 1):
        world.publish(version)

    def describe(version: int) -> dict[str, Any]:
        return sender.answer(json.dumps({"do": "describe", "folder": str(world.fetched(version))}))

    assert describe(0)["ok"]
    path = world.fetched(1) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    assert "DigestMismatch" in describe(1)["error"]


def test_a_sender_that_cannot_be_started_is_a_failure_of_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from hintloop.rollout.engines import publish_direct

    monkeypatch.setenv(publish_direct.PYTHON, "/no/such/python")
    with pytest.raises(ServerError, match="cannot be started"):
        asyncio.run(publish_direct.Sender.start("http://127.0.0.1:9", "sim"))
