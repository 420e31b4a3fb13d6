"""The environment server as a real process, used through the real client.

Run as a script, this file is that server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import websockets

from hintloop.envs import tools
from hintloop.envs.client import AtCapacity, CodingEnvClient, EnvironmentLost, Refused, open_session
from hintloop.envs.errors import Cause
from hintloop.envs.models import ToolCall, ToolResult
from hintloop.envs.pool import EnvPool
from hintloop.envs.registry import register_taskset, taskset_names
from hintloop.envs.sandbox.local import LocalProvider
from hintloop.envs.server import PortTaken, serve
from hintloop.envs.task import Case, FunctionTests, Task

PATH = "double.py"
BROKEN = "def double(x):\n    return x + 2\n"
MENDED = "def double(x):\n    return x + x\n"
TESTS = FunctionTests(
    PATH, "double", visible=(Case((2,), 4), Case((3,), 6)), hidden=tuple(Case((x,), 2 * x) for x in range(4))
)
TASK = Task("srvtest/double", "make double double", {PATH: BROKEN}, TESTS, {PATH: MENDED}, max_turns=4)


class SrvTest:
    """A task set of one task, and one that breaks."""

    name = "srvtest"
    description = "for tests"

    def splits(self) -> dict[str, list[str]]:
        return {"all": [TASK.task_id]}

    def get(self, task_id: str) -> Task:
        if task_id == "srvtest/broken":
            raise RuntimeError("secret path of the server")
        return {TASK.task_id: TASK}[task_id]


if "srvtest" not in taskset_names():
    register_taskset("srvtest", SrvTest)

READ = ToolCall(name="read_file", arguments={"path": PATH})
MEND = ToolCall(name="write_file", arguments={"path": PATH, "content": MENDED})
SUBMIT = ToolCall(name="submit")


def bash(command: str) -> ToolCall:
    return ToolCall(name="bash", arguments={"command": command})


@dataclass(frozen=True)
class Server:
    process: subprocess.Popen[str]
    url: str


@contextlib.contextmanager
def running_server(folder: Path, *, max_sessions: int = 32, port: int = 0) -> Iterator[Server]:
    ready = folder / "ready"
    process = subprocess.Popen(
        [sys.executable, __file__, str(ready), str(port), str(max_sessions)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        deadline = time.monotonic() + 180
        while not ready.exists():
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline, "the server does not start"
            time.sleep(0.02)
        yield Server(process, ready.read_text().strip())
    finally:
        if process.poll() is None:
            process.kill()
        if process.stdout is not None and not process.stdout.closed:
            process.communicate()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_server(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture(scope="module")
def small_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_server(tmp_path_factory.mktemp("small"), max_sessions=2) as running:
        yield running


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(180):
            return await coroutine

    return asyncio.run(bounded())


async def play(client: CodingEnvClient, *calls: ToolCall) -> list[ToolResult]:
    """One episode: the results of reset and of every call."""
    results = [(await client.reset(task_id=TASK.task_id)).observation]
    for call in calls:
        results.append((await client.step(call)).observation)
    return results


def play_once(url: str, *calls: ToolCall) -> list[ToolResult]:
    async def episode() -> list[ToolResult]:
        client = await open_session(url)
        try:
            return await play(client, *calls)
        finally:
            await client.close()

    results: list[ToolResult] = run(episode())
    return results


def is_infra(result: ToolResult) -> bool:
    return (
        result.done
        and result.reward is None
        and result.error is not None
        and result.error.cause is Cause.INFRA
    )


def test_reset_tells_the_task_and_nothing_of_its_solution(server: Server) -> None:
    (first,) = play_once(server.url)
    assert first.output == TASK.instruction
    assert not first.done
    assert first.reward is None
    assert first.task is not None
    assert first.task.files == [PATH]
    assert first.task.max_turns == 4
    assert {spec["name"] for spec in first.task.tools} >= {"read_file", "submit"}
    assert MENDED not in first.model_dump_json()


def test_a_solved_episode_has_reward_one(server: Server) -> None:
    _, shown, failing, mended, last = play_once(server.url, READ, ToolCall(name="run_tests"), MEND, SUBMIT)
    assert shown.output.startswith("1: def double(x):")
    assert failing.error is not None
    assert failing.error.kind == "test_failure"
    assert not failing.done
    assert mended.error is None
    assert mended.reward is None
    assert last.done
    assert last.reward == 1.0
    assert last.reward_parts == {"tests": 1.0, "submitted": 1.0, "format": 1.0, "cost": 1.0}


def test_a_wrong_submission_has_reward_zero_and_keeps_its_parts(server: Server) -> None:
    *_, last = play_once(server.url, SUBMIT)
    assert last.done
    assert last.reward == 0.0
    assert last.reward_parts == {"tests": 0.25, "submitted": 1.0, "format": 1.0, "cost": 0.25}


def test_an_episode_that_runs_out_of_turns_is_graded_but_earns_nothing(server: Server) -> None:
    *before, last = play_once(server.url, MEND, READ, READ, READ)
    assert not any(result.done for result in before)
    assert last.done
    assert last.reward == 0.0
    assert last.reward_parts == {"tests": 1.0, "submitted": 0.0, "format": 1.0, "cost": 1.0}
    assert last.output.startswith("1: ")


def test_errors_of_the_agent_are_data(server: Server) -> None:
    *results, last = play_once(
        server.url,
        ToolCall(malformed="{"),
        ToolCall(name="red_file"),
        ToolCall(name="read_file", arguments={"path": "\ud800"}),
        ToolCall(name="submit", arguments={"now": True}),
    )
    kinds = [result.error.kind for result in [*results, last] if result.error]
    assert kinds == ["json_decode", "tool_not_found", "file_not_found", "type_error"]
    assert last.done
    assert last.reward == 0.0
    assert (last.reward_parts["submitted"], last.reward_parts["format"]) == (0.0, 0.25)


def test_a_session_serves_many_episodes_with_fresh_files(server: Server) -> None:
    async def episodes() -> tuple[list[ToolResult], list[ToolResult], str | None, str | None]:
        client = await open_session(server.url)
        one = await play(client, MEND, SUBMIT)
        first = (await client.state()).episode_id
        two = await play(client, READ)
        state = await client.state()
        assert state.task_id == TASK.task_id
        assert state.step_count == 1
        await client.close()
        return one, two, first, state.episode_id

    one, two, first, second = run(episodes())
    assert one[-1].reward == 1.0
    assert "x + 2" in two[-1].output
    assert first != second


def test_an_unknown_task_is_refused_with_a_clear_text_and_the_session_stays_good(server: Server) -> None:
    async def attempt() -> tuple[str, list[ToolResult]]:
        client = await open_session(server.url)
        with pytest.raises(Refused) as refused:
            await client.reset(task_id="srvtest/nope")
        results = await play(client, MEND, SUBMIT)
        await client.close()
        return str(refused.value), results

    text, results = run(attempt())
    assert "srvtest/nope" in text
    assert results[-1].reward == 1.0


def test_what_a_task_set_raises_stays_on_the_server(server: Server) -> None:
    async def attempt() -> ToolResult:
        client = await open_session(server.url)
        result: ToolResult = (await client.reset(task_id="srvtest/broken")).observation
        await client.close()
        return result

    result = run(attempt())
    assert is_infra(result)
    assert "secret" not in result.model_dump_json()


def test_a_step_without_an_episode_is_an_infrastructure_failure(server: Server) -> None:
    async def attempt() -> tuple[ToolResult, ToolResult]:
        client = await open_session(server.url)
        before = (await client.step(READ)).observation
        await play(client, SUBMIT)
        after = (await client.step(READ)).observation
        await client.close()
        return before, after

    before, after = run(attempt())
    assert is_infra(before)
    assert is_infra(after)


def descendants(pid: int) -> set[int]:
    """All processes beneath a process."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                parents[int(folder.name)] = int(parent)
    found: set[int] = set()
    new = {pid}
    while new:
        new = {child for child, parent in parents.items() if parent in new}
        found |= new
    return found


