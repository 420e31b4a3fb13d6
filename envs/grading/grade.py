"""Tests of every kind, by one call each: what the agent sees of them, and what its work is worth."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hintloop.envs.grading import assertions, functions, repository
from hintloop.envs.grading.result import Grade, VisibleResult
from hintloop.envs.sandbox.base import SandboxDead, SandboxProvider
from hintloop.envs.task import AssertTests, FunctionTests, RepositoryTests, Script, Task

if TYPE_CHECKING:
    from hintloop.envs.tools import Workspace


def has_visible_tests(task: Task) -> bool:
    """Whether the agent may run tests."""
    return isinstance(task.tests, FunctionTests) or bool(task.tests.visible)


def max_seconds(task: Task) -> float:
    """How long a grading may take, all its runs of tests and solution together."""
    match task.tests:
        case RepositoryTests(script=script):
            solution = task.solution.timeout if isinstance(task.solution, Script) else 0.0
            return repository.MAX_RUNS * script.timeout + solution
        case AssertTests():
            return assertions.MAX_SECONDS
        case FunctionTests():
            return functions.GRADE_SECONDS


def grade(provider: SandboxProvider, task: Task, files: Mapping[str, str | None]) -> Grade:
    """Grade what was handed in, by the hidden tests; see ``handin.Files``. Raises ``SandboxDead``.

    Where the kernel lets code end its own sandbox (gVisor's does), that is 0, with ``killed`` in the parts: it dies
    with this work and lives without it, twice. ``ValueError`` for a task that cannot be graded at all.
    """
    for _ in range(2):
        try:
            return _grade(provider, task, files)
        except SandboxDead:
            _grade(provider, task, {})
    return Grade(0.0, {"tests": 0.0, "killed": 1.0})


def _grade(provider: SandboxProvider, task: Task, files: Mapping[str, str | None]) -> Grade:
    match task.tests:
        case RepositoryTests() as tests:
            return repository.grade(provider, task, tests, files)
        case AssertTests() as tests:
            return assertions.grade(provider, task, tests, _present(files))
        case FunctionTests() as tests:
            return functions.grade(provider, task, tests, _present(files))


def run_visible(provider: SandboxProvider | None, task: Task, sandbox: Workspace) -> VisibleResult:
    """Run the visible tests where the agent works. Raises ``SandboxDead``.

    Only assertions need ``provider``. ``ValueError`` when the task has no visible tests, or they cannot run.
    """
    match task.tests:
        case RepositoryTests() as tests:
            return repository.run_visible(tests, sandbox)
        case AssertTests() as tests:
            if provider is None:
                raise ValueError(f"the visible tests of {task.task_id} need a sandbox of their own")
            return assertions.run_visible(provider, task, tests, sandbox)
        case FunctionTests() as tests:
            return functions.run_visible(sandbox, tests)


def _present(files: Mapping[str, str | None]) -> dict[str, str]:
    return {path: text for path, text in files.items() if text is not None}
