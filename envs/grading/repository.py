"""Grading by a script, in a fresh sandbox that no process of the agent has seen.

The hand-in is laid over the task's own files, the tests come last, and the verdict is read when every process is
dead. What such a script runs is the agent's code in the script's own processes, though, and that code could write
the verdict itself: patch the test runner, equal everything, look the expectation up. So good work has to fail as
well: with some of the expectations altered (``canary``), in fresh sandboxes of their own, the same files must do
exactly as the reference solution does there: fail what is altered, and pass the rest. The real tests run last.
"""

from __future__ import annotations

import json
import math
import secrets
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from hintloop.envs.grading import canary, hygiene
from hintloop.envs.grading.evidence import (
    REPORT,
    Run,
    claims_too_much,
    contradiction,
    exceeds,
    lacks,
    outcomes,
    told_apart,
)
from hintloop.envs.grading.handin import Files, SolutionFailed, solved
from hintloop.envs.grading.result import Grade, VisibleResult
from hintloop.envs.sandbox.base import Sandbox, SandboxProvider, Status
from hintloop.envs.task import RepositoryTests, Task

if TYPE_CHECKING:
    from hintloop.envs.tools import Workspace

VISIBLE_SECONDS = 60.0
_TRIES = 2
"""How often altered tests are drawn, until the reference solution shows that they tell enough."""
MAX_RUNS = 4 + (1 + _TRIES) * canary.NUM_VERSIONS
"""Of the script: for the hand-in with the real and the altered tests, and for the reference solution with each."""
REWARD_FILES = ("/logs/verifier/reward.json", "/logs/verifier/reward.txt")
"""The first that exists counts."""
_CLEAN_UP_SECONDS = 30.0
_GRACE = 0.3
"""Seconds that processes get to end by themselves after the script."""
_NUM_GUARDS = 2
"""Of each task; one is drawn for each grading."""
_NUM_KEPT = 512
_HARDENED = {
    "HOME": "/tmp",
    "PYTHONNOUSERSITE": "1",
    "PYTHONBREAKPOINT": "0",
    "PYTEST_ADDOPTS": f"-p no:cacheprovider --tb=short --junitxml={REPORT}",
}
"""Nothing that lies in the working directory is a start-up file or a debugger."""


_Version = tuple[dict[str, str], Run]
"""Altered tests, and what the reference solution gets by them."""


@dataclass(frozen=True, slots=True)
class _Guard:
    """What tells forged rewards of one task."""

    reference: Run
    """What the reference solution gets by the real tests."""
    versions: list[_Version]
    everything: _Version
    """With every test altered: for work that claims a part of the reward only."""

    def told_apart(self) -> set[str]:
        return told_apart(self.reference, [run for _, run in self.versions])

    def gives_parts(self) -> bool:
        """Whether the script gives less of the reward for some of the tests, and not nothing."""
        return "part" in self.told_apart()

    def is_complete(self) -> bool:
        """Whether the reference shows every test to be altered, or at least that each counts by itself."""
        passed = {name for name, passes in self.reference.outcomes.items() if passes}
        return self.told_apart() >= (passed or {"part"})


def grade(
    provider: SandboxProvider, task: Task, tests: RepositoryTests, files: Mapping[str, str | None]
) -> Grade:
    """Grade what was handed in (see ``handin.Files``). Raises ``SandboxDead``, and never scores that.

    Parts: ``tests``, the script's number; 1.0 for each of ``timeout``, ``no_reward``, ``bad_reward``, ``forged``
    and ``unsteady`` that applies; ``planted``, how many files were refused; ``unguarded`` when no altered tests can
    tell a forged reward.
    """
    guard = _guard(provider, task, tests)
    tried: list[tuple[Run, Run]] = []
    for altered, known in _wanted(guard):
        run = _run(provider, task, tests, altered, files)
        tried.append((run, known))
        if guard is None or guard.gives_parts():
            continue
        if exceeds(run, known, guard.reference):  # by chance, or forged: the real tests will tell
            break
        if lacks(run, known, guard.reference):
            return Grade(0.0, _parts(replace(run, reward=0.0)))
    run = _run(provider, task, tests, tests.script.files, files)
    parts = _parts(run)
    if run.reward == 0.0:
        return Grade(0.0, parts)
    if guard is None:
        return Grade(run.reward, {**parts, "unguarded": 1.0})
    problem = _problem(run, guard.reference, tried)
    return Grade(0.0, {**parts, problem: 1.0}) if problem else Grade(run.reward, parts)


