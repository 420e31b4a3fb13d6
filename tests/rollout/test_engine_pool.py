"""The pool of servers under what a long run meets: runs that begin anew, rosters with typos, overload, slow turns."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

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