def at_rest(server: Server) -> set[int]:
    """The processes of a server that has had an episode and has none now."""
    play_once(server.url, SUBMIT)
    counts: list[int] = []
    while len(counts) < 10 or len(set(counts[-10:])) > 1:
        counts.append(len(descendants(server.process.pid)))
        assert len(counts) < 500, "no rest"
        time.sleep(0.02)
    return descendants(server.process.pid)


def test_a_killed_sandbox_is_an_infrastructure_failure_and_the_session_stays_good(server: Server) -> None:
    before = at_rest(server)

    async def attempt() -> tuple[ToolResult, list[ToolResult]]:
        client = await open_session(server.url)
        await play(client, READ)
        for pid in descendants(server.process.pid) - before:
            os.kill(pid, signal.SIGKILL)
        broken = (await client.step(READ)).observation
        again = await play(client, MEND, SUBMIT)
        await client.close()
        return broken, again

    broken, again = run(attempt())
    assert is_infra(broken)
    assert again[-1].reward == 1.0


def sleeping(server: Server) -> set[int]:
    """The processes beneath a server that only wait for a time to come."""
    found = set()
    for pid in descendants(server.process.pid):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text() == "sleep\n":
                found.add(pid)
    return found


def test_eight_sessions_run_at_once(server: Server) -> None:
    before = sleeping(server)

    async def all_at_once() -> list[list[ToolResult]]:
        pool = EnvPool(server.url, size=8)

        async def episode() -> list[ToolResult]:
            async with pool.session() as client:
                return await play(client, bash("sleep 200"), MEND, SUBMIT)

        playing = asyncio.gather(*(episode() for _ in range(8)))
        while len(sleeping(server) - before) < 8:
            assert not playing.done()
            await asyncio.sleep(0.02)
        for pid in sleeping(server) - before:
            os.kill(pid, signal.SIGKILL)
        results: list[list[ToolResult]] = await playing
        await pool.close()
        return results

    assert [episode[-1].reward for episode in run(all_at_once())] == [1.0] * 8


