"""The coding environment: one session of episodes, each in a sandbox of its own.

Failures of the agent are data in its results. Failures of the machinery end the episode with ``reward`` None
and an error whose cause is ``infra``; they are never scored, and their details stay in the server's log.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import structlog

from hintloop.envs._openenv import Environment, EnvironmentMetadata
from hintloop.envs.errors import tool_error
from hintloop.envs.grading.functions import grade
from hintloop.envs.models import CodingState, TaskInfo, ToolCall, ToolResult
from hintloop.envs.sandbox.base import Sandbox, SandboxDead, SandboxProvider
from hintloop.envs.task import Task, get_task
from hintloop.envs.tools import TOOL_PROMPT, TOOLS, ToolBox, failure


@dataclass(frozen=True, slots=True)
class _Running:
    """What an unfinished episode holds."""

    task: Task
    sandbox: Sandbox
    tools: ToolBox


class CodingEnvironment(Environment[ToolCall, ToolResult, CodingState]):
    """One session: any number of episodes, one after the other."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, provider: SandboxProvider):
        super().__init__()
        self._provider = provider
        self._running: _Running | None = None
        self._closed = False
        self._state = CodingState(isolation=provider.isolation)

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, task_id: str = "", **_: Any
    ) -> ToolResult:
        """Start an episode of the task. ``ValueError`` when there is none; the client gets its text."""
        self._end()
        try:
            task = get_task(str(task_id))
        except KeyError as error:
            raise ValueError(error.args[0]) from None
        except Exception as error:  # noqa: BLE001 - recorded; what a task set raises must not reach the client
            return self._infra_failure(error)
        self._state = CodingState(
            episode_id=episode_id or uuid4().hex, task_id=task.task_id, isolation=self._provider.isolation
        )
        try:
            return self._start(task)
        except Exception as error:  # noqa: BLE001 - recorded; nothing of it may reach the client
            return self._infra_failure(error)

    def step(self, action: ToolCall, timeout_s: float | None = None, **_: Any) -> ToolResult:
        """Execute one tool call; ``submit`` and the last of the task's turns end the episode with its reward.

        Without a running episode (never reset, over, or a new connection after a lost one) the result is an
        infrastructure failure. ``timeout_s`` is not used: every tool has its own limit.
        """
        running = self._running
        if running is None:
            return _broken("no episode is running: reset first")
        try:
            return self._step(running, action)
        except Exception as error:  # noqa: BLE001 - recorded; nothing of it may reach the client
            return self._infra_failure(error)

    @property
    def state(self) -> CodingState:
        """State of the newest episode."""
        return self._state

    def get_metadata(self) -> EnvironmentMetadata:
        """Name and description for OpenEnv's catalogue."""
        return EnvironmentMetadata(
            name="hintloop", description="coding tasks in sandboxes, with typed tool errors"
        )

    def close(self) -> None:
        """End the session for good; a later ``reset`` is refused, for nobody would close its sandbox."""
        self._closed = True
        self._end()

    def _start(self, task: Task) -> ToolResult:
        if self._closed:
            return _broken("the session is closed")
        sandbox = self._provider.start(dict(task.files))
        self._running = _Running(task, sandbox, ToolBox(task, sandbox))
        info = TaskInfo(
            task_id=task.task_id,
            instruction=task.instruction,
            files=sorted(task.files),
            tools=list(TOOLS.values()),
            tool_prompt=TOOL_PROMPT,
            max_turns=task.max_turns,
        )
        return ToolResult(output=task.instruction, task=info)

    def _step(self, running: _Running, action: ToolCall) -> ToolResult:
        self._state.step_count += 1
        result = running.tools.call(action) if _is_text(action) else _NOT_TEXT
        submitted = action.malformed is None and action.name == "submit" and result.error is None
        if submitted or self._state.step_count >= running.task.max_turns:
            return self._finish(running, result, submitted)
        return result

    def _finish(self, running: _Running, result: ToolResult, submitted: bool) -> ToolResult:
        """Grade what the agent leaves, with nothing of it alive. Only work that was handed in can earn."""
        files = _handed_in(running)
        self._end()
        grading = grade(self._provider, running.task, files)
        parts = {**grading.parts, "submitted": float(submitted)}
        reward = grading.reward if submitted else 0.0
        return result.model_copy(update={"done": True, "reward": reward, "reward_parts": parts})

    def _end(self) -> None:
        if self._running is not None:
            self._running.sandbox.close()
            self._running = None

    def _infra_failure(self, error: Exception) -> ToolResult:
        expected = isinstance(error, SandboxDead | OSError)
        log = structlog.get_logger().bind(task_id=self._state.task_id, episode_id=self._state.episode_id)
        log.error("the environment failed", error=repr(error), exc_info=None if expected else error)
        self._end()
        return _broken("the sandbox is gone" if expected else "the environment failed")


def _broken(message: str) -> ToolResult:
    return failure(tool_error("connection_error", message)).model_copy(update={"done": True})


_NOT_TEXT = failure(tool_error("type_error", "the call is not valid Unicode text"))


def _is_text(action: ToolCall) -> bool:
    """Whether the call can be written as UTF-8; a JSON escape can make half of a surrogate pair."""
    try:
        action.model_dump_json()
    except ValueError:
        return False
    return True


def _handed_in(running: _Running) -> dict[str, str]:
    """The task's files as the agent leaves them; those that are gone or unreadable are left out."""
    files = {}
    for path in sorted({*running.task.files, running.task.tests.path}):
        try:
            files[path] = running.sandbox.read(path).decode()
        except (FileNotFoundError, PermissionError, UnicodeDecodeError):
            continue
    return files
