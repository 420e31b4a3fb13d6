"""Sessions with several environment servers: even load, and episodes go on wherever one is left."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from hintloop.envs import pool as pools
from hintloop.envs.client import EnvironmentLost
from hintloop.envs.errors import tool_error
from hintloop.envs.models import CodingState, ToolCall, ToolResult
from hintloop.envs.pool import EnvPool

DEADLINE_S = 20.0


@dataclass
class Host:
    """A server of the environment's wire format whose episodes end with their first call."""

    capacity: int = 8
    broken: bool = False
    """Each episode ends with a failure of its sandbox."""
    sessions: set[ServerConnection] = field(default_factory=set)
    opened: int = 0
    refused: int = 0
    reset: int = 0
    played: int = 0
    most: int = 0
    url: str = ""
    port: int = 0
    server: Server | None = None

    async def start(self) -> None:
        self.server = await serve(self._talk, "127.0.0.1", self.port)
        self.port = next(iter(self.server.sockets)).getsockname()[1]
        self.url = f"ws://127.0.0.1:{self.port}"

    async def kill(self) -> None:
        assert self.server is not None
        self.server.close(close_connections=False)
        for session in list(self.sessions):
            session.transport.abort()
        await self.server.wait_closed()

    async def _talk(self, ws: ServerConnection) -> None:
        full = len(self.sessions) >= self.capacity
        if not full:
            self.sessions.add(ws)
            self.opened += 1
            self.most = max(self.most, len(self.sessions))
        try:
            async for text in ws:
                if full:
                    self.refused += 1
                    error = {"code": "CAPACITY_REACHED", "message": "at capacity"}
                    await ws.send(json.dumps({"type": "error", "data": error}))
                    return
                await ws.send(json.dumps(self._answer(json.loads(text)["type"])))
        except ConnectionClosed:
            pass
        finally:
            self.sessions.discard(ws)

    def _answer(self, kind: str) -> dict[str, Any]:
        if kind == "state":
            return {"type": "state", "data": CodingState().model_dump(mode="json")}
        self.reset += kind == "reset"
        self.played += kind == "step"
        result = ToolResult()
        if self.broken and kind == "step":
            result = ToolResult(error=tool_error("connection_error", "the sandbox is gone"))
        data = {"observation": result.model_dump(mode="json"), "reward": None, "done": kind == "step"}
        return {"type": "observation", "data": data}


@contextlib.asynccontextmanager
async def hosts(*made: Host) -> AsyncIterator[list[str]]:
    """Running hosts and their URLs; all within a deadline."""
    async with asyncio.timeout(DEADLINE_S):
        for host in made:
            await host.start()
        try:
            yield [host.url for host in made]
        finally:
            for host in made:
                await host.kill()


async def episode(pool: EnvPool, seconds: float = 0.0, gate: asyncio.Event | None = None) -> bool:
    """Play one, which ends when the gate is open; whether it was not lost."""
    try:
        async with pool.session() as client:
            await client.reset(task_id="t")
            await asyncio.sleep(seconds)
            if gate is not None:
                await gate.wait()
            return (await client.step(ToolCall(name="submit"))).observation.error is None
    except EnvironmentLost:
        return False


async def play(pool: EnvPool, count: int, seconds: float = 0.0) -> list[bool]:
    return list(await asyncio.gather(*(episode(pool, seconds) for _ in range(count))))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "_AVOIDED_S", 0.5)


def test_an_episode_goes_to_the_server_with_the_fewest() -> None:
    async def run() -> None:
        three = [Host(), Host(), Host()]
        async with hosts(*three) as urls:
            pool = EnvPool(urls, size=12)
            assert all(await play(pool, 12, seconds=0.2))
            assert [host.most for host in three] == [4, 4, 4]
            assert all(await play(pool, 12, seconds=0.05))
            assert [host.opened for host in three] == [4, 4, 4], "sessions are used again"
            assert [server["in_use"] for server in pool.servers()] == [0, 0, 0]
            await pool.close()

    asyncio.run(run())


def test_more_episodes_than_all_servers_have_room_for_wait() -> None:
    async def run() -> None:
        small, large = Host(capacity=1), Host(capacity=3)
        async with hosts(small, large) as urls:
            pool = EnvPool(urls, size=20)
            assert all(await play(pool, 40, seconds=0.01))
            assert (small.most, large.most) == (1, 3)
            assert small.played + large.played == 40
            assert min(small.played, large.played) > 2
            assert small.refused + large.refused < 40
            await pool.close()

    asyncio.run(run())


