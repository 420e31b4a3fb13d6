"""Exercism's Python track: practice exercises, each a module to write.

The environment variable ``HINTLOOP_EXERCISM`` names a checkout of https://github.com/exercism/python. An exercise
whose tests only compare what one function gives for plain data is graded by assertions; the others by their own
test file, which runs beside the agent's module in a fresh sandbox.
"""

from __future__ import annotations

import json
from pathlib import Path

from hintloop.envs.task import RepositoryTests, Script, Task, Tests
from hintloop.envs.tasksets.sources import Collection, checkout
from hintloop.envs.tasksets.unittests import convert, first_tests

NAME = "exercism"
LEFT_OUT = ("killer-sudoku-helper", "ledger", "markdown")
"""The reference of the first takes seconds; the others' given code passes already, for it is to be made nicer."""
MAX_VISIBLE = 5
MAX_TURNS = 12
TEST_SECONDS = 60.0
_COMMAND = """work=$PWD; cd /tests
if PYTHONPATH="$work" python3 -B -m unittest {name} >&2; then echo 1; else echo 0; fi >/logs/verifier/reward.txt"""


def load() -> Collection:
    """The task set. ``ValueError`` when there is no checkout."""
    root = checkout("HINTLOOP_EXERCISM", "exercism/python", "exercises/practice")
    configs = sorted((root / "exercises/practice").glob("*/.meta/config.json"))
    folders = [path.parent.parent for path in configs]
    tasks = [_task(folder) for folder in folders if folder.name not in LEFT_OUT]
    left_out = len(folders) - len(tasks)
    about = f"Exercism's practice exercises in Python: write a module ({left_out} left out)"
    return Collection(NAME, about, tasks)


def _task(folder: Path) -> Task:
    """A task from the folder of an exercise."""
    named = json.loads((folder / ".meta/config.json").read_text("utf-8"))["files"]
    path, test = named["solution"][0], named["test"][0]
    source = (folder / test).read_text("utf-8")
    beside = {p.name: p.read_text("utf-8") for p in sorted(folder.glob("*.py")) if p.name not in (path, test)}
    files = {path: (folder / path).read_text("utf-8")}
    tests: Tests | None = None if beside else convert(source, path, MAX_VISIBLE)
    if tests is None:
        tests, shown = _own_tests(path, test, source, beside)
        files |= shown
    return Task(
        task_id=f"{NAME}/{folder.name}",
        instruction=f"Write `{path}`.\n\n{_instructions(folder)}",
        files=files,
        tests=tests,
        solution={path: (folder / named["example"][0]).read_text("utf-8")},
        max_turns=MAX_TURNS,
    )


def _own_tests(
    path: str, test: str, source: str, beside: dict[str, str]
) -> tuple[RepositoryTests, dict[str, str]]:
    """The grading by the exercise's test file, and the part of it that the agent sees, if that is a small one."""
    name = test.removesuffix(".py")
    script = Script({test: source, **beside}, _COMMAND.format(name=name), TEST_SECONDS)
    part = None if beside else first_tests(source, MAX_VISIBLE)
    if part is None:
        return RepositoryTests(script, (path,)), {}
    return RepositoryTests(script, (path,), f"python3 -B -m unittest {name}"), {test: part}


def _instructions(folder: Path) -> str:
    names = ("introduction.md", "instructions.md", "instructions.append.md")
    found = [folder / ".docs" / name for name in names]
    return "\n\n".join(path.read_text("utf-8").strip() for path in found if path.is_file())
