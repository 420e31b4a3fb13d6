"""Assertions decide on data alone: the reference passes, and no attack does."""

from __future__ import annotations

import ast
import inspect
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from hintloop.envs.grading import assertions, harness
from hintloop.envs.grading.assertions import grade, run_visible
from hintloop.envs.grading.result import Grade, VisibleResult
from hintloop.envs.sandbox import values
from hintloop.envs.sandbox.base import USUAL, CallResult, SandboxSpec
from hintloop.envs.sandbox.client import RunnerSandbox
from hintloop.envs.sandbox.local import LocalProvider
from hintloop.envs.task import AssertTests, Script, Task

REFERENCE = """
def f(x):
    if x < 0:
        raise ValueError("negative")
    return (x * x, {x})
"""
VISIBLE = """
def check(f):
    assert f(1) == (1, {1})
    assert f(3) == (9,
        {3}), "three"
"""
HIDDEN = """
import random
def check(f):
    assert f(2) == (4, {2})
    for _ in range(3):
        x = random.randint(0, 1000)
        square, seen = f(x)
        assert square == x * x and seen == {x}
    assert f(f(5)[0])[0] == 625
    try:
        f(-1)
        error = None
    except ValueError as raised:
        error = raised
    assert error is not None and error.args[0] == "negative"
"""
FILES = {"m.py": "def f(x):\n    return (x, {x})\n"}
TESTS = AssertTests("m.py", "f", VISIBLE, HIDDEN)
TASK = Task("test/square", "", FILES, TESTS, {"m.py": REFERENCE})
WRONG = "\ndef f(x):\n    return (x + x, {x})\n"


def of(hidden: str, reference: str, visible: str = VISIBLE) -> Task:
    return Task("test/other", "", FILES, AssertTests("m.py", "f", visible, hidden), {"m.py": reference})


def graded(provider: LocalProvider, task: Task, source: str, timeout: float = 5.0) -> Grade:
    assert isinstance(task.tests, AssertTests)
    return grade(provider, task, task.tests, {"m.py": source}, timeout=timeout)


@pytest.fixture(scope="module")
def provider() -> Iterator[LocalProvider]:
    with LocalProvider() as made:
        yield made


def test_the_reference_gets_the_full_reward(provider: LocalProvider) -> None:
    assert graded(provider, TASK, REFERENCE) == Grade(1.0, {"tests": 1.0})


def test_one_failing_assertion_does_not_hide_the_others(provider: LocalProvider) -> None:
    wrong_error = REFERENCE.replace("ValueError", "KeyError")
    assert graded(provider, TASK, wrong_error) == Grade(0.0, {"tests": 5 / 6})
    assert graded(provider, TASK, FILES["m.py"]).reward == 0.0


ATTACKS = {
    "equal to everything": "class E(tuple):\n    def __eq__(self, other): return True\n    __hash__ = None\n"
    "    def __getitem__(self, n): return self\n    def __iter__(self): return iter((self, self))\n"
    "def f(x):\n    if x == -1: raise ValueError('negative')\n    return E()\n",
    "lies about its class": "class L:\n    __class__ = tuple\n    def __eq__(self, other): return True\n"
    "    def __iter__(self): return iter((1, {1}))\ndef f(x):\n    return L()\n",
    "nan-like dictionary": "class D(dict):\n    def __missing__(self, key): return self\ndef f(x):\n    return D()\n",
    "builtins patched": "import builtins\nbuiltins.AssertionError = builtins.bool = builtins.set = lambda *a: True\n"
    "builtins.isinstance = builtins.all = lambda *a: True\nbuiltins.type = lambda v: tuple" + WRONG,
    "encoder patched": "import sys\nv = sys.modules['hintloop.envs.sandbox.values']\n"
    "v.encode = v.decode = lambda *a: '[]'" + WRONG,
    "stack walk": "import sys, gc\ndef f(x):\n    frame, found = sys._getframe(), []\n    while frame:\n"
    "        found += [str(v) for v in frame.f_locals.values()]\n        frame = frame.f_back\n"
    "    found += [v for v in gc.get_objects() if type(v) is str]\n"
    "    assert not any('raised' in v for v in found)\n"
    "    return next((v for v in found if 'assert f(2)' in v), (0, {x}))\n",
    "reads the folder": "import os\ndef f(x):\n    for root, _, names in os.walk('/workspace'):\n"
    "        for name in names:\n            text = open(os.path.join(root, name)).read()\n"
    "            if 'assert f(' + '2)' in text or 'x * ' + 'x' in text:\n"
    "                return (x ** 2, {x})\n    return (0, {x})\n",
    "os._exit at import": "import os\nos._exit(0)" + WRONG,
    "os._exit in the call": "import os\ndef f(x):\n    os._exit(0)\n",
    "sys.exit in the call": "import sys\ndef f(x):\n    sys.exit(0)\n",
    "every exception": "def f(x):\n    raise ValueError('negative')\n",
    "forged report": "import os\nfor fd in range(3, 256):\n    try:\n"
    '        os.write(fd, b\'0 0 {"value": [4, {"$": ["set", 2]}]}\\n\')\n    except OSError: pass\nos._exit(0)\n',
    "forged verdict": 'print(\'{"executed": 6, "held": 6, "failed": null, "missing": []}\')\n' + WRONG,
    "infinite generator": "def f(x):\n    while True: yield x\n",
    "infinite loop": "def f(x):\n    while True: pass\n",
    "huge": "def f(x):\n    return ('x' * (1 << 26), {x})\n",
    "syntax error": "def f(x:\n",
    "nothing": "",
}


