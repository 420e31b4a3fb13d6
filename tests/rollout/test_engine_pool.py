"""The pool of servers under what a long run meets: runs that begin anew, rosters with typos, overload, slow turns."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from pydantic import ValidationError
from structlog.testing import capture_logs

from hintloop.rollout.config import RolloutConfig
from hintloop.rollout.engines.pool import Pool

from .world import NEVER_STOPS, World, all_ready, sample, until


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
