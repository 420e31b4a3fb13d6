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
from hintloop.envs.grading.grade import grade, max_seconds
from hintloop.envs.grading.handin import hand_in
from hintloop.envs.models import CodingState, TaskInfo, ToolCall, ToolResult, Trial
from hintloop.envs.registry import get_task
from hintloop.envs.rubric import NOT_A_CALL, EpisodeRubric
from hintloop.envs.sandbox.base import Sandbox, SandboxDead, SandboxProvider, Unsupported
from hintloop.envs.task import Task
from hintloop.envs.tools import MAX_BASH_SECONDS, ToolBox, failure, tool_prompt
from hintloop.envs.trials import Trials


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
        super().__init__(rubric=EpisodeRubric())
        self._provider = provider
        self._running: _Running | None = None
        self._calls = 0
        """Of the episode's steps, those that called a tool."""
        self._trials: Trials | None = None
        self._closed = False
        self._state = CodingState(isolation=provider.isolation)

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, task_id: str = "", **_: Any
    ) -> ToolResult:
        """Start an episode of the task.

        ``ValueError`` when there is none, or one for other sandboxes than this server's; the client gets its text.
        """
        self._end()
        self._forget()
        self._reset_rubric()
        self._calls = 0
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
        except Unsupported as error:
            raise ValueError(f"task {task.task_id!r} cannot run here: {error}") from None
        except Exception as error:  # noqa: BLE001 - recorded; nothing of it may reach the client
            return self._infra_failure(error)

    def step(self, action: ToolCall, timeout_s: float | None = None, **_: Any) -> ToolResult:
        """Execute one tool call; ``submit`` and the last of the task's turns end the episode with its reward.

        Without a running episode (never reset, over, or a new connection after a lost one) the result is an
        infrastructure failure. ``timeout_s`` is not used: every tool has its own limit. A call with ``trial`` is
        none of the agent's and changes nothing; ``ValueError`` when it cannot be tried.
        """
        running = self._running
        if action.trial is not None:
            return self._try(running, action, action.trial)
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
        self._forget()

    def _start(self, task: Task) -> ToolResult:
        if self._closed:
            return _broken("the session is closed")
        sandbox = self._provider.start(dict(task.files), task.sandbox)
        tools = ToolBox(task, sandbox, self._provider)
        self._running = _Running(task, sandbox, tools)
        self._trials = Trials(task, self._provider, lambda copy: ToolBox(task, copy, self._provider))
        info = TaskInfo(
            task_id=task.task_id,
            instruction=task.instruction,
            files=sorted(task.files) if task.sandbox.image is None else sandbox.list_files(),
            tools=list(tools.specs.values()),
            tool_prompt=tool_prompt(task),
            max_turns=task.max_turns,
            max_step_seconds=MAX_BASH_SECONDS + max_seconds(task),
        )
        return ToolResult(output=task.instruction, task=info)

    def _step(self, running: _Running, action: ToolCall) -> ToolResult:
        self._state.step_count += 1
        trials, step = self._trials, self._state.step_count
        assert trials is not None
        trials.before(step, action, running.sandbox)
        call = action if action.keep == "no" else action.model_copy(update={"keep": "no"})
        result = running.tools.call(call) if _is_text(action) else _NOT_TEXT
        trials.after(step, action, result)
        self._calls += result.error is None or result.error.kind not in NOT_A_CALL
        submitted = action.malformed is None and action.name == "submit" and result.error is None
        if submitted or step >= running.task.max_turns:
            trials.copy(running.sandbox)
            return self._finish(running, action, result, submitted)
        return result

    def _finish(self, running: _Running, action: ToolCall, result: ToolResult, submitted: bool) -> ToolResult:
        """Grade what the agent leaves, with nothing of it alive. Only work that was handed in can earn."""
        handed_in = hand_in(running.task, running.sandbox)
        self._end()
        grading = grade(self._provider, running.task, handed_in.files)
        steps = self._state.step_count
        parts = {**grading.parts, "submitted": float(submitted), "format": self._calls / steps}
        parts["cost"] = steps / running.task.max_turns
        if handed_in.left_out:
            parts["left_out"] = float(handed_in.left_out)
        graded = result.model_copy(update={"done": True, "reward": grading.reward, "reward_parts": parts})
        return graded.model_copy(update={"reward": self._apply_rubric(action, graded)})

    def _try(self, running: _Running | None, action: ToolCall, trial: Trial) -> ToolResult:
        """``ValueError`` for a state that was not kept; the client gets its text."""
        if self._trials is None or not _is_text(action):
            raise ValueError("there is no episode, or the call is not valid Unicode text")
        return self._trials.run(action, trial, running.sandbox if running else None)

    def _forget(self) -> None:
        if self._trials is not None:
            self._trials.close()
            self._trials = None

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
