"""What a task is. ``hintloop.envs.registry`` finds tasks by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hintloop.envs.sandbox.base import SandboxSpec


@dataclass(frozen=True, slots=True)
class Case:
    """One call of the function under test: JSON-able positional arguments and the expected JSON-able value."""

    args: tuple[Any, ...]
    expected: Any


@dataclass(frozen=True, slots=True)
class FunctionTests:
    """Data-only tests of one function in one file. The expectations never enter a sandbox."""

    path: str
    function: str
    visible: tuple[Case, ...]
    """What ``run_tests`` shows."""
    hidden: tuple[Case, ...]
    """What the reward is computed from."""


@dataclass(frozen=True, slots=True)
class AssertTests:
    """Assertions about one function in one file: Python source that defines ``check(candidate)``.

    They run in a sandbox of their own, which never holds anything of the agent's; what the function returns
    reaches them as data.
    """

    path: str
    function: str
    visible: str
    """What ``run_tests`` shows."""
    hidden: str
    """What the reward is computed from."""


@dataclass(frozen=True, slots=True)
class Script:
    """Files in a folder of their own, outside of the working directory, and a command that runs beside them."""

    files: dict[str, str]
    """Path below the folder (``/tests`` or ``/solution``) -> content."""
    command: str
    timeout: float = 600.0
    """Seconds."""
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RepositoryTests:
    """A script that judges a working directory, in a fresh sandbox that no process of the agent has seen."""

    script: Script
    """Its folder is ``/tests``; it writes ``/logs/verifier/reward.txt`` or ``reward.json``."""
    artifacts: tuple[str, ...] = ()
    """What of the agent's work is graded: files and folders in the working directory; empty: all that changed."""
    visible: str | None = None
    """The command behind ``run_tests``, run where the agent works; None: the agent has no such tool."""


Tests = FunctionTests | AssertTests | RepositoryTests


@dataclass(frozen=True, slots=True)
class Task:
    """One coding task. Its solution never leaves the server, nor do its hidden tests before grading."""

    task_id: str
    instruction: str
    files: dict[str, str]
    """Path in the working directory -> content; bytes that are not UTF-8 are surrogate escapes."""
    tests: Tests
    solution: dict[str, str] | Script
    """Files (path -> content) that replace the task's, or a script whose folder is ``/solution``."""
    max_turns: int = 8
    sandbox: SandboxSpec = field(default_factory=SandboxSpec)
    metadata: dict[str, str] = field(default_factory=dict)


class TaskSet(Protocol):
    """A named collection of tasks in splits. Task ids start with ``<name>/``."""

    name: str
    description: str

    def splits(self) -> dict[str, Sequence[str]]:
        """Split name -> task ids, in a fixed order."""
        ...

    def get(self, task_id: str) -> Task:
        """The task. ``KeyError`` when there is none of that id."""
        ...
