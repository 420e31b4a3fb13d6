"""Trying what the agent did not do: states of an episode that stay at hand, and calls in copies of them.

A state is copied (``Sandbox.fork``) as late as can be: only before a call that could change it, and once for
steps that have it in common. The episode itself never notices; a state that could not be copied is missing, which
whoever wants to try something there is told.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import structlog

from hintloop.envs.errors import Cause, tool_error
from hintloop.envs.grading.grade import has_visible_tests, run_visible
from hintloop.envs.grading.result import VisibleResult
from hintloop.envs.models import ToolCall, ToolResult, Trial
from hintloop.envs.sandbox.base import Sandbox, SandboxDead, SandboxProvider
from hintloop.envs.task import RepositoryTests, Task
from hintloop.envs.tools import ToolBox, failure

MAX_KEPT = 8
"""States of one episode at the same time at most; what comes later is not kept."""
_READS = frozenset({"read_file"})
"""Tools that change nothing."""
_WRITES = frozenset({"write_file", "edit_file", "run_tests", "submit"})
"""Tools that have changed nothing when what they give is an error of the agent."""
_COUNTS = re.compile(r"(\d+) (passed|failed|errors?)\b")
"""As pytest ends its output; the last mention counts."""
_log = structlog.get_logger(__name__)


class Trials:
    """The kept states of one episode."""

    def __init__(self, task: Task, provider: SandboxProvider, open_tools: Callable[[Sandbox], ToolBox]):
        """``open_tools`` gives the task's tools in another sandbox."""
        self._task = task
        self._provider = provider
        self._open_tools = open_tools
        self._kept: dict[int, Sandbox] = {}
        self._here: list[int] = []
        """Steps before which the state was as it still is."""

    def before(self, step: int, call: ToolCall, sandbox: Sandbox) -> None:
        """To be called before step number ``step`` executes ``call``."""
        risky = _changes(call) and call.name not in _WRITES
        wanted = call.keep == "always" or (call.keep == "on_error" and risky)
        if wanted and self._room():
            self._here.append(step)
        if _changes(call):
            self.copy(sandbox)

    def after(self, step: int, call: ToolCall, result: ToolResult) -> None:
        """To be called after it, with what it gave."""
        if call.keep != "on_error":
            return
        failed = result.error is not None and result.error.cause is Cause.MODEL
        risky = _changes(call) and call.name not in _WRITES
        if not risky and failed and self._room():
            self._here.append(step)
        elif risky and not failed:
            self._drop(step)

    def copy(self, sandbox: Sandbox) -> None:
        """Copy the state as it is for the steps that want it; to be called before the sandbox is closed, too."""
        steps, self._here = self._here, []
        if not steps:
            return
        try:
            made = sandbox.fork()
        except (SandboxDead, OSError) as error:
            _log.warning("state_not_kept", task_id=self._task.task_id, error=str(error))
            return
        self._kept |= dict.fromkeys(steps, made)

    def run(self, call: ToolCall, trial: Trial, sandbox: Sandbox | None) -> ToolResult:
        """Try a call; ``sandbox`` is the episode's own, None when that is over.

        ``ValueError`` when the state was not kept. What breaks meanwhile is an infrastructure failure in the result.
        """
        if trial.before in self._here and sandbox is not None:
            self.copy(sandbox)
        kept = self._kept.get(trial.before)
        if kept is None:
            raise ValueError(f"the state before step {trial.before} was not kept")
        try:
            result = self._try(call, trial, kept)
        except (SandboxDead, OSError, ValueError) as error:
            _log.warning("trial_failed", task_id=self._task.task_id, error=str(error))
            result = failure(tool_error("connection_error", "the trial failed"))
        return result.model_copy(update={"done": sandbox is None})

    def close(self) -> None:
        """Forget every state."""
        for kept in self._kept.values():
            kept.close()
        self._kept, self._here = {}, []

    def _try(self, call: ToolCall, trial: Trial, kept: Sandbox) -> ToolResult:
        copy = kept.fork()
        try:
            tools = self._open_tools(copy)
            calls = [call, *map(ToolCall.model_validate, trial.then)]
            result = _result_of([tools.call(each) for each in calls])
            parts = {}
            if trial.tests and has_visible_tests(self._task):
                parts["visible"] = visible_share(self._task, run_visible(self._provider, self._task, copy))
        finally:
            copy.close()
        return result.model_copy(update={"reward_parts": parts})

    def _room(self) -> bool:
        return len(self._kept) + len(self._here) < MAX_KEPT

    def _drop(self, step: int) -> None:
        dropped = self._kept.pop(step, None)
        if dropped is not None and dropped not in self._kept.values():
            dropped.close()


def _result_of(results: Sequence[ToolResult]) -> ToolResult:
    """That of several calls together: the first error, a failing test only where nothing else failed; or the last."""
    failed = [result for result in results if result.error is not None]
    worse = [result for result in failed if result.error and result.error.cause is not Cause.USER]
    return [*worse, *failed, results[-1]][0]


def visible_share(task: Task, result: VisibleResult) -> float:
    """The share of the visible tests that pass. A command's own tests are counted where it says their numbers."""
    if result.passed:
        return 1.0
    if isinstance(task.tests, RepositoryTests):
        counts = {word: int(count) for count, word in _COUNTS.findall(result.output)}
        total = sum(counts.values())
        return counts.get("passed", 0) / total if total else 0.0
    passed, _, total_text = result.output.partition(" pass")[0].partition("/")
    return int(passed) / int(total_text)


def _changes(call: ToolCall) -> bool:
    """Whether the call could change the state."""
    return call.malformed is None and call.name not in _READS
