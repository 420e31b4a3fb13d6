"""Whether a task is fit for training, found by trying: its reference solution, doing nothing, and looking around.

The names of the checks are OpenEnv's validation ids, ``hintloop.canary`` excepted. A task that fails one of them
would teach the wrong thing, or nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from hintloop.envs.grading import repository
from hintloop.envs.grading.grade import grade
from hintloop.envs.grading.handin import Files, SolutionFailed, hand_in, solved
from hintloop.envs.grading.result import Grade
from hintloop.envs.sandbox.base import Sandbox, SandboxProvider
from hintloop.envs.task import AssertTests, RepositoryTests, Script, Task

MAX_SECONDS = 3600.0
"""Longest time limit of a script, as in OpenEnv's validation."""
_TELLING = 12
"""Characters from which a line that two files share is not chance."""
_SAID = 500
"""Characters of what failing tests said that a finding has."""
_TEST_SHARE, _SOLUTION_SHARE = 0.9, 0.5
"""How much of its telling lines another file may hold. Visible tests may well be a part of the hidden ones."""
_NAMED_FILE = re.compile(
    r"`([\w./-]+\.(?:py|js|ts|c|cc|cpp|h|rs|go|java|rb|sh|md|txt|json|toml|ya?ml|csv|sql|html|css|cfg|ini))`"
)


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check says of one task."""

    task_id: str
    check: str
    passed: bool
    detail: str
    """Why it failed; empty when it passed."""


def check_task(provider: SandboxProvider, task: Task, *, times: int = 3) -> list[Finding]:
    """Every check, in a fixed order. Grading is tried ``times`` times. Raises ``SandboxDead``."""
    checks: tuple[tuple[str, Callable[[], str]], ...] = (
        ("static.manifest", lambda: _manifest(task)),
        ("static.timeout_ceiling", lambda: _time_limits(task)),
        ("runtime.task_declaration_accuracy", lambda: _named_files(task)),
        ("semantic.no_solution_leakage", lambda: _leaks(provider, task)),
    )
    findings = [_finding(task, name, check()) for name, check in checks]
    floor = [grade(provider, task, untouched(provider, task)) for _ in range(times)]
    findings.append(_finding(task, "semantic.floor_gap", _worst(floor, lambda reward: reward <= 0.0)))
    try:
        best = [grade(provider, task, solved(provider, task)) for _ in range(times)]
    except SolutionFailed as error:
        return [*findings, _finding(task, "semantic.oracle_max", str(error))]
    findings.append(_finding(task, "semantic.oracle_max", _worst(best, lambda reward: reward >= 1.0)))
    findings.append(_finding(task, "semantic.verifier_determinism", _changes(best) or _changes(floor)))
    if isinstance(task.tests, RepositoryTests) and not _worst(best, lambda reward: reward >= 1.0):
        found = repository.canary_works(provider, task)
        findings.append(_finding(task, "hintloop.canary", "" if found else _NO_CANARY))
    return findings


_NO_CANARY = (
    "the reference solution passes altered tests as well, so a forged result cannot be told from a real one; "
    "compare results with literals in Python tests"
)


def untouched(provider: SandboxProvider, task: Task) -> Files:
    """What an agent that does nothing hands in."""
    sandbox = provider.start(task.files, task.sandbox)
    try:
        return hand_in(task, sandbox).files
    finally:
        sandbox.close()


def _finding(task: Task, check: str, problem: str) -> Finding:
    return Finding(task.task_id, check, not problem, problem)


def _manifest(task: Task) -> str:
    if not task.instruction.strip():
        return "the instruction is empty"
    if not task.solution:
        return "there is no reference solution"
    return "" if task.max_turns >= 1 else "max_turns must be at least 1"


def _time_limits(task: Task) -> str:
    scripts = [s for s in (task.solution, getattr(task.tests, "script", None)) if isinstance(s, Script)]
    too_long = [script.command for script in scripts if not 0 < script.timeout <= MAX_SECONDS]
    return f"a time limit must be in (0, {MAX_SECONDS:g}] s: {too_long[0]}" if too_long else ""


def _named_files(task: Task) -> str:
    """A file that the instruction names in backticks exists, or the solution or the tests make it."""
    known = {*task.files, *(task.solution if isinstance(task.solution, dict) else ())}
    if task.sandbox.image is not None or isinstance(task.solution, Script):
        return ""  # an image may hold it, a script may make it
    if not isinstance(task.tests, RepositoryTests):
        known.add(task.tests.path)
    names = {path.rpartition("/")[2] for path in known}
    missing = [name for name in _NAMED_FILE.findall(task.instruction) if name.rpartition("/")[2] not in names]
    return f"the instruction names a file that does not exist: {missing[0]}" if missing else ""


def _leaks(provider: SandboxProvider, task: Task) -> str:
    """Where the agent's sandbox holds what only hidden tests or the solution should hold."""
    secrets = _secrets(task)
    sandbox = provider.start(task.files, task.sandbox)
    try:
        command = "find /tests/ /solution/ /logs/verifier/ -type f 2>/dev/null | head -n 1"
        if left := sandbox.exec(command, timeout=10).output.strip():
            return f"the agent's sandbox holds {left}"
        for path in sandbox.list_files():
            lines = _lines(_text(sandbox, path))
            for secret in secrets:
                if (secret.lines & lines).total() >= secret.share * secret.lines.total():
                    return f"{path} gives {secret.name} away"
    finally:
        sandbox.close()
    return ""


@dataclass(frozen=True, slots=True)
class _Secret:
    """A file that the agent must not see, and how much of it another file may hold."""

    name: str
    lines: Counter[str]
    share: float


def _secrets(task: Task) -> list[_Secret]:
    """Of a solution's file only the lines count that the task's own file does not have."""
    hidden: dict[str, str] = {}
    if isinstance(task.tests, RepositoryTests):
        hidden = {f"the hidden test {path}": text for path, text in task.tests.script.files.items()}
    elif isinstance(task.tests, AssertTests):
        hidden = {"the hidden test": task.tests.hidden}
    found = [_Secret(name, _lines(text), _TEST_SHARE) for name, text in hidden.items()]
    script = isinstance(task.solution, Script)
    solution = task.solution.files if isinstance(task.solution, Script) else task.solution
    for path, text in solution.items():
        own: Counter[str] = Counter() if script else _lines(task.files.get(path, ""))
        found.append(_Secret(f"the solution {path}", _lines(text) - own, _SOLUTION_SHARE))
    return [secret for secret in found if secret.lines]


def _lines(text: str) -> Counter[str]:
    return Counter(line.strip() for line in text.split("\n") if len(line.strip()) >= _TELLING)


def _text(sandbox: Sandbox, path: str) -> str:
    try:
        return sandbox.read(path).decode("utf-8", "replace")
    except (FileNotFoundError, PermissionError):
        return ""


def _worst(grades: list[Grade], good: Callable[[float], bool]) -> str:
    bad = [found for found in grades if not good(found.reward)]
    if not bad:
        return ""
    said = f"; its tests said: {bad[0].said.strip()[-_SAID:]}" if bad[0].said.strip() else ""
    return f"reward {bad[0].reward:g} in {len(bad)} of {len(grades)} tries, {bad[0].parts}{said}"


def _changes(grades: list[Grade]) -> str:
    other = next((found for found in grades if found != grades[0]), None)
    return "" if other is None else f"the same work got {grades[0]} and {other}"