def test_one_server_that_is_dead_for_ever_costs_no_episode() -> None:
    async def run() -> None:
        dead, alive = Host(), Host()
        async with hosts(dead, alive) as urls:
            await dead.kill()
            pool = EnvPool(urls, size=8)
            assert all(await play(pool, 24, seconds=0.005))
            assert {server["url"]: server["state"] for server in pool.servers()} == {
                dead.url: "down",
                alive.url: "ready",
            }
            assert pool.servers()[0]["reason"]
            await pool.close()

    asyncio.run(run())


def test_a_killed_server_loses_its_own_episodes_only_and_is_used_again_when_it_is_back() -> None:
    async def run() -> None:
        victim, other = Host(), Host()
        async with hosts(victim, other) as urls:
            pool = EnvPool(urls, size=8)
            gate = asyncio.Event()
            playing = asyncio.gather(*(episode(pool, gate=gate) for _ in range(8)))
            while victim.reset + other.reset < 8:  # noqa: ASYNC110 - nothing announces it
                await asyncio.sleep(0.01)
            await victim.kill()
            gate.set()
            assert sorted(await playing) == [False] * 4 + [True] * 4
            assert all(await play(pool, 8))
            before = victim.played
            await victim.start()
            while victim.played == before:
                assert all(await play(pool, 4, seconds=0.02))
            assert pool.servers()[0]["state"] == "ready"
            await pool.close()

    asyncio.run(run())


def test_a_server_that_fails_what_it_opens_does_not_draw_all_episodes_to_itself() -> None:
    """It is always the least loaded one."""

    async def run() -> None:
        broken, sound = Host(broken=True), Host()
        async with hosts(broken, sound) as urls:
            pool = EnvPool(urls, size=4)
            kept = [await play(pool, 4, seconds=0.01) for _ in range(15)]
            assert sum(map(sum, kept)) >= 30, "on a slow machine it is asked again in every round"
            assert pool.servers()[0]["state"] == "failing"
            broken.broken = False
            while pool.servers()[0]["state"] != "ready":
                await play(pool, 4, seconds=0.01)
            assert all(await play(pool, 8, seconds=0.01))
            await pool.close()

    asyncio.run(run())


def test_without_any_server_the_wait_ends_with_every_reason() -> None:
    async def run() -> None:
        one, two = Host(), Host(capacity=0)
        async with hosts(one, two) as urls:
            await one.kill()
            pool = EnvPool(urls, size=4, wait_s=4.0, full_s=5.0)
            with pytest.raises(EnvironmentLost, match=r"no session within [\d.]+ s: .*; .*at capacity"):
                async with pool.session():
                    pass
            assert 2 < two.refused < 40, "it is waited for, and not asked all the time"
            await pool.close()

    asyncio.run(run())


def test_more_callers_than_a_server_has_room_for_wait_as_long_as_sessions_come_back() -> None:
    async def run() -> None:
        host = Host(capacity=2)
        async with hosts(host) as urls:
            pool = EnvPool(urls, size=12, wait_s=4.0)
            started = time.monotonic()
            assert all(await play(pool, 12, seconds=1.0))
            assert time.monotonic() - started > 4.0, "longer than anybody is waited for who does not answer"
            await pool.close()

    asyncio.run(run())


def test_cancelled_callers_leave_nothing_behind() -> None:
    async def run() -> None:
        host = Host(capacity=2)
        async with hosts(host) as urls:
            pool = EnvPool(urls, size=2)
            playing = [asyncio.create_task(episode(pool, seconds=30.0)) for _ in range(6)]
            await asyncio.sleep(0.2)
            for task in playing:
                task.cancel()
            await asyncio.gather(*playing, return_exceptions=True)
            assert all(await play(pool, 6))
            assert pool.servers() == [{"url": host.url, "in_use": 0, "state": "ready", "reason": ""}]
            await pool.close()

    asyncio.run(run())


@pytest.mark.parametrize("urls", [[], ()])
def test_a_pool_needs_a_server(urls: Any) -> None:
    with pytest.raises(ValueError, match="needs the URL"):
        EnvPool(urls, size=1)


def test_a_server_named_twice_is_one() -> None:
    made: Callable[..., EnvPool] = EnvPool
    assert len(made(["ws://a", "ws://a"], size=1).servers()) == 1