@pytest.mark.parametrize(("kind", "size", "most"), [("server", 2, 2), ("small_server", 8, 2)])
def test_more_episodes_than_sessions_wait_their_turn(
    request: pytest.FixtureRequest, kind: str, size: int, most: int
) -> None:
    url = request.getfixturevalue(kind).url

    async def crowd() -> tuple[list[list[ToolResult]], int]:
        pool = EnvPool(url, size=size)
        clients = set()

        async def episode() -> list[ToolResult]:
            async with pool.session() as client:
                clients.add(id(client))
                return await play(client, MEND, SUBMIT)

        results = await asyncio.gather(*(episode() for _ in range(12)))
        await pool.close()
        return results, len(clients)

    results, num_clients = run(crowd())
    assert [episode[-1].reward for episode in results] == [1.0] * 12
    assert num_clients <= most


async def open_when_possible(url: str) -> CodingEnvClient:
    """The sessions of the test before may not be gone yet."""
    while True:
        with contextlib.suppress(AtCapacity):
            return await open_session(url)
        await asyncio.sleep(0.02)


def test_a_full_server_refuses_at_once_without_a_pool_and_by_a_deadline_with_one(
    small_server: Server,
) -> None:
    url = small_server.url

    async def crowd() -> float | None:
        held = [await open_when_possible(url) for _ in range(2)]
        with pytest.raises(AtCapacity):
            await open_session(url)
        with pytest.raises(EnvironmentLost, match=r"no session within [\d.]+ s.*capacity"):
            async with EnvPool(url, size=1, wait_s=10.0, full_s=2.0).session():
                pass
        patient = asyncio.create_task(episode_when_there_is_room())
        await asyncio.sleep(0.1)
        held[0].abandon()
        reward = await patient
        held[1].abandon()
        return reward

    async def episode_when_there_is_room() -> float | None:
        pool = EnvPool(url, size=1)
        async with pool.session() as client:
            results = await play(client, MEND, SUBMIT)
        await pool.close()
        return results[-1].reward

    assert run(crowd()) == 1.0


def test_the_pool_replaces_what_an_unfinished_episode_leaves(server: Server) -> None:
    async def attempt() -> bool:
        pool = EnvPool(server.url, size=1)
        async with pool.session() as first:
            await play(first, READ)
        async with pool.session() as second:
            fresh = second is not first and not first.alive
            await play(second, SUBMIT)
        async with pool.session() as third:
            kept = third is second
        await pool.close()
        return fresh and kept

    assert run(attempt())


def test_a_killed_server_is_an_environment_lost_at_every_further_use(tmp_path: Path) -> None:
    with running_server(tmp_path) as server:

        async def attempt() -> int:
            client = await open_session(server.url)
            await play(client)
            step = asyncio.create_task(client.step(bash("sleep 20")))
            await asyncio.sleep(0.2)
            server.process.kill()
            with pytest.raises(EnvironmentLost):
                await step
            for _ in range(2):
                with pytest.raises(EnvironmentLost):
                    await client.reset(task_id=TASK.task_id)
            assert not client.reusable
            with pytest.raises(EnvironmentLost):
                await open_session(server.url)
            return 1

        assert run(attempt())


