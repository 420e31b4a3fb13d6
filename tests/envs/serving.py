"""``hintloop serve env`` as a process, with a task set of one task; this file is that set's Python file."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from hintloop.envs.registry import register_task, taskset_names
from hintloop.envs.task import Case, FunctionTests, Task

PATH = "triple.py"
BROKEN = "def triple(x):\n    return x + 3\n"
MENDED = "def triple(x):\n    return x * 3\n"
TASK = Task(
    "served/triple",
    "make triple triple",
    {PATH: BROKEN},
    FunctionTests(PATH, "triple", (Case((2,), 6),), tuple(Case((x,), 3 * x) for x in range(4))),
    {PATH: MENDED},
)

if "served" not in taskset_names():
    register_task(TASK)


@contextlib.contextmanager
def serving(folder: Path, *options: str) -> Iterator[str]:
    """The URL of a server on a free port of this machine."""
    ready, log = folder / "ready", folder / "log"
    command = [sys.executable, "-m", "hintloop.cli.main", "serve", "env", "--port", "0"]
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, "--tasks", __file__, "--ready-file", str(ready), *options],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + 120
        while not ready.exists():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, "the server does not start"
            time.sleep(0.05)
        yield ready.read_text().strip()
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            process.kill()
            process.wait()
