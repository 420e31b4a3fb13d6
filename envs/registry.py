"""Task sets by name: the bundled ones, those of installed packages, those registered from Python, and folders."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType

from hintloop.envs.task import Task, TaskSet

ENTRY_POINTS = "hintloop.tasksets"
"""Group of entry points by which a package offers task sets: name -> a function without arguments that makes one."""
HELD_OUT_SHARE = 0.2

_LOADERS: dict[str, Callable[[], TaskSet]] = {}
_LOADED: dict[str, TaskSet] = {}
_FOUND: dict[Path, str] = {}


def register_taskset(name: str, loader: Callable[[], TaskSet]) -> None:
    """Make a task set known by name; ``loader`` runs at its first use. ``ValueError`` when the name is taken."""
    if not name or "/" in name:
        raise ValueError(f"a task set's name is the part of its task ids before the first '/', not {name!r}")
    if name in _LOADERS:
        raise ValueError(f"task set {name!r} is registered already")
    _LOADERS[name] = loader


def register_task(task: Task) -> None:
    """Make one task known; it joins the set that its id ``<set>/<rest>`` begins with.

    ``ValueError`` for an id without a set, one that is known already, or a set that is no collection of
    registered tasks.
    """
    name, slash, rest = task.task_id.partition("/")
    if not (name and slash and rest):
        raise ValueError(f"a task id is <set>/<name>, not {task.task_id!r}")
    if name not in _LOADERS:
        loose = _Registered(name)
        register_taskset(name, lambda: loose)
        _LOADED[name] = loose
    found = _LOADED.get(name)
    if not isinstance(found, _Registered):
        raise ValueError(f"{name!r} is a task set of its own; a task of yours needs another set")
    found.add(task)


def taskset_names() -> list[str]:
    """The names of all task sets that are known, sorted: bundled, of installed packages, and registered."""
    import hintloop.envs.tasksets  # noqa: F401 - registers the bundled sets; at the top it would be a cycle

    for point in entry_points(group=ENTRY_POINTS):
        if point.name not in _LOADERS:
            register_taskset(point.name, partial(_from_package, point))
    return sorted(_LOADERS)


def load_taskset(name: str) -> TaskSet:
    """The task set of that name. ``KeyError`` with the known names when there is none."""
    if name not in _LOADED:
        known = taskset_names()
        if name not in known:
            raise KeyError(f"no task set {name!r}; known: {', '.join(known)}")
        _LOADED[name] = _LOADERS[name]()
    return _LOADED[name]


def find_taskset(place: str) -> TaskSet:
    """A task set by name, or from a folder of tasks, or from a Python file that registers one.

    What comes from a path is known by its name from then on. ``KeyError`` when there is no such set and
    ``ValueError`` for a path that holds none, or whose name is taken.
    """
    path = Path(place).expanduser()
    if place in taskset_names() or not (path.exists() or "/" in place or path.suffix == ".py"):
        return load_taskset(place)
    path = path.resolve()
    if path not in _FOUND:
        _FOUND[path] = _from_file(path) if path.is_file() else _from_folder(path)
    return load_taskset(_FOUND[path])


def get_task(task_id: str) -> Task:
    """A task by its full id ``<set>/<rest>``. ``KeyError`` says what is missing."""
    try:
        return load_taskset(task_id.partition("/")[0]).get(task_id)
    except KeyError as error:
        raise KeyError(f"no task {task_id!r}: {error.args[0]}") from None


def is_held_out(task_id: str, share: float = HELD_OUT_SHARE) -> bool:
    """Whether a task is in the split ``heldout`` and not in ``train``: decided by a hash of its id alone.

    So a task stays where it is when others come or go.
    """
    number = int.from_bytes(hashlib.sha256(task_id.encode()).digest()[:8], "big")
    return number < share * 2**64


def split_by_id(task_ids: Sequence[str]) -> dict[str, Sequence[str]]:
    """``train`` and ``heldout``, each in the given order; see ``is_held_out``."""
    return {
        "train": tuple(task_id for task_id in task_ids if not is_held_out(task_id)),
        "heldout": tuple(task_id for task_id in task_ids if is_held_out(task_id)),
    }


class _Registered:
    """The tasks that were registered one by one under a common name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.description = "registered from Python"
        self._tasks: dict[str, Task] = {}

    def add(self, task: Task) -> None:
        if task.task_id in self._tasks:
            raise ValueError(f"task {task.task_id!r} is registered already")
        self._tasks[task.task_id] = task

    def splits(self) -> dict[str, Sequence[str]]:
        return split_by_id(list(self._tasks))

    def get(self, task_id: str) -> Task:
        if task_id not in self._tasks:
            raise KeyError(f"the set {self.name!r} has no such task")
        return self._tasks[task_id]


def _from_package(point: EntryPoint) -> TaskSet:
    made: TaskSet = point.load()()
    return made


def _from_folder(path: Path) -> str:
    if not path.is_dir():
        raise ValueError(f"{path} is neither a folder of tasks nor a Python file")
    from hintloop.envs.harbor import load_taskset_folder

    made = load_taskset_folder(path)
    register_taskset(made.name, lambda: made)
    return made.name


def _from_file(path: Path) -> str:
    """Run the file, which is the user's own, and see which set it has registered."""
    before = set(taskset_names())
    _run_module(path)
    new = sorted(set(taskset_names()) - before)
    if len(new) != 1:
        raise ValueError(f"{path} must register one task set, not {len(new)}: {', '.join(new) or 'none'}")
    return new[0]


def _run_module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise ValueError(f"{error.filename}, line {error.lineno}: {error.msg}") from None
    return module