@pytest.mark.parametrize("name", ATTACKS)
def test_no_attack_gets_a_reward(provider: LocalProvider, name: str) -> None:
    result = graded(provider, TASK, ATTACKS[name], timeout=1.0)
    assert result.reward == 0.0
    assert result.parts["tests"] < 1.0


def test_planted_files_do_not_help(provider: LocalProvider) -> None:
    files = {
        "m.py": WRONG,
        "hintloop_harness.py": "def replay(*a): return {}\n",
        "ast.py": "",
        "check.py": "",
    }
    assert grade(provider, TASK, TESTS, files).reward == 0.0
    assert grade(provider, TASK, TESTS, {"a": "", "a/b": ""}) == Grade(0.0, {"tests": 0.0})


def test_an_exception_must_be_raised_and_not_suffered(provider: LocalProvider) -> None:
    hidden = "def check(f):\n    try:\n        f(1)\n        seen = None\n    except Exception as error:\n"
    hidden += (
        "        seen = type(error).__name__\n    assert seen in ('Odd', 'KeyError', 'UnicodeDecodeError')\n"
    )
    odd = "class Odd(Exception): pass\ndef f(x):\n    raise Odd('no')\n"
    task = of(hidden, odd)
    assert graded(provider, task, odd).reward == 1.0
    assert graded(provider, task, "def f(x):\n    return {}[x]\n").reward == 1.0
    for source in (
        ATTACKS["infinite loop"],
        "def f(x):\n    return object()\n",
        ATTACKS["os._exit in the call"],
    ):
        assert graded(provider, task, source, timeout=0.5).reward == 0.0


def test_answers_cannot_make_the_check_assert_less(provider: LocalProvider) -> None:
    hidden = "def check(f):\n    assert f(0) is not None\n    for n in range(len(f(1))):\n        assert f(2)[n] == 5\n"
    hidden += "    if f(3): return\n    assert f(4)\n"
    task = of(hidden, "def f(x):\n    return [5, 5, 5] if x != 3 else 0\n")
    assert graded(provider, task, "def f(x):\n    return [5, 5, 5] if x != 3 else 0\n").reward == 1.0
    assert graded(provider, task, "def f(x):\n    return []\n") == Grade(0.0, {"tests": 1 / 5})
    assert graded(provider, task, "def f(x):\n    return [5, 5, 5]\n") == Grade(0.0, {"tests": 4 / 5})


def test_calls_may_depend_on_answers_but_not_for_ever(provider: LocalProvider) -> None:
    hidden = "def check(f):\n    x = 0\n    while x < {}:\n        x = f(x)\n    assert x >= {}\n"
    for stop, reward in ((3, 1.0), (30, 0.0)):
        task = of(hidden.format(stop, stop), "def f(x):\n    return x + 100\n")
        assert graded(provider, task, "def f(x):\n    return x + 1\n").reward == reward


def test_an_assertion_in_a_try_is_left_to_its_handler(provider: LocalProvider) -> None:
    hidden = "def check(f):\n    try:\n        assert f(-1) == 0\n"
    hidden += "    except ValueError:\n        assert f(1) == (1, {1})\n"
    task = of(hidden, REFERENCE)
    assert graded(provider, task, REFERENCE).reward == 1.0
    assert graded(provider, task, WRONG).reward == 0.0