def _wanted(guard: _Guard | None) -> list[_Version]:
    if guard is None:
        return []
    return [*guard.versions, guard.everything] if guard.gives_parts() else guard.versions


def _parts(run: Run) -> dict[str, float]:
    parts = {"tests": run.reward}
    if run.problem is not None:
        parts[run.problem] = 1.0
    if run.planted:
        parts["planted"] = float(run.planted)
    return parts


def _problem(run: Run, reference: Run, tried: list[tuple[Run, Run]]) -> str | None:
    """What speaks against the reward of ``run``, if anything."""
    if claims_too_much(run, reference):
        return "forged"
    found = (contradiction(run, reference, altered, known) for altered, known in tried)
    return next((problem for problem in found if problem), None)


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
    return isinstance(task.tests, RepositoryTests) and _guard(provider, task, task.tests) is not None


def _run(
    provider: SandboxProvider,
    task: Task,
    tests: RepositoryTests,
    test_files: Mapping[str, str],
    files: Mapping[str, str | None],
) -> Run:
    sandbox = provider.start(task.files, task.sandbox)
    try:
        planted = _lay_over(sandbox, tests, files)
        for path, text in test_files.items():
            sandbox.write(f"/tests/{path}", text.encode("utf-8", "surrogateescape"))
        command = f"mkdir -p /logs/verifier\n{tests.script.command}"
        env = {**_HARDENED, **tests.script.env}
        result = sandbox.exec(command, timeout=tests.script.timeout, env=env, grace=_GRACE)
        reward, problem = (0.0, "timeout") if result.status is Status.TIMEOUT else _verdict(sandbox)
        found = outcomes(_text(sandbox, REPORT) or "")
    finally:
        sandbox.close()
    return Run(reward, problem, result.left_running, planted, found)


def _lay_over(sandbox: Sandbox, tests: RepositoryTests, files: Mapping[str, str | None]) -> int:
    """Make the hand-in's changes to the task's own files, all but those that are planted; how many those are."""
    planted = hygiene.refused(files, lambda path: _text(sandbox, path), tests.artifacts)
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


def _text(sandbox: Sandbox, path: str) -> str | None:
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
    """The guards of the newest tasks; None for a task that can have none."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, _Guard | None] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, key: str) -> tuple[bool, _Guard | None]:
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
            return key in self._known, self._known.get(key)

    def keep(self, key: str, made: _Guard | None) -> None:
        with self._lock:
            self._known[key] = made
            while len(self._known) > _NUM_KEPT:
                self._known.popitem(last=False)


_MEMORY = _Memory()


def _guard(provider: SandboxProvider, task: Task, tests: RepositoryTests) -> _Guard | None:
    """One of the task's guards, each made once; None when the reference solution does no worse by altered tests."""
    which = secrets.randbelow(_NUM_GUARDS)
    key = sha256(repr((task, provider.isolation, which)).encode("utf-8", "surrogateescape")).hexdigest()
    known, found = _MEMORY.find(key)
    if not known:
        found = _make_guard(provider, task, tests)
        _MEMORY.keep(key, found)
    return found


def _make_guard(provider: SandboxProvider, task: Task, tests: RepositoryTests) -> _Guard | None:
    if not task.solution or not canary.versions(tests.script.files, 0, apart=True):
        return None
    try:
        files: Files = solved(provider, task)
    except SolutionFailed:
        return None

    def known(altered: dict[str, str]) -> _Version:
        return altered, _run(provider, task, tests, altered, files)

    reference = _run(provider, task, tests, tests.script.files, files)
    if reference.reward == 0.0:
        return None
    best = _Guard(reference, [], known(canary.all_altered(tests.script.files, secrets.randbits(64))))
    for attempt in range(_TRIES):
        apart = bool(reference.outcomes) or attempt == 0
        made = canary.versions(tests.script.files, secrets.randbits(64), apart=apart)
        guard = replace(best, versions=[known(altered) for altered in made])
        best = max(guard, best, key=lambda guard: len(guard.told_apart()))
        if best.is_complete():
            break
    return best if best.told_apart() else None
