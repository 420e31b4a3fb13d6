"""The tools over OpenEnv's MCP surface: the same schemas, the same results, the same episode."""

from __future__ import annotations

import itertools
import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openenv.core.env_server.mcp_types import RESERVED_TOOL_NAMES
from openenv.core.mcp_client import MCPToolClient
from websockets.sync.client import ClientConnection, connect

from hintloop.envs.mcp_tools import OpenEnvironment
from hintloop.envs.models import ToolCall, ToolResult
from hintloop.envs.registry import get_task
from hintloop.envs.sandbox.local import LocalProvider
from hintloop.envs.tools import TOOLS

from .serving import MENDED, PATH, TASK, serving

_IDS = itertools.count()
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("read_file", {"path": PATH}),
    ("red_file", {"path": PATH}),
    ("edit_file", {"path": PATH, "old": "no such text", "new": ""}),
    ("run_tests", {}),
    ("bash", {"command": "echo x; exit 3"}),
    ("write_file", {"path": PATH, "content": MENDED}),
    ("submit", {}),
]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("mcp")) as running:
        yield running


def rpc(url: str, method: str, **params: Any) -> dict[str, Any]:
    body = {"jsonrpc": "2.0", "id": next(_IDS), "method": method, "params": params}
    request = urllib.request.Request(
        f"{url}/mcp", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: dict[str, Any] = json.load(response)
    assert answer["id"] == body["id"]
    return answer


def ask(socket: ClientConnection, kind: str, data: dict[str, Any] | None = None) -> dict[str, Any]:
    socket.send(json.dumps({"type": kind} if data is None else {"type": kind, "data": data}))
    answer: dict[str, Any] = json.loads(socket.recv(60))
    assert answer["type"] != "error", answer
    found: dict[str, Any] = answer["data"]
    return found


def without_clock(result: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in result.items() if name != "seconds"}


def test_tools_list_has_every_tool_with_its_schema(url: str) -> None:
    tools = rpc(url, "tools/list")["result"]["tools"]
    assert {tool["name"]: tool["inputSchema"] for tool in tools} == {
        name: spec["parameters"] for name, spec in TOOLS.items()
    }
    assert [tool["description"] for tool in tools] == [spec["description"] for spec in TOOLS.values()]
    assert not RESERVED_TOOL_NAMES & TOOLS.keys()


def test_a_call_over_mcp_gives_what_a_step_gives(url: str) -> None:
    by_step, by_mcp = [], []
    with connect(url.replace("http", "ws") + "/ws") as socket:
        ask(socket, "reset", {"task_id": TASK.task_id})
        for name, arguments in CALLS:
            data = ask(socket, "step", {"name": name, "arguments": arguments})
            by_step.append({**data["observation"], "reward": data["reward"], "done": data["done"]})
    with MCPToolClient(base_url=url).sync() as client:
        client.reset(task_id=TASK.task_id)
        for name, arguments in CALLS:
            by_mcp.append(client.call_tool(name, **arguments))
    assert [without_clock(result) for result in by_mcp] == [without_clock(result) for result in by_step]
    assert by_mcp[-1]["reward"] == 1.0
    assert ToolResult.model_validate(by_mcp[1]).error is not None


def test_steps_and_calls_share_one_episode(url: str) -> None:
    session = rpc(url, "openenv/session/create")["result"]["session_id"]
    with connect(f"{url.replace('http', 'ws')}/ws?session_id={session}") as socket:
        ask(socket, "reset", {"task_id": TASK.task_id, "episode_id": "shared"})
        ask(socket, "step", {"name": "write_file", "arguments": {"path": "a", "content": "from step"}})
        called = rpc(url, "tools/call", session_id=session, name="read_file", arguments={"path": "a"})
        inline = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "run_tests"}}
        tested = ask(socket, "mcp", inline)
        assert ask(socket, "state")["step_count"] == 3
    assert called["result"]["content"] == [{"type": "text", "text": "1: from step"}]
    assert not called["result"]["is_error"]
    assert tested["result"]["is_error"]
    assert tested["result"]["data"]["error"]["kind"] == "test_failure"
    assert rpc(url, "openenv/session/close", session_id=session)["result"]["closed"]
    assert "error" in rpc(url, "tools/call", session_id=session, name="submit")


def test_a_call_without_an_episode_is_an_infrastructure_failure(url: str) -> None:
    data = rpc(url, "tools/call", name="submit")["result"]["data"]
    assert data["error"]["cause"] == "infra"
    assert data["reward"] is None


@pytest.mark.parametrize("params", [{}, {"name": "bash", "arguments": []}, {"name": 3}])
def test_what_is_no_call_is_an_error_of_the_protocol(url: str, params: dict[str, Any]) -> None:
    assert "error" in rpc(url, "tools/call", **params)


def test_calls_and_steps_at_the_same_time_take_turns() -> None:
    with LocalProvider() as provider:
        env = OpenEnvironment(provider)
        env.reset(task_id=TASK.task_id)
        script = "if [ -e busy ]; then echo overlap; fi; touch busy; sleep 0.05; rm busy"
        call = ToolCall(name="bash", arguments={"command": script})
        with ThreadPoolExecutor(4) as threads:
            outputs = [result.output for result in threads.map(env.step, [call] * 6)]
        assert outputs == [""] * 6
        assert env.state.step_count == 6
        env.close()


def test_a_reset_without_a_task_id_draws_a_training_task_by_seed() -> None:
    with LocalProvider() as provider:
        env = OpenEnvironment(provider)
        drawn = [env.reset(seed=seed).task for seed in (1, 1, 2)]
        env.close()
    ids = [info.task_id for info in drawn if info is not None]
    assert ids[0] == ids[1] != ids[2]
    assert all(get_task(task_id).task_id == task_id for task_id in ids)


def test_a_broken_task_set_is_an_infrastructure_failure() -> None:
    with LocalProvider() as provider:
        env = OpenEnvironment(provider, "no-such-set")
        result = env.reset()
        env.close()
    assert result.done
    assert result.error is not None
    assert "no-such-set" not in result.model_dump_json()
