"""Grading by a script, in a fresh sandbox that no process of the agent has seen.

The hand-in is laid over the task's own files, the tests come last, and the verdict is read when every process is
dead. What such a script runs is the agent's code in the script's own processes, though, and that code could write
the verdict itself: patch the test runner, equal everything, look the expectation up. So good work has to fail as
well: with the expectations altered (``canary``), in a second fresh sandbox, the same files must do as badly as the
reference solution does there. What is left is code that cheats by chance, in the one run and not in the other: it
gets away with that in one of four tries at most.
"""

from __future__ import annotations

import json
import math
import secrets
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from hintloop.envs.grading import canary, hygiene
from hintloop.envs.grading.handin import Files, SolutionFailed, solved
from hintloop.envs.grading.result import Grade, VisibleResult
from hintloop.envs.sandbox.base import Sandbox, SandboxProvider, Status
from hintloop.envs.task import RepositoryTests, Task

if TYPE_CHECKING:
    from hintloop.envs.tools import Workspace

VISIBLE_SECONDS = 60.0
MAX_RUNS = 4
"""Of the script: for the hand-in with the real and the altered tests, and once for the reference solution with each."""
REWARD_FILES = ("/logs/verifier/reward.json", "/logs/verifier/reward.txt")
"""The first that exists counts."""
_CLEAN_UP_SECONDS = 30.0
_GRACE = 0.3
"""Seconds that processes get to end by themselves after the script."""
_NUM_KEPT = 256
_HARDENED = {
    "HOME": "/tmp",
    "PYTHONNOUSERSITE": "1",
    "PYTHONBREAKPOINT": "0",
    "PYTEST_ADDOPTS": "-p no:cacheprovider",
}
"""Nothing that lies in the working directory is a start-up file or a debugger."""


@dataclass(frozen=True, slots=True)
class _Run:
    """How a script ended: its reward, and what was wrong with it, if anything."""

    reward: float
    problem: str | None = None
    left_running: bool = False
    planted: int = 0


@dataclass(frozen=True, slots=True)
class _Canary:
    """Altered tests, the reward that the reference solution gets by them, and whether it leaves processes running."""

    files: dict[str, str]
    reward: float
    left_running: bool


def grade(
    provider: SandboxProvider, task: Task, tests: RepositoryTests, files: Mapping[str, str | None]
) -> Grade:
    """Grade what was handed in (see ``handin.Files``). Raises ``SandboxDead``, and never scores that.

    Parts: ``tests``, the script's number; 1.0 for each of ``timeout``, ``no_reward``, ``bad_reward``, ``forged``
    that applies; ``planted``, how many files were refused; ``unguarded`` when no canary can tell a forged reward.
    """
    run = _run(provider, task, tests, tests.script.files, files)
    parts = {"tests": run.reward}
    if run.problem is not None:
        parts[run.problem] = 1.0
    if run.planted:
        parts["planted"] = float(run.planted)
    if run.reward == 0.0:
        return Grade(0.0, parts)
    found = _canary(provider, task, tests)
    if found is None:
        return Grade(run.reward, {**parts, "unguarded": 1.0})
    if run.left_running and not found.left_running:  # whoever outlives the script may write its verdict
        return Grade(0.0, {**parts, "forged": 1.0})
    if run.reward > found.reward:
        altered = _run(provider, task, tests, found.files, files)
        allowed = found.reward if run.reward == 1.0 else math.nextafter(run.reward, 0.0)
        if altered.reward > allowed:
            return Grade(0.0, {**parts, "forged": 1.0})
    return Grade(run.reward, parts)


def run_visible(tests: RepositoryTests, sandbox: Workspace) -> VisibleResult:
    """Run the command that the agent may see. Raises ``SandboxDead``."""
    if tests.visible is None:
        raise ValueError("the task has no visible tests")
    result = sandbox.exec(tests.visible, timeout=VISIBLE_SECONDS)
    output = result.output
    if result.status is Status.TIMEOUT:
        output += f"\n[stopped after {VISIBLE_SECONDS:g} s]\n"
    return VisibleResult(result.exit_code == 0, output)


def canary_works(provider: SandboxProvider, task: Task) -> bool:
    """Whether the reference solution fails altered tests, so that a forged result can be told. ``SandboxDead``."""
    return isinstance(task.tests, RepositoryTests) and _canary(provider, task, task.tests) is not None


