"""The same task three times: ``f(x)`` should square, judged by cases, by assertions, and by pytest."""

from __future__ import annotations

from hintloop.envs.task import AssertTests, Case, FunctionTests, RepositoryTests, Script, Task

GIVEN = "def f(x):\n    return x + x\n"
SOLVED = {"solution.py": "def f(x):\n    return x * x\n"}
INSTRUCTION = "Mend `solution.py`: f should give the square of its argument."
CASES = tuple(Case((x,), x * x) for x in (3, 0, -2, 1, 12))
CHECK = """
def check(f):
    for x, want in [(3, 9), (0, 0), (-2, 4), (12, 144)]:
        assert f(x) == want
    assert f(f(2)) == 16 and isinstance(f(5), int)
    assert all(y > 0 for y in map(f, [-3, 3]))
    assert not any(map(lambda x: f(x) < x, range(9)))
"""
LOOPS = "def check(f):\n    assert all(map(f, [1, 2])) and not any(map(f, [0]))\n"
"""Passes when a function ends the loops instead of answering."""
TEST = """\
import pytest
from solution import f


@pytest.mark.parametrize(("x", "want"), [(3, 9), (0, 0), (-2, 4)])
def test_some(x, want):
    assert f(x) == want


@pytest.mark.parametrize(("x", "want"), [(5, 25), (12, 144)])
def test_others(x, want):
    assert f(x) == want
"""
NUM_TESTS = 5
RUN = "if python -m pytest -q /tests >/tmp/log 2>&1; then echo 1; else echo 0; fi >/logs/verifier/reward.txt"
MAX_TURNS = 40


def _task(name: str, tests: FunctionTests | AssertTests | RepositoryTests) -> Task:
    return Task(f"attacked/{name}", INSTRUCTION, {"solution.py": GIVEN}, tests, SOLVED, MAX_TURNS)


FUNCTION = _task("function", FunctionTests("solution.py", "f", CASES[:2], CASES))
ASSERTIONS = _task("assertions", AssertTests("solution.py", "f", "", CHECK))
ENDED_LOOPS = _task("loops", AssertTests("solution.py", "f", "", LOOPS))
REPOSITORY = _task("repository", RepositoryTests(Script({"test_it.py": TEST}, RUN, 60.0)))
