"""A task set of one task; run as a script, this file is an environment server that has it."""

from __future__ import annotations

import sys
from pathlib import Path

from hintloop.envs.registry import register_task, taskset_names
from hintloop.envs.task import Case, FunctionTests, Task

PATH = "double.py"
BROKEN = "def double(x):\n    return x + 2\n"
MENDED = "def double(x):\n    return x + x\n"
TESTS = FunctionTests(
    PATH, "double", (Case((2,), 4), Case((3,), 6)), tuple(Case((x,), 2 * x) for x in range(4))
)
TASK = Task("trials/double", "make double double", {PATH: BROKEN}, TESTS, {PATH: MENDED}, max_turns=20)

if "trials" not in taskset_names():
    register_task(TASK)

if __name__ == "__main__":
    from hintloop.envs.sandbox.local import LocalProvider
    from hintloop.envs.server import serve

    serve(LocalProvider(), port=0, max_sessions=4, ready_file=Path(sys.argv[1]))