def _run(
    provider: SandboxProvider,
    task: Task,
    tests: RepositoryTests,
    test_files: Mapping[str, str],
    files: Mapping[str, str | None],
) -> _Run:
    sandbox = provider.start(task.files, task.sandbox)
    try:
        planted = _lay_over(sandbox, tests, files)
        for path, text in test_files.items():
            sandbox.write(f"/tests/{path}", text.encode("utf-8", "surrogateescape"))
        command = f"mkdir -p /logs/verifier\n{tests.script.command}"
        env = {**_HARDENED, **tests.script.env}
        result = sandbox.exec(command, timeout=tests.script.timeout, env=env, grace=_GRACE)
        reward, problem = (0.0, "timeout") if result.status is Status.TIMEOUT else _verdict(sandbox)
    finally:
        sandbox.close()
    return _Run(reward, problem, result.left_running, planted)


def _lay_over(sandbox: Sandbox, tests: RepositoryTests, files: Mapping[str, str | None]) -> int:
    """Make the hand-in's changes to the task's own files, all but those that are planted; how many those are."""
    planted = hygiene.refused(files, lambda path: _original(sandbox, path), tests.artifacts)
    removed = [path for path, text in files.items() if text is None and path not in planted]
    if removed:
        names = b"\0".join(path.encode("utf-8", "surrogateescape") for path in removed)
        sandbox.exec("xargs -0 rm -f --", timeout=_CLEAN_UP_SECONDS, stdin=names)
    for path, text in files.items():
        if text is not None and path not in planted:
            try:
                sandbox.write(path, text.encode("utf-8", "surrogateescape"))
            except (
                PermissionError
            ):  # no room, or a folder of that name: what the tests find then is their verdict
                continue
    return len(planted)


def _original(sandbox: Sandbox, path: str) -> str | None:
    try:
        return sandbox.read(path).decode("utf-8", "surrogateescape")
    except (FileNotFoundError, PermissionError):
        return None


def _verdict(sandbox: Sandbox) -> tuple[float, str | None]:
    """The reward that the script has left, or 0 and what is wrong with it."""
    for path in REWARD_FILES:
        try:
            text = sandbox.read(path).decode("utf-8", "replace").strip()
        except FileNotFoundError:
            continue
        except PermissionError:  # a link, or no regular file
            return 0.0, "bad_reward"
        reward = _number(text, path.endswith(".json"))
        return (0.0, "bad_reward") if reward is None else (reward, None)
    return 0.0, "no_reward"


def _number(text: str, is_json: bool) -> float | None:
    """A number in [0, 1]; in JSON it may be the only entry of an object, or the one named ``reward``."""
    try:
        value: Any = json.loads(text) if is_json else float(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict):
        value = value.get("reward", next(iter(value.values())) if len(value) == 1 else None)
    if type(value) not in (int, float) or not math.isfinite(value) or not 0 <= value <= 1:
        return None
    return float(value)


class _Memory:
    """The canaries of the newest tasks; None for a task that can have none."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, _Canary | None] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, key: str) -> tuple[bool, _Canary | None]:
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
            return key in self._known, self._known.get(key)

    def keep(self, key: str, made: _Canary | None) -> None:
        with self._lock:
            self._known[key] = made
            while len(self._known) > _NUM_KEPT:
                self._known.popitem(last=False)


_MEMORY = _Memory()


def _canary(provider: SandboxProvider, task: Task, tests: RepositoryTests) -> _Canary | None:
    """The task's altered tests: made once, and only kept when the reference solution does worse by them."""
    key = sha256(repr((task, provider.isolation)).encode("utf-8", "surrogateescape")).hexdigest()
    known, found = _MEMORY.find(key)
    if not known:
        found = _make_canary(provider, task, tests)
        _MEMORY.keep(key, found)
    return found


def _make_canary(provider: SandboxProvider, task: Task, tests: RepositoryTests) -> _Canary | None:
    altered = canary.altered(tests.script.files, secrets.randbits(64))
    if altered is None or not task.solution:
        return None
    try:
        reference: Files = solved(provider, task)
    except SolutionFailed:
        return None
    right = _run(provider, task, tests, tests.script.files, reference)
    wrong = _run(provider, task, tests, altered, reference)
    left_running = right.left_running or wrong.left_running
    return _Canary(altered, wrong.reward, left_running) if wrong.reward < right.reward else None
