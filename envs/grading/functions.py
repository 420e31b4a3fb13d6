"""Grading by function calls: the sandbox only ever sees arguments; expectations and comparison stay here.

A candidate can return whatever it likes but not decide what is right, so patched builtins, objects that equal
everything, forged reports and early exits all end as a value that is compared, or as none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hintloop.envs.grading.result import Grade, VisibleResult
from hintloop.envs.sandbox.base import CallResult, SandboxProvider
from hintloop.envs.task import Case, FunctionTests, Task

MAX_GOT_CHARS = 40
GRADE_SECONDS = 5.0
VISIBLE_SECONDS = 2.0


class Caller(Protocol):
    """What grading needs of a sandbox; see ``hintloop.envs.sandbox.base.Sandbox``."""

    def call_function(
        self, path: str, function: str, calls: Sequence[Sequence[Any]], *, timeout: float
    ) -> list[CallResult]: ...


@dataclass(frozen=True, slots=True)
class CaseResult:
    """Outcome of one case; ``got`` is a short repr of the value, or the name of what was raised."""

    passed: bool
    got: str


def run_cases(
    sandbox: Caller, path: str, function: str, cases: Sequence[Case], *, timeout: float
) -> list[CaseResult]:
    """One result per case, in order. ``timeout`` (seconds) covers all together. Raises ``SandboxDead``."""
    results = sandbox.call_function(path, function, [case.args for case in cases], timeout=timeout)
    return [_case_result(case, result) for case, result in zip(cases, results, strict=True)]


def run_visible(sandbox: Caller, tests: FunctionTests) -> VisibleResult:
    """How many visible cases pass, and the first one that does not. Raises ``SandboxDead``."""
    results = run_cases(sandbox, tests.path, tests.function, tests.visible, timeout=VISIBLE_SECONDS)
    failed = [(case, r) for case, r in zip(tests.visible, results, strict=True) if not r.passed]
    output = f"{len(results) - len(failed)}/{len(results)} pass"
    if not failed:
        return VisibleResult(True, output)
    case, result = failed[0]
    arguments = ", ".join(map(repr, case.args))
    return VisibleResult(
        False, f"{output}, FAIL {tests.function}({arguments}) gave {result.got} want {case.expected!r}"
    )


def grade(
    provider: SandboxProvider,
    task: Task,
    tests: FunctionTests,
    files: dict[str, str],
    *,
    timeout: float = GRADE_SECONDS,
) -> Grade:
    """Grade ``files`` (path -> content, as handed in) on the hidden cases, in a fresh sandbox of their own.

    Raises ``SandboxDead`` for infrastructure trouble: that is no grade. Files that no sandbox can hold fail.
    """
    if not tests.hidden:
        raise ValueError(f"task {task.task_id} has no hidden cases, so nothing can be graded")
    try:
        sandbox = provider.start(files, task.sandbox)
    except ValueError:
        return Grade(0.0, {"tests": 0.0})
    try:
        results = run_cases(sandbox, tests.path, tests.function, tests.hidden, timeout=timeout)
    finally:
        sandbox.close()
    passed = sum(result.passed for result in results)
    return Grade(float(passed == len(results)), {"tests": passed / len(results)})


def same(left: Any, right: Any) -> bool:
    """Equal in value and in exact type, all the way down; NaN is the same as NaN, tuples count as lists.

    ``True`` is not ``1`` and ``1`` is not ``1.0``; dicts may differ in order.
    """
    if isinstance(left, list | tuple):
        return isinstance(right, list | tuple) and len(left) == len(right) and all(map(same, left, right))
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        alike = set(map(_typed, left)) == set(map(_typed, right))
        return alike and all(same(value, right[key]) for key, value in left.items())
    if isinstance(left, set | frozenset):
        return set(map(_typed, left)) == set(map(_typed, right))
    if isinstance(left, float) and math.isnan(left):
        return math.isnan(right)
    return bool(left == right)


def _typed(key: Any) -> Any:
    """A key or item of a set, such that only one of the same type equals it."""
    if isinstance(key, tuple | frozenset):
        return type(key), type(key)(map(_typed, key))
    return type(key), key


def _case_result(case: Case, result: CallResult) -> CaseResult:
    if result.error is not None:
        return CaseResult(False, result.error.partition(":")[0][:MAX_GOT_CHARS])
    return CaseResult(same(result.value, case.expected), _short(result.value))


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of too many digits, a forged report nested without end
        text = type(value).__name__
    return text if len(text) <= MAX_GOT_CHARS else text[: MAX_GOT_CHARS - 3] + "..."