def test_a_timeout_loses_the_session_instead_of_pairing_late_answers(server: Server) -> None:
    async def attempt() -> None:
        client = CodingEnvClient(server.url)
        await play(client)
        client._answer_s = 0.3
        with pytest.raises(EnvironmentLost, match="in time"):
            await client.step(bash("sleep 20"))
        with pytest.raises(EnvironmentLost):
            await client.step(READ)

    run(attempt())


def test_a_cancelled_call_loses_the_session(server: Server) -> None:
    async def attempt() -> None:
        client = await open_session(server.url)
        await play(client)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.step(bash("sleep 20")), 0.2)
        with pytest.raises(EnvironmentLost):
            await client.step(READ)

    run(attempt())


def test_two_calls_at_once_are_refused(server: Server) -> None:
    async def attempt() -> ToolResult:
        client = await open_session(server.url)
        await play(client)
        first = asyncio.create_task(client.step(bash("sleep 2; echo one")))
        while not client._busy:  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.01)
        with pytest.raises(RuntimeError, match="one call at a time"):
            await client.step(bash("echo two"))
        result: ToolResult = (await first).observation
        await client.close()
        return result

    assert run(attempt()).output == "one\n"


def test_a_session_that_goes_away_takes_its_sandbox_with_it(server: Server) -> None:
    before = at_rest(server)

    async def attempt() -> bool:
        client = await open_session(server.url)
        await play(client, READ)
        held = descendants(server.process.pid) - before
        client.abandon()
        return bool(held)

    assert run(attempt())
    assert eventually(lambda: descendants(server.process.pid) <= before)


def eventually(holds: Callable[[], bool], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_sigterm_closes_all_sandboxes_and_returns(tmp_path: Path) -> None:
    left: set[int] = set()
    with running_server(tmp_path) as server:

        async def attempt() -> None:
            client = await open_session(server.url)
            await play(client)
            step = asyncio.create_task(client.step(bash("sleep 200")))
            while not sleeping(server):  # noqa: ASYNC110 - nothing announces it
                await asyncio.sleep(0.02)
            left.update(descendants(server.process.pid))
            server.process.terminate()
            with contextlib.suppress(EnvironmentLost):
                assert is_infra((await step).observation)
            client.abandon()

        run(attempt())
        output = server.process.communicate(timeout=100)[0]
        assert server.process.returncode == 0
        assert "Traceback" not in output
        assert left
        assert eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in left))
        assert not (tmp_path / "ready").exists()


def test_a_taken_port_is_one_clear_line() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with (
            LocalProvider() as provider,
            pytest.raises(PortTaken, match=f"port {port} on 127.0.0.1 is taken"),
        ):
            serve(provider, port=port)


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [(None, True), ("http://localhost:8000", True), ("http://evil.example", False), ("null", False)],
)
def test_pages_of_other_hosts_are_refused(server: Server, origin: str | None, allowed: bool) -> None:
    async def attempt() -> bool:
        url = server.url.replace("http", "ws") + "/ws"
        page = websockets.connect(url, origin=websockets.Origin(origin) if origin else None)
        with contextlib.suppress(websockets.InvalidStatus):
            async with page as ws:
                await ws.send(json.dumps({"type": "state"}))
                return bool(json.loads(await ws.recv())["type"] == "state")
        return False

    assert run(attempt()) is allowed


def test_the_server_speaks_openenv(server: Server) -> None:
    def get(path: str) -> dict[str, Any]:
        with urllib.request.urlopen(server.url + path, timeout=10) as response:
            answer: dict[str, Any] = json.load(response)
            return answer

    assert get("/health")["status"] == "healthy"
    assert get("/metadata")["name"] == "hintloop"
    assert "arguments" in get("/schema")["action"]["properties"]


def main() -> None:
    ready, port, max_sessions = sys.argv[1:]
    tools.MAX_BASH_SECONDS = 300.0  # longer than any test: only what it asks about ends a command
    serve(LocalProvider(), port=int(port), max_sessions=int(max_sessions), ready_file=Path(ready))


if __name__ == "__main__":
    main()
