"""Grading cannot be fooled: full reward for the reference, none for any attack on the grader."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hintloop.envs.grading.functions import CaseResult, grade, run_cases, same
from hintloop.envs.grading.result import Grade
from hintloop.envs.sandbox.base import CallResult, SandboxDead
from hintloop.envs.sandbox.local import LocalProvider
from hintloop.envs.task import Case, FunctionTests, Task

REFERENCE = "def f(x):\n    return x * x\n"
SOLUTION = {"solution.py": REFERENCE}
HIDDEN = (Case((3,), 9), Case((0,), 0), Case((-2,), 4), Case((1,), 1), Case((1.5,), 2.25))
TESTS = FunctionTests("solution.py", "f", HIDDEN[:2], HIDDEN)
TASK = Task(
    task_id="test/square",
    instruction="Fix solution.py: f should give: the square of x",
    files={"solution.py": "def f(x):\n    return x + x\n"},
    tests=TESTS,
    solution=SOLUTION,
)

WRONG = "\ndef f(x):\n    return x + x\n"
WALK_FRAMES = """
import gc, sys
def f(x):
    frame, found = sys._getframe(), []
    while frame is not None:
        found += [value for value in frame.f_locals.values() if type(value) in (int, float, list, tuple)]
        frame = frame.f_back
    found += [value for value in gc.get_objects() if type(value) is tuple and x in value]
    for value in found:
        name = getattr(value, "expected", None)
        if name is not None:
            return name
    return found[0] if type(found[0]) is int else 0
"""
FORGED_REPORT = """
import os
lines = b"".join(b'0 %d {"value": 9}\\n' % n for n in range(5))
for fd in range(3, 256):
    try:
        os.write(fd, lines)
    except OSError:
        pass
os._exit(0)
"""
STOLEN_NONCE = """
import gc, os, sys
def f(x):
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        send = frame.f_locals.get("send")
        if send is not None:
            for _ in range(5):
                send('{"value": true}')
            os._exit(0)
    return x
"""
FORKED_TWIN = """
import os
def f(x):
    os.fork()
    return x * x
