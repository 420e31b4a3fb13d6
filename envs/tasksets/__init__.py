"""Bundled task sets. Importing this package registers them; each is made at its first use."""

from __future__ import annotations

from hintloop.envs.task import TaskSet, register_taskset


def _bugfix() -> TaskSet:
    from hintloop.envs.tasksets.bugfix.taskset import load

    return load()


register_taskset("bugfix", _bugfix)
