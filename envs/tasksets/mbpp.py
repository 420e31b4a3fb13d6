"""MBPP, sanitized: short Python functions to write from a sentence (Austin et al. 2021).

The environment variable ``HINTLOOP_MBPP`` names a JSONL file, or a folder with one: rows as on the hub, or those of
CodeT's ``mbpp_sanitized_for_code_generation.jsonl``. Without it they come from ``google-research-datasets/mbpp`` on
the Hugging Face hub.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hintloop.envs.task import AssertTests, Task
from hintloop.envs.tasksets.sources import Collection, parse, rows

NAME = "mbpp"
PATH = "solution.py"
LEFT_OUT = (123, 737, 787, 794)
"""The reference of the first takes seconds; the others' return match objects, which are no plain data."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One row, whichever its source."""

    number: int
    text: str
    code: str
    imports: str
    asserts: tuple[str, ...]


def load() -> Collection:
    """The task set. ``ValueError`` when there is no data."""
    found = rows("HINTLOOP_MBPP", "google-research-datasets/mbpp", "sanitized")
    problems = [read_row(row) for row in found]
    tasks = [make_task(problem) for problem in problems if problem.number not in LEFT_OUT]
    left_out = len(problems) - len(tasks)
    return Collection(
        NAME, f"MBPP sanitized: write a Python function from a sentence ({left_out} left out)", tasks
    )


def read_row(row: Mapping[str, Any]) -> Problem:
    """A problem from a row as on the hub, or from one of CodeT's, whose prompt is code with a docstring."""
    if "test_list" in row:
        imports = "\n".join(row.get("test_imports", ()))
        return Problem(int(row["task_id"]), row["prompt"], row["code"], imports, tuple(row["test_list"]))
    head, docstring, _ = row["prompt"].split("'''")
    head = head.rstrip() + "\n"
    check = parse(row["test"]).body[0]
    assert isinstance(check, ast.FunctionDef), "a test defines one function"
    return Problem(
        number=int(row["task_id"].rpartition("/")[2]),
        text=docstring.strip(),
        code=head + row["canonical_solution"],
        imports=head[: head.rindex("def ")],
        asserts=tuple(map(ast.unparse, check.body)),
    )


def make_task(problem: Problem) -> Task:
    """Write the function that the assertions call; the first of them is told."""
    name, signature = _tested(problem)
    text = " ".join(problem.text.split())
    return Task(
        task_id=f"{NAME}/{problem.number}",
        instruction=f"In `{PATH}`: {text} It is called `{name}`; for example: {problem.asserts[0]}",
        files={PATH: f"{signature}\n    ...\n"},
        tests=AssertTests(PATH, name, _check(problem, name, 1), _check(problem, name)),
        solution={PATH: problem.code},
    )


def _tested(problem: Problem) -> tuple[str, str]:
    """Name of the function that is asserted about, and its ``def`` line."""
    called = {
        node.func.id
        for text in problem.asserts
        for node in ast.walk(parse(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    for node in parse(problem.code).body:
        if isinstance(node, ast.FunctionDef) and node.name in called:
            return node.name, f"def {node.name}({ast.unparse(node.args)}):"
    raise ValueError(f"MBPP {problem.number}: no assertion calls a function of the reference")


def _check(problem: Problem, name: str, count: int | None = None) -> str:
    asserts: Sequence[str] = problem.asserts[:count]
    body = "\n".join(f"    {text}" for text in asserts)
    return f"import math\n{problem.imports}\ndef check({name}):\n{body}\n"
