"""The environment as other OpenEnv clients know one: its tools over MCP too, and a task when none is named."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hintloop.envs.environment import CodingEnvironment
from hintloop.envs.models import ToolCall, ToolResult
from hintloop.envs.registry import load_taskset
from hintloop.envs.sandbox.base import SandboxProvider
from hintloop.envs.tools import TOOLS

DEFAULT_TASKSET = "bugfix"


class OpenEnvironment(CodingEnvironment):
    """A ``CodingEnvironment`` whose tools can be called over MCP, beside ``step``, in the same episode."""

    def __init__(self, provider: SandboxProvider, taskset: str = DEFAULT_TASKSET):
        """``taskset``: where a ``reset`` without a task id draws from."""
        super().__init__(provider)
        self._taskset = taskset
        self._lock = threading.Lock()  # MCP and the session's own socket may call at the same time
        self.mcp_client = McpTools(self.step)

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, task_id: str = "", **_: Any
    ) -> ToolResult:
        """As ``CodingEnvironment.reset``; without ``task_id`` a training task, the same for the same ``seed``."""
        with self._lock:
            try:
                task_id = task_id or _draw(self._taskset, seed)
            except Exception as error:  # noqa: BLE001 - recorded; what a task set raises must not reach the client
                return self._infra_failure(error)
            result = super().reset(seed, episode_id, task_id)
            if result.task is not None:
                self.mcp_client.specs = result.task.tools
            return result

    def step(self, action: ToolCall, timeout_s: float | None = None, **_: Any) -> ToolResult:
        """As ``CodingEnvironment.step``."""
        with self._lock:
            return super().step(action)

    def close(self) -> None:
        """As ``CodingEnvironment.close``; waits for a tool that runs."""
        self.mcp_client.close()
        with self._lock:
            super().close()


class McpTools:
    """What OpenEnv's server asks at ``tools/list`` and ``tools/call``: to it, a connected FastMCP client."""

    def __init__(self, step: Callable[[ToolCall], ToolResult]):
        self.specs: Sequence[dict[str, Any]] = list(TOOLS.values())
        """Of all tools at first, then of those that the episode's task has."""
        self._step = step
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mcp")  # the server's own threads are few

    async def __aenter__(self) -> McpTools:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Nothing is held."""

    def is_connected(self) -> bool:
        """Always: there is nothing to connect to."""
        return True

    async def list_tools(self) -> list[dict[str, Any]]:
        """The tools as MCP describes them."""
        return [
            {"name": spec["name"], "description": spec["description"], "inputSchema": spec["parameters"]}
            for spec in self.specs
        ]

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """One step. ``data`` is the ``ToolResult``, reward and all; the keys are those of FastMCP's results."""
        call = ToolCall(name=name, arguments=arguments)
        result = await asyncio.get_running_loop().run_in_executor(self._thread, self._step, call)
        return {
            "content": [{"type": "text", "text": result.output}],
            "data": result.model_dump(mode="json"),
            "is_error": result.error is not None,
        }

    def close(self) -> None:
        """No call is taken from now on."""
        self._thread.shutdown(wait=False)


def _draw(taskset: str, seed: int | None) -> str:
    splits = load_taskset(taskset).splits()
    tasks = splits.get("train") or next(tasks for tasks in splits.values() if tasks)
    return random.Random(seed).choice(tasks)