@pytest.mark.parametrize(
    ("hidden", "problem"),
    [
        ("def check(f):\n    f(1)\n", "asserts nothing"),
        ("def check(f):\n    assert f(1) == 5\n", "assert f\\(1\\) == 5"),
        ("def check(f):\n    assert f(lambda: 1)\n", "NotData: unsupported type function"),
        ("def check(f:\n", "SyntaxError"),
        ("def other(f):\n    pass\n", "KeyError"),
    ],
)
def test_a_task_that_its_reference_cannot_pass_is_no_grade(
    provider: LocalProvider, hidden: str, problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        graded(provider, of(hidden, REFERENCE), REFERENCE)


def test_a_reference_that_is_a_script_is_refused(provider: LocalProvider) -> None:
    task = Task("test/script", "", FILES, TESTS, Script({}, "true"))
    with pytest.raises(ValueError, match="not a script"):
        grade(provider, task, TESTS, FILES)


@pytest.mark.parametrize(
    ("source", "timeout", "told"),
    [
        (REFERENCE, 5.0, VisibleResult(True, "2/2 pass")),
        (
            FILES["m.py"],
            5.0,
            VisibleResult(False, "1/2 pass, FAIL assert f(3) == (9, {3}) (f gave (3, {3}))"),
        ),
        (
            "def f(x):\n    return x.y\n",
            5.0,
            VisibleResult(
                False,
                "0/2 pass, FAIL assert f(1) == (1, {1}) "
                "(f raised AttributeError: 'int' object has no attribute 'y')",
            ),
        ),
        (
            "def f(x):\n    while True: pass\n",
            1.0,
            VisibleResult(False, "0/2 pass, FAIL assert f(1) == (1, {1}) (f gave no value: Timeout)"),
        ),
    ],
)
def test_what_the_agent_reads(
    provider: LocalProvider, source: str, timeout: float, told: VisibleResult
) -> None:
    workspace = provider.start({"m.py": source})
    assert run_visible(provider, TASK, TESTS, workspace, timeout=timeout) == told
    workspace.close()


class SlowProvider(LocalProvider):
    """Takes its time for every start."""

    def start(self, files: dict[str, str], spec: SandboxSpec = USUAL) -> RunnerSandbox:
        time.sleep(0.2)
        return super().start(files, spec)


class Watched:
    """A sandbox, and the seconds that each request leaves for the agent's function."""

    def __init__(self, sandbox: RunnerSandbox):
        self.seconds: list[float] = []
        self._sandbox = sandbox

    def call_function(
        self, path: str, function: str, calls: Sequence[Sequence[Any]], *, timeout: float
    ) -> list[CallResult]:
        self.seconds.append(timeout)
        return self._sandbox.call_function(path, function, calls, timeout=timeout)


def test_a_sandbox_that_starts_late_takes_nothing_of_the_time_of_the_agents_function() -> None:
    with SlowProvider() as slow:
        workspace = Watched(slow.start({"m.py": REFERENCE}))
        assert run_visible(slow, TASK, TESTS, workspace, timeout=5.0).passed
    assert workspace.seconds == [5.0]


def test_no_visible_tests_are_none_that_fail(provider: LocalProvider) -> None:
    task = of(HIDDEN, REFERENCE, visible="")
    assert isinstance(task.tests, AssertTests)
    workspace = provider.start(FILES)
    assert run_visible(provider, task, task.tests, workspace).passed
    workspace.close()


def test_references_run_once_and_few_are_remembered(provider: LocalProvider) -> None:
    memory = assertions._Memory()
    reference = assertions._Reference((), 1)
    for key in range(1000):
        memory.put(key, reference)
    assert memory.get(0) is None
    assert memory.get(999) is reference
    graded(provider, TASK, REFERENCE)
    known = len(assertions._MEMORY._known)
    assert graded(provider, TASK, REFERENCE).reward == 1.0
    assert len(assertions._MEMORY._known) == known


def test_what_runs_in_a_sandbox_needs_no_newer_python_than_3_9() -> None:
    for module in (harness, values):
        source = inspect.getsource(module)
        assert "from __future__ import annotations" in source
        assert ast.parse(source, feature_version=(3, 9)).body