"""
ATTACKS = {
    "no-op": TASK.files["solution.py"],
    "os._exit(0) at import": "import os\nos._exit(0)" + WRONG,
    "os._exit(0) in the call": "import os\ndef f(x):\n    os._exit(0)\n",
    "sys.exit(0) at import": "import sys\nsys.exit(0)" + WRONG,
    "sys.exit(0) in the call": "import sys\ndef f(x):\n    sys.exit(0)\n",
    "atexit": "import atexit, os\natexit.register(os._exit, 0)" + WRONG,
    "equal to everything": "class E(int):\n    def __eq__(self, other): return True\n    __hash__ = None\n"
    "def f(x):\n    return E(7)\n",
    "equal list": "class E(list):\n    def __eq__(self, other): return True\ndef f(x):\n    return E()\n",
    "json patched": "import json, json.encoder\njson.dumps = lambda *a, **k: '{\"value\": 9}'\n"
    "json.JSONEncoder.encode = json.JSONEncoder.iterencode = lambda *a, **k: '{\"value\": 9}'\n"
    "json.encoder.c_make_encoder = None\njson.loads = json.JSONDecoder.decode = lambda *a: [9]" + WRONG,
    "builtins patched": "import builtins\nbuiltins.type = lambda v: int\n"
    "builtins.isinstance = builtins.all = builtins.any = builtins.bool = lambda *a: True\n"
    "builtins.len = lambda v: 1" + WRONG,
    "operators of the grader patched": "import hintloop.envs.sandbox.calls as calls\n"
    "calls._plain_text = lambda v: '{\"value\": 9}'\ncalls.json.loads = lambda t: [3]" + WRONG,
    "forged report": FORGED_REPORT,
    "stolen reporter": STOLEN_NONCE,
    "forked twin": FORKED_TWIN,
    "report on stdout": "print('0 0 {\"value\": 9}')\nprint('5 passed')\nimport os\nos.system('echo PASSED')"
    + WRONG,
    "stack walk": WALK_FRAMES,
    "huge output": "import sys\nfor _ in range(200):\n    sys.stdout.write('9\\n' * 100_000)" + WRONG,
    "huge value": "def f(x):\n    return 'x' * (1 << 26)\n",
    "bool for int": "def f(x):\n    return True if x * x == 1 else False if x == 0 else x * x\n",
    "float for int": "def f(x):\n    return float(x * x)\n",
    "tuple": "def f(x):\n    return (x * x,)\n",
    "infinite loop": "def f(x):\n    while True: pass\n",
    "infinite loop in a thread": "import threading\ndef g():\n    while True: pass\n"
    "threading.Thread(target=g).start()" + WRONG,
    "deep recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef f(x):\n    return f(x)\n",
    "memory": "def f(x):\n    return len([0] * (1 << 28)) * 0 + x + x\n",
    "file closed": "import os\nos.closerange(0, 256)" + WRONG,
    "signals": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nos.kill(-1, signal.SIGKILL)"
    + WRONG,
    "kills its group": "import os\nos.kill(0, 9)" + WRONG,
    "property": "import sys\nclass M:\n    @property\n    def f(self): return self\n"
    "sys.modules[__name__] = M()\n",
    "conftest": "import pytest_plugin" + WRONG,
    "syntax error": "def f(x:\n",
    "nothing": "",
}


@pytest.fixture(scope="module")
def provider() -> Iterator[LocalProvider]:
    with LocalProvider() as made:
        yield made


def test_the_reference_gets_the_full_reward(provider: LocalProvider) -> None:
    assert grade(provider, TASK, TESTS, SOLUTION) == Grade(1.0, {"tests": 1.0})


def test_a_partly_right_solution_gets_no_reward_but_a_fraction_of_tests(provider: LocalProvider) -> None:
    assert grade(provider, TASK, TESTS, TASK.files) == Grade(0.0, {"tests": 0.2})


@pytest.mark.parametrize("name", ATTACKS)
def test_no_attack_gets_a_reward(provider: LocalProvider, name: str) -> None:
    if name in ("signals", "kills its group") and "pid" not in provider.isolation:
        pytest.skip("without a pid namespace this would end the test run")
    result = grade(provider, TASK, TESTS, {"solution.py": ATTACKS[name]}, timeout=1.0)
    assert result.reward == 0.0
    assert result.parts["tests"] < 1.0
    assert grade(provider, TASK, TESTS, SOLUTION).reward == 1.0


def test_planted_files_do_not_help(provider: LocalProvider) -> None:
    files = {
        "solution.py": WRONG,
        "json.py": "dumps = loads = lambda *a, **k: '9'\n",
        "conftest.py": "import os; os._exit(0)\n",
        "sitecustomize.py": "import os; os._exit(0)\n",
        "logs/verifier/reward.txt": "1.0",
    }
    assert grade(provider, TASK, TESTS, files).reward == 0.0


def test_missing_or_impossible_files_get_no_reward(provider: LocalProvider) -> None:
    for files in ({}, {"other.py": REFERENCE}, {"a": "", "a/b": ""}, {"solution.py": "\ud800"}):
        assert grade(provider, TASK, TESTS, files) == Grade(0.0, {"tests": 0.0})


def test_dead_infrastructure_is_no_grade() -> None:
    provider = LocalProvider()
    provider.close()
    with pytest.raises(SandboxDead):
        grade(provider, TASK, TESTS, SOLUTION)


def test_a_task_without_hidden_cases_cannot_be_graded(provider: LocalProvider) -> None:
    tests = FunctionTests("solution.py", "f", (), ())
    empty = Task("test/empty", "", {}, tests, {})
    with pytest.raises(ValueError, match="no hidden cases"):
        grade(provider, empty, tests, {})


class Scripted:
    """Gives the results that it was made with."""

    def __init__(self, *results: CallResult):
        self.results = list(results)

    def call_function(
        self, path: str, function: str, calls: Sequence[Sequence[Any]], *, timeout: float
    ) -> list[CallResult]:
        return self.results


def test_what_came_back_is_told_in_short() -> None:
    endless: list[Any] = []
    for _ in range(100_000):
        endless = [endless]
    results = [
        CallResult(value=endless),
        CallResult(value=[1, 2]),
        CallResult(value="x" * 100),
        CallResult(error="ZeroDivisionError: division by zero"),
        CallResult(error="Timeout"),
        CallResult(value=10**5000),
    ]
    cases = [Case((), [1, 2])] * len(results)
    told = run_cases(Scripted(*results), "a.py", "f", cases, timeout=1)
    assert told == [
        CaseResult(False, "list"),
        CaseResult(True, "[1, 2]"),
        CaseResult(False, "'" + "x" * 36 + "..."),
        CaseResult(False, "ZeroDivisionError"),
        CaseResult(False, "Timeout"),
        CaseResult(False, "int"),
    ]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@given(JSON)
def test_every_value_is_the_same_as_itself_and_not_as_one_of_another_shape(value: Any) -> None:
    assert same(value, value)
    assert not same(value, [value])
    assert not same({"k": value}, value)


@pytest.mark.parametrize(
    ("left", "right", "equal"),
    [
        (1, True, False),
        (0, False, False),
        (1, 1.0, False),
        ([1], [True], False),
        ({"a": 1}, {"a": 1.0}, False),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True),
        ({"a": 1}, {"a": 1, "b": 1}, False),
        ([1, 2], (1, 2), True),
        ([1, 2], [1, 2, 3], False),
        (math.nan, math.nan, True),
        (math.nan, 0.0, False),
        ("1", 1, False),
        (None, False, False),
    ],
)
def test_types_count_all_the_way_down(left: Any, right: Any, equal: bool) -> None:
    assert same(left, right) is equal
    assert same(right, left) is equal
