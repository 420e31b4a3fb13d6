"""Tasks, and the registry that finds them by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


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
class Task:
    """One coding task. ``solution`` is the reference (path -> content); it never leaves the server."""

    task_id: str
    instruction: str
    files: dict[str, str]
    tests: FunctionTests
    solution: dict[str, str]
    max_turns: int = 8
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


_LOADERS: dict[str, Callable[[], TaskSet]] = {}
_LOADED: dict[str, TaskSet] = {}


def register_taskset(name: str, loader: Callable[[], TaskSet]) -> None:
    """Make a task set known by name; ``loader`` runs at its first use. ``ValueError`` when the name is taken."""
    if name in _LOADERS:
        raise ValueError(f"task set {name!r} is registered already")
    _LOADERS[name] = loader


def taskset_names() -> list[str]:
    """The names of all registered task sets, sorted; the bundled ones are always among them."""
    import hintloop.envs.tasksets  # noqa: F401 - registers the bundled sets; at the top it would be a cycle

    return sorted(_LOADERS)


def load_taskset(name: str) -> TaskSet:
    """The task set of that name. ``KeyError`` with the known names when there is none."""
    if name not in _LOADED:
        known = taskset_names()
        if name not in known:
            raise KeyError(f"no task set {name!r}; known: {', '.join(known)}")
        _LOADED[name] = _LOADERS[name]()
    return _LOADED[name]


def get_task(task_id: str) -> Task:
    """A task by its full id ``<set>/<rest>``. ``KeyError`` says what is missing."""
    try:
        return load_taskset(task_id.partition("/")[0]).get(task_id)
    except KeyError as error:
        raise KeyError(f"no task {task_id!r}: {error.args[0]}") from None
