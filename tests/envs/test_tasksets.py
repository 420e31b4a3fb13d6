"""Task sets from published data: every reference passes, every given file fails, and missing data is told."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from hintloop.envs.grading.grade import grade, run_visible
from hintloop.envs.registry import load_taskset, taskset_names
from hintloop.envs.sandbox.local import LocalProvider
from hintloop.envs.task import AssertTests, FunctionTests, RepositoryTests, Task
from hintloop.envs.tasksets import exercism, humanevalfix, mbpp, quixbugs
from hintloop.envs.tasksets.sources import Collection
from hintloop.envs.tasksets.unittests import convert, first_tests

LOADERS = {
    "exercism": exercism.load,
    "humanevalfix": humanevalfix.load,
    "mbpp": mbpp.load,
    "quixbugs": quixbugs.load,
}


@pytest.fixture(scope="module")
def provider() -> Iterator[LocalProvider]:
    with LocalProvider() as made:
        yield made


def rewards(provider: LocalProvider, task: Task) -> tuple[float, float]:
    """Of the reference solution, and of the files as given."""
    assert isinstance(task.solution, dict)
    give = partial(grade, provider, task)
    return give({**task.files, **task.solution}).reward, give(dict(task.files)).reward


def tasks(made: Collection) -> list[Task]:
    return [made.get(task_id) for ids in made.splits().values() for task_id in ids]


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


# Where the data is


def test_all_sets_are_registered() -> None:
    assert {"bugfix", *LOADERS} <= set(taskset_names())


@pytest.mark.parametrize("name", LOADERS)
def test_missing_data_is_one_line_that_says_what_to_do(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    variable = f"HINTLOOP_{name.upper()}"
    monkeypatch.setenv(variable, str(tmp_path / "none"))
    with pytest.raises(ValueError, match=rf"(?s)\A(?=.*{variable})[^\n]*\Z"):
        load_taskset(name)
    monkeypatch.delenv(variable)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=rf"\Aset {variable} to a [^\n]*\Z"):
        load_taskset(name)


# HumanEvalFix

ROW = {
    "task_id": "Python/7",
    "entry_point": "triple",
    "declaration": "import math\n\n\ndef helper(x):\n    return 3 * x\n\n\ndef triple(x: int) -> int:\n",
    "buggy_solution": "    return helper(x) + 1\n",
    "canonical_solution": "    return helper(x)\n",
    "docstring": "Three times x.",
    "example_test": "    return helper(x)\ndef check(triple):\n    assert triple(1) == 3\ncheck(triple)\n",
    "test": "\n\ndef check(triple):\n    assert triple(2) == helper(2)\n    assert triple(0) == 0\n\ncheck(triple)",
    "bug_type": "excess logic",
}


def test_a_humanevalfix_row_is_a_file_with_a_bug(
    provider: LocalProvider, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write(tmp_path, {"rows.jsonl": json.dumps(ROW) + "\n"})
    monkeypatch.setenv("HINTLOOP_HUMANEVALFIX", str(tmp_path))
    (task,) = tasks(humanevalfix.load())
    assert task.task_id == "humanevalfix/7"
    assert rewards(provider, task) == (1.0, 0.0)
    assert isinstance(task.tests, AssertTests)
    assert task.tests.visible.count("return helper(x)") == 0
    assert "Three times x." in task.instruction
    with pytest.raises(KeyError, match="no task 'humanevalfix/8'"):
        humanevalfix.load().get("humanevalfix/8")


# MBPP


def test_mbpp_rows_of_both_sources_make_the_same_task(provider: LocalProvider) -> None:
    asserts = ["assert circle(1) == math.pi", "assert circle(0) == 0"]
    hub = {
        "task_id": 3,
        "prompt": "Write a function for the area of a circle.",
        "code": "import math\ndef circle(r):\n\treturn math.pi * r * r",
        "test_imports": [],
        "test_list": asserts,
    }
    prompt = "import math\ndef circle(r):\n    '''\n    Write a function for the area of a circle.\n    '''\n"
    check = "def check(candidate):\n" + "".join(f"    {text}\n" for text in asserts)
    codet = {
        "task_id": "MbppEval/3",
        "entry_point": "circle ",
        "prompt": prompt,
        "canonical_solution": "\treturn math.pi * r * r\n",
        "test": check,
    }
    made = [mbpp.make_task(mbpp.read_row(row)) for row in (hub, codet)]
    for task in made:
        assert rewards(provider, task) == (1.0, 0.0)
        assert task.files == {"solution.py": "def circle(r):\n    ...\n"}
        assert isinstance(task.tests, AssertTests)
        assert "circle(0)" not in task.tests.visible
    assert made[0].instruction == made[1].instruction


def test_mbpp_asks_for_the_function_that_is_tested() -> None:
    row = {
        "task_id": 9,
        "prompt": "It.",
        "code": "def a(x):\n    return x\ndef b(x, *, y=1):\n    return a(x)\n",
    }
    task = mbpp.make_task(mbpp.read_row({**row, "test_list": ["assert b(1) == 1"]}))
    assert task.files["solution.py"].startswith("def b(x, *, y=1):")
    with pytest.raises(ValueError, match="MBPP 9"):
        mbpp.make_task(mbpp.read_row({**row, "test_list": ["assert c(1) == 1"]}))


def test_some_tasks_of_the_real_data(
    provider: LocalProvider, monkeypatch: pytest.MonkeyPatch, shared_data: Path
) -> None:
    monkeypatch.setenv("HINTLOOP_HUMANEVALFIX", str(shared_data / "tasks/humanevalpack.jsonl"))
    monkeypatch.setenv("HINTLOOP_MBPP", str(shared_data / "tasks/mbpp_sanitized_for_code_generation.jsonl"))
    fix, write_ = humanevalfix.load(), mbpp.load()
    assert {name: len(ids) for name, ids in fix.splits().items()} == {"train": 129, "heldout": 35}
    assert sum(map(len, write_.splits().values())) == 427 - len(mbpp.LEFT_OUT)
    for number in (32, 38, 53, 119):  # a helper of the module, random arguments, a broken example
        assert rewards(provider, fix.get(f"humanevalfix/{number}")) == (1.0, 0.0)
    for number in (2, 56, 88, 98):  # sets, a function named check, a Counter, math in the test
        assert rewards(provider, write_.get(f"mbpp/{number}")) == (1.0, 0.0)


# QuixBugs

QUIXBUGS = {
    "python_programs/add.py": 'def add(a, b):\n    return a - b\n\n"""\nAdd.\n"""\n',
    "correct_python_programs/add.py": "def add(a, b):\n    return a + b\n",
    "json_testcases/add.json": "[[1, 2], 3]\n[[2, 2], 4]\n",
    "python_programs/walk.py": "def walk(xs):\n    yield from xs[1:]\n",
    "correct_python_programs/walk.py": "def walk(xs):\n    for x in xs:\n        yield x\n",
    "json_testcases/walk.json": "[[[1, 2]], [1, 2]]\n",
    "python_programs/sqrt.py": "def sqrt(x, epsilon):\n    return x\n",
    "correct_python_programs/sqrt.py": "def sqrt(x, epsilon):\n    return x ** 0.5\n",
    "json_testcases/sqrt.json": "[[4, 0.1], 2.05]\n",
    "python_programs/tree.py": "def tree(weights):\n    return set()\n",
    "correct_python_programs/tree.py": "def tree(weights):\n    return set(weights)\n",
    "python_testcases/test_tree.py": 'def test1():\n    """A case."""\n    result = tree({(1, 2): 3})\n\n'
    "    assert result == {(1, 2)}\n",
    "python_programs/nodes.py": "def nodes(node):\n    return 1\n",
    "correct_python_programs/nodes.py": "def nodes(node):\n    return 0\n",
    "correct_python_programs/nodes_test.py": "",
    "python_testcases/test_nodes.py": "def test1():\n    assert nodes(Node(1)) == 0\n",
}


def test_quixbugs_programs_are_graded_by_cases_or_assertions(
    provider: LocalProvider, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HINTLOOP_QUIXBUGS", str(write(tmp_path, QUIXBUGS)))
    made = quixbugs.load()
    found = {task.task_id.partition("/")[2]: task for task in tasks(made)}
    assert set(found) == {"add", "walk", "sqrt", "tree"}
    assert "1 on linked nodes" in made.description
    assert isinstance(found["add"].tests, FunctionTests)
    assert found["add"].instruction.endswith("Add.")
    assert all(isinstance(found[name].tests, AssertTests) for name in ("walk", "sqrt", "tree"))
    assert {rewards(provider, task) for name, task in found.items()} == {(1.0, 0.0)}


# Exercism

STUB = "def double(number):\n    pass\n"
DOUBLE = (
    "def double(number):\n    if number < 0:\n        raise ValueError('no')\n    return [number, number]\n"
)
TEST = '''import unittest

from double import (
    double,
)


class DoubleTest(unittest.TestCase):
    def test_one(self):
        """One."""
        expected = [1, 1]
        self.assertEqual(double(1), expected)

    def test_two(self):
        self.assertIs(double(2) == [2, 2], True)

    @unittest.skip("slow")
    def test_skipped(self):
        self.assertEqual(double(3), 0)

    def test_error(self):
        with self.assertRaises(ValueError) as err:
            double(-1)
        self.assertEqual(type(err.exception), ValueError)
        self.assertEqual(err.exception.args[0], "no")
'''
COUNTER_TEST = """import unittest

