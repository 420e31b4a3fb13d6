"""Bundled task sets. Importing this package registers them; each is made at its first use."""

from __future__ import annotations

from functools import partial
from importlib import import_module

from hintloop.envs.registry import register_taskset
from hintloop.envs.task import TaskSet

_MODULES = {
    "bugfix": "bugfix.taskset",
    "exercism": "exercism",
    "humanevalfix": "humanevalfix",
    "mbpp": "mbpp",
    "quixbugs": "quixbugs",
}
"""Name -> the module here whose ``load`` makes the set."""


def _load(name: str) -> TaskSet:
    made: TaskSet = import_module(f"{__name__}.{_MODULES[name]}").load()
    return made


for _name in _MODULES:
    register_taskset(_name, partial(_load, _name))
