"""QuixBugs: classic algorithms with one bug each (Lin et al. 2017).

The environment variable ``HINTLOOP_QUIXBUGS`` names a checkout of https://github.com/jkoppel/QuixBugs. Programs on
linked nodes are left out, for their arguments are no plain data.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

from hintloop.envs.task import AssertTests, Case, FunctionTests, Task, Tests
from hintloop.envs.tasksets.sources import Collection, checkout, parse

NAME = "quixbugs"
NUM_VISIBLE = 3
_TOLERANT = ("sqrt",)
"""Right within the last argument."""
_SLOW: dict[str, list[Any]] = {"knapsack": [6404180], "levenshtein": ["amanaplanacanalpanama", "rosettacode"]}
"""Program -> first arguments of the cases that take seconds to minutes."""


def load() -> Collection:
    """The task set. ``ValueError`` when there is no checkout."""
    root = checkout("HINTLOOP_QUIXBUGS", "jkoppel/QuixBugs", "python_programs")
    solved = sorted((root / "correct_python_programs").glob("*.py"))
    names = [path.stem for path in solved if not path.stem.endswith("_test") and path.stem != "node"]
    tests = {name: _tests(root, name) for name in names}
    tasks = [_task(root, name, found) for name, found in tests.items() if found is not None]
    left_out = len(names) - len(tasks)
    return Collection(
        NAME, f"QuixBugs: mend the bug in a classic algorithm ({left_out} on linked nodes left out)", tasks
    )


def _task(root: Path, name: str, tests: Tests) -> Task:
    buggy = (root / "python_programs" / f"{name}.py").read_text("utf-8")
    *_, last = parse(buggy).body
    about = last.value.value if isinstance(last, ast.Expr) and isinstance(last.value, ast.Constant) else ""
    solution = (root / "correct_python_programs" / f"{name}.py").read_text("utf-8")
    text = f"Fix the bug in `{name}` in `{name}.py`. What it should do:\n\n{str(about).strip()}"
    return Task(f"{NAME}/{name}", text, {f"{name}.py": buggy}, tests, {f"{name}.py": solution})


def _tests(root: Path, name: str) -> Tests | None:
    """From the JSON cases, else from the pytest file; None when that builds nodes."""
    path = f"{name}.py"
    cases = root / "json_testcases" / f"{name}.json"
    if cases.is_file():
        found = [json.loads(line) for line in cases.read_text("utf-8").splitlines()]
        return _from_cases(path, name, found, root)
    file = root / "python_testcases" / f"test_{name}.py"
    source = file.read_text("utf-8") if file.is_file() else "Node("
    if "Node(" in source:
        return None
    functions = [node for node in parse(source).body if isinstance(node, ast.FunctionDef)]
    return AssertTests(path, name, _check(name, functions[:1]), _check(name, functions))


def _from_cases(path: str, name: str, found: list[Any], root: Path) -> Tests:
    pairs = [(given if isinstance(given, list) else [given], wanted) for given, wanted in found]
    pairs = [(given, wanted) for given, wanted in pairs if given[0] not in _SLOW.get(name, [])]
    reference = parse((root / "correct_python_programs" / path).read_text("utf-8"))
    if name in _TOLERANT:
        lines = [f"assert abs({_call(name, given)} - {wanted!r}) <= {given[-1]!r}" for given, wanted in pairs]
    elif any(isinstance(node, ast.Yield) for node in ast.walk(reference)):
        lines = [f"assert list({_call(name, given)}) == {wanted!r}" for given, wanted in pairs]
    else:
        hidden = tuple(Case(tuple(given), wanted) for given, wanted in pairs)
        return FunctionTests(path, name, hidden[:NUM_VISIBLE], hidden)
    asserts = [parse(line).body for line in lines]
    return AssertTests(path, name, _check(name, asserts[:NUM_VISIBLE]), _check(name, asserts))


def _call(name: str, arguments: list[Any]) -> str:
    return f"{name}({', '.join(map(repr, arguments))})"


def _check(name: str, parts: list[Any]) -> str:
    """A check of the statements in each part: a list of them, or a function that has them."""
    statements = [s for part in parts for s in (part.body if isinstance(part, ast.FunctionDef) else part)]
    body = "\n".join(ast.unparse(statement) for statement in statements)
    return f"def check({name}):\n" + "\n".join(f"    {line}" for line in body.split("\n")) + "\n"