from counter import Counter


class CounterTest(unittest.TestCase):
    def test_none(self):
        self.assertEqual(Counter().value, 100)

    def test_one(self):
        counter = Counter()
        counter.add(7)
        self.assertEqual(counter.value, 107)


class OtherTest(unittest.TestCase):
    def test_two(self):
        self.assertEqual(Counter().add(52), 152)
"""
COUNTER = "class Counter:\n    value = 100\n    def add(self, n):\n        self.value += n\n        return self.value\n"


def exercise(name: str, stub: str, example: str, test: str) -> dict[str, str]:
    config = {
        "files": {"solution": [f"{name}.py"], "test": [f"{name}_test.py"], "example": [".meta/example.py"]}
    }
    folder = f"exercises/practice/{name}"
    return {
        f"{folder}/.meta/config.json": json.dumps(config),
        f"{folder}/.meta/example.py": example,
        f"{folder}/.docs/instructions.md": "# Instructions\n\nDo it.\n",
        f"{folder}/.docs/instructions.append.md": "And well.\n",
        f"{folder}/{name}.py": stub,
        f"{folder}/{name}_test.py": test,
    }


def test_exercises_are_graded_by_assertions_where_that_can_be(
    provider: LocalProvider, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    files = exercise("double", STUB, DOUBLE, TEST) | exercise("counter", "", COUNTER, COUNTER_TEST)
    monkeypatch.setenv("HINTLOOP_EXERCISM", str(write(tmp_path, files)))
    made = exercism.load()
    double, counter = made.get("exercism/double"), made.get("exercism/counter")
    assert isinstance(double.tests, AssertTests)
    assert double.files == {"double.py": STUB}
    assert double.instruction.endswith("Do it.\n\nAnd well.")
    assert rewards(provider, double) == (1.0, 0.0)
    assert grade(provider, double, {"double.py": DOUBLE.replace("'no'", "'yes'")}).parts == {"tests": 4 / 5}

    assert isinstance(counter.tests, RepositoryTests)
    assert counter.tests.artifacts == ("counter.py",)
    assert rewards(provider, counter) == (1.0, 0.0)
    shown = counter.files["counter_test.py"]
    assert "test_none" in shown
    assert "test_one" not in shown
    assert "OtherTest" not in shown
    workspace = provider.start({**counter.files, "counter.py": COUNTER})
    assert run_visible(provider, counter, workspace).passed
    workspace.close()


@pytest.mark.parametrize(
    "change",
    [
        ("[1, 1]", "[number for number in (1, 1)]"),
        ("double(2) ==", "double(number=2) =="),
        ("double(2) ==", "list(map(double, [2])) =="),
        ("double(2) ==", "double(len) =="),
        ("double(2) ==", "double(self.two) =="),
        ("self.assertIs(", "self.check("),
        ("    double,\n", "    double,\n    triple,\n"),
        ("import unittest\n", "import unittest\nimport datetime\n"),
        ("    def test_one(", "    def setUp(self): pass\n    def test_one("),
        ("assertRaises(ValueError)", "assertRaises(Odd)"),
        ("            double(-1)\n", "            double(-1)\n            double(-2)\n"),
        ("skip(", "expectedFailure("),
    ],
)
def test_tests_that_are_not_about_data_alone_are_not_converted(change: tuple[str, str]) -> None:
    assert convert(TEST, "double.py", 3) is not None
    assert change[0] in TEST
    assert convert(TEST.replace(*change), "double.py", 3) is None


def test_a_test_file_is_cut_to_its_first_tests() -> None:
    cut = first_tests(TEST, 5)
    assert cut is not None
    assert cut.endswith("self.assertEqual(double(1), expected)\n")
    assert first_tests(TEST.replace("def test_", "def check_"), 5) is None


# The whole sets


@pytest.mark.slow
@pytest.mark.parametrize("name", LOADERS)
def test_every_reference_passes_and_every_given_file_fails(
    provider: LocalProvider, name: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    variable = f"HINTLOOP_{name.upper()}"
    file = {"humanevalfix": "humanevalpack.jsonl", "mbpp": "mbpp_sanitized_for_code_generation.jsonl"}.get(
        name
    )
    if variable not in os.environ and file is None:
        pytest.skip(f"{variable} names no checkout")
    if variable not in os.environ:
        monkeypatch.setenv(variable, str(request.getfixturevalue("shared_data") / "tasks" / str(file)))
    found = tasks(LOADERS[name]())
    unfit = {task.task_id: given for task in found if (given := rewards(provider, task)) != (1.0, 0.0)}
    assert len(found) > 30
    assert unfit == {}
