"""Grading by assertions that never meet the agent's code: only arguments go to it, and only data comes back.

The check runs in a second sandbox. There it is run once on the reference solution, to learn which arguments it
asks for; the agent's function is called with these in a sandbox of its own, and the check is run again on the
answers. So an object that equals everything, a patched builtin, a look at the call stack or an early exit ends
as data that is compared, or as none.

What follows from that: a function is taken to give one answer for one argument list, what it does to its
arguments in place is not seen by the check, and an exception is known by its name and message only.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files as package_files
from threading import Lock
from typing import Any

from hintloop.envs.grading.functions import GRADE_SECONDS, VISIBLE_SECONDS, Caller
from hintloop.envs.grading.result import Grade, VisibleResult
from hintloop.envs.sandbox import values
from hintloop.envs.sandbox.base import CallResult, SandboxProvider
from hintloop.envs.task import AssertTests, Task

RECORD_SECONDS = 30.0
"""For the check with the reference, which runs once per task and is known to end."""
MAX_ROUNDS = 4
"""How often new calls may come from earlier answers, as in ``f(f(x))``."""
MAX_SECONDS = RECORD_SECONDS + 2 * MAX_ROUNDS * GRADE_SECONDS
"""For one grading in all."""
MAX_ANSWERS = 4 * 1024 * 1024
"""Characters of all answers of one attempt."""
_HARNESS = "hintloop_harness.py"
_NUM_KEPT = 256


@dataclass(frozen=True, slots=True)
class _Reference:
    """What the check does with the reference: the argument lists that it asks for, and how often it asserts."""

    calls: tuple[str, ...]
    executed: int


@dataclass(frozen=True, slots=True)
class _Verdict:
    """How many of ``total`` assertions held, and the first that did not."""

    held: int
    total: int
    failed: str | None


def grade(
    provider: SandboxProvider,
    task: Task,
    tests: AssertTests,
    files: dict[str, str],
    *,
    timeout: float = GRADE_SECONDS,
) -> Grade:
    """Grade ``files`` (path -> content, as handed in) by the hidden check.

    ``timeout`` (seconds) covers all calls of the agent's function together. Raises ``SandboxDead`` for
    infrastructure trouble and ``ValueError`` for a task that is at fault: a check without any assertion, or one
    that the reference solution does not pass. Files that no sandbox can hold fail.
    """
    reference = _reference(provider, task, tests, tests.hidden)
    try:
        sandbox = provider.start(files, task.sandbox)
    except ValueError:
        return Grade(0.0, {"tests": 0.0})
    try:
        verdict = _judge(provider, task, tests, tests.hidden, reference, sandbox, timeout)
    finally:
        sandbox.close()
    return Grade(float(verdict.failed is None), {"tests": verdict.held / verdict.total}, verdict.failed or "")


def run_visible(
    provider: SandboxProvider,
    task: Task,
    tests: AssertTests,
    workspace: Caller,
    *,
    timeout: float = VISIBLE_SECONDS,
) -> VisibleResult:
    """How many visible assertions hold where the agent works, and the first that does not. Raises as ``grade``."""
    if not tests.visible:
        return VisibleResult(True, "there are no visible tests")
    reference = _reference(provider, task, tests, tests.visible)
    verdict = _judge(provider, task, tests, tests.visible, reference, workspace, timeout)
    output = f"{verdict.held}/{verdict.total} pass"
    if verdict.failed is None:
        return VisibleResult(True, output)
    return VisibleResult(False, f"{output}, FAIL {verdict.failed}")


def _judge(
    provider: SandboxProvider,
    task: Task,
    tests: AssertTests,
    source: str,
    reference: _Reference,
    caller: Caller,
    timeout: float,
) -> _Verdict:
    answers: dict[str, list[str]] = {}
    left = timeout  # of the agent's own calls: a sandbox that starts late is not its fault
    wanted: Sequence[str] = reference.calls
    box = provider.start({_HARNESS: _harness()}, task.sandbox)
    try:
        for _ in range(MAX_ROUNDS):
            began = time.monotonic()
            answers |= _answers(caller, tests, wanted, max(0.01, left))
            left -= time.monotonic() - began
            arguments = [source, tests.function, _bounded(answers)]
            (result,) = box.call_function(_HARNESS, "replay", [arguments], timeout=timeout)
            if result.error is not None:
                return _Verdict(0, reference.executed, f"check ({result.error})")
            wanted = result.value["missing"]
            if not wanted or left <= 0:
                break
    finally:
        box.close()
    return _verdict(result.value, reference)


def _verdict(found: dict[str, Any], reference: _Reference) -> _Verdict:
    """Answers must not make the check assert less than it does with the reference."""
    held, failed = found["held"], found["failed"]
    total = max(found["executed"], reference.executed)
    if failed is None and (held < total or found["missing"]):
        failed = f"check (only {held} of {total} assertions were reached)"
    return _Verdict(held, total, failed)


def _answers(
    caller: Caller, tests: AssertTests, calls: Sequence[str], timeout: float
) -> dict[str, list[str]]:
    arguments = [values.decode(text) for text in calls]
    results = caller.call_function(tests.path, tests.function, arguments, timeout=timeout)
    return {text: _answer(result) for text, result in zip(calls, results, strict=True)}


def _answer(result: CallResult) -> list[str]:
    if result.error is not None:
        return ["error", result.error]
    try:
        return ["value", values.encode(result.value)]
    except (ValueError, RecursionError):  # a forged report can hold what no function returns
        return ["error", "NotData: too large"]


def _bounded(answers: dict[str, list[str]]) -> dict[str, list[str]]:
    if sum(len(text) for _, text in answers.values()) <= MAX_ANSWERS:
        return answers
    return {asked: ["error", "NotData: too large together"] for asked in answers}


def _harness() -> str:
    return (package_files("hintloop.envs.grading") / "harness.py").read_text("utf-8")


# The reference


class _Memory:
    """What the newest checks do with their references."""

    def __init__(self) -> None:
        self._known: OrderedDict[Any, _Reference] = OrderedDict()
        self._lock = Lock()

    def get(self, key: Any) -> _Reference | None:
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
            return self._known.get(key)

    def put(self, key: Any, reference: _Reference) -> None:
        with self._lock:
            self._known[key] = reference
            while len(self._known) > _NUM_KEPT:
                self._known.popitem(last=False)


_MEMORY = _Memory()


def _reference(provider: SandboxProvider, task: Task, tests: AssertTests, source: str) -> _Reference:
    if not isinstance(task.solution, dict):
        raise ValueError(f"task {task.task_id}: assertions need a reference solution of files, not a script")
    files = {**task.files, **task.solution}
    key = (task.task_id, source, tests.path, tests.function, tuple(sorted(files.items())))
    known = _MEMORY.get(key)
    if known is None:
        known = _record(provider, task, tests, source, files)
        _MEMORY.put(key, known)
    return known


def _record(
    provider: SandboxProvider, task: Task, tests: AssertTests, source: str, files: dict[str, str]
) -> _Reference:
    box = provider.start({**files, _HARNESS: _harness()}, task.sandbox)
    try:
        arguments = [source, tests.path, tests.function]
        (result,) = box.call_function(_HARNESS, "record", [arguments], timeout=RECORD_SECONDS)
    finally:
        box.close()
    problem = result.error or result.value["failed"]
    if problem is None and not result.value["executed"]:
        problem = "it asserts nothing"
    if problem is not None:
        raise ValueError(f"task {task.task_id} cannot be graded by its check: {problem}")
    return _Reference(tuple(result.value["calls"]), result.value["executed"])
