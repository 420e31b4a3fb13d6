"""The environment for the ``environment_factory`` of TRL's trainers.

``GRPOTrainer(environment_factory=partial(TrlEnvironment, url), train_dataset=rows)`` with rows of ``prompt`` and
``task_id``. TRL makes one object per rollout, resets it with a row, and offers its public methods as tools; so
this class has no other public methods, and their docstrings are what the model reads. TRL itself answers calls of
unknown tools and unknown arguments; the server never sees those, and they cost no turn.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from hintloop.envs.client import MESSAGE_TIMEOUT_S, WAIT_S, CodingEnvClient, EnvironmentLost
from hintloop.envs.errors import Cause
from hintloop.envs.models import CodingState, ToolCall, ToolResult

if TYPE_CHECKING:
    from openenv.core.sync_client import SyncEnvClient

_RETRY_S = 0.5
_LOST = "error: the environment is gone"
_OVER = "error: the episode is over"


class TrlEnvironment:
    """One session with an environment server, which it opens when it is needed; a context manager closes it."""

    def __init__(self, url: str, *, message_timeout_s: float = MESSAGE_TIMEOUT_S, wait_s: float = WAIT_S):
        """``wait_s``: how long ``reset`` tries to get a session and a sandbox."""
        self._url = url
        self._message_timeout_s = message_timeout_s
        self._wait_s = wait_s
        self._client: SyncEnvClient[ToolCall, ToolResult, CodingState] | None = None
        self.result: ToolResult | None = None
        """The newest result of the episode; None when the environment was lost."""

    def reset(self, task_id: str = "", **_: Any) -> str:
        """Start an episode; returns the task's instruction. The server draws a task when none is named.

        Raises ``Refused`` for an unknown task, and ``EnvironmentLost`` when there is no episode in time.
        """
        deadline = time.monotonic() + self._wait_s
        while True:
            try:
                self.result = self._open().reset(task_id=task_id).observation
                problem = self.result.output
            except EnvironmentLost as error:
                self._leave()
                problem = str(error)
            if self.result is not None and self.result.task is not None:
                return self.result.task.instruction
            if time.monotonic() > deadline:
                raise EnvironmentLost(f"no episode within {self._wait_s:g} s: {problem}")
            time.sleep(_RETRY_S)

    def read_file(self, path: str) -> str:
        """Show a file with line numbers.

        Args:
            path: File in the working directory.
        """
        return self._call("read_file", path=path)

    def write_file(self, path: str, content: str) -> str:
        """Write a whole file.

        Args:
            path: File in the working directory.
            content: All of its text.
        """
        return self._call("write_file", path=path, content=content)

    def edit_file(self, path: str, old: str, new: str, line: int | None = None) -> str:
        """Replace the text `old` by `new`, within line number `line` if given, else where `old` occurs once.

        Args:
            path: File in the working directory.
            old: Text to replace.
            new: Text to put there.
            line: Number of the line, from 1.
        """
        place = {} if line is None else {"line": line}
        return self._call("edit_file", path=path, old=old, new=new, **place)

    def bash(self, command: str) -> str:
        """Run a shell command in the working directory.

        Args:
            command: The command.
        """
        return self._call("bash", command=command)

    def run_tests(self) -> str:
        """Run the visible tests."""
        return self._call("run_tests")

    def submit(self) -> str:
        """Hand in the work and end the episode."""
        return self._call("submit")

    def get_reward(self) -> float | None:
        """The episode's reward, 0 when nothing was handed in; None, which TRL masks, when the environment failed."""
        result = self.result
        if result is None or (result.error is not None and result.error.cause is Cause.INFRA):
            return None
        return 0.0 if result.reward is None else float(result.reward)

    def __enter__(self) -> TrlEnvironment:
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()

    def _call(self, name: str, **arguments: Any) -> str:
        if self.result is None or self._client is None:
            return _LOST
        if self.result.done:
            return _OVER
        try:
            self.result = self._client.step(ToolCall(name=name, arguments=arguments)).observation
        except EnvironmentLost:
            self._leave()
            return _LOST
        return self.result.output

    def _open(self) -> SyncEnvClient[ToolCall, ToolResult, CodingState]:
        self.result = None
        if self._client is None:
            self._client = CodingEnvClient(self._url, message_timeout_s=self._message_timeout_s).sync()
        return self._client

    def _leave(self) -> None:
        client, self._client, self.result = self._client, None, None
        if client is not None:
            client.close()
