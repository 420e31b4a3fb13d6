"""Whether a task is fit for training, found by trying: its reference solution, doing nothing, and looking around.

The names of the checks are OpenEnv's validation ids, but for two that it has none for (``hintloop.``). A task that
fails one of them would teach the wrong thing, or nothing.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hintloop.envs.grading import repository
from hintloop.envs.grading.grade import grade, has_visible_tests, run_visible
from hintloop.envs.grading.handin import Files, SolutionFailed, hand_in, solved, start_solved
from hintloop.envs.grading.result import Grade
from hintloop.envs.sandbox.base import Sandbox, SandboxProvider
from hintloop.envs.sandbox.limits import MiB
from hintloop.envs.task import AssertTests, RepositoryTests, Script, Task

MANIFEST = "static.manifest"
"""The check that also fails for a task that cannot be read at all."""
MAX_SECONDS = 3600.0
"""Longest time limit of a script, as in OpenEnv's validation."""
_TELLING = 12
"""Characters from which a line that two files share is not chance."""
_SAID = 500
"""Characters of what failing tests said that a finding has."""
_TEST_SHARE, _SOLUTION_SHARE = 0.9, 0.5
"""How much of its telling lines another file may hold. Visible tests may well be a part of the hidden ones."""
_QUOTED = re.compile(r"`([^`\n]+)`")
_FILE = re.compile(
    r"[\w./-]+\.(?:py|js|ts|c|cc|cpp|h|rs|go|java|rb|sh|md|txt|json|toml|ya?ml|csv|sql|html|css|cfg|ini)"
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
        (MANIFEST, lambda: _manifest(task)),
        ("static.timeout_ceiling", lambda: _time_limits(task)),
        ("static.resource_declaration", lambda: _resources(task)),
        ("runtime.task_declaration_accuracy", lambda: _named_files(provider, task)),
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
    if _worst(best, lambda reward: reward >= 1.0):
        return findings
    if has_visible_tests(task):
        findings.append(_finding(task, "hintloop.visible_tests", _visible(provider, task)))
    if isinstance(task.tests, RepositoryTests):
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


def _resources(task: Task) -> str:
    """More memory than there is would be no limit; the working directory is kept in memory, too."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for name, size in (("memory", task.sandbox.memory), ("disk", task.sandbox.disk)):
        if not 0 < size <= machine:
            return f"{name} must be in (0, {machine // MiB}] MiB, what this machine has: {size // MiB}"
    return "" if task.sandbox.cpus > 0 else "cpus must be above 0"


def _named_files(provider: SandboxProvider, task: Task) -> str:
    """A file that the instruction names in backticks exists, or the solution or the tests make it."""
    words = [word for quoted in _QUOTED.findall(task.instruction) for word in quoted.split()]
    names = [word for word in words if _FILE.fullmatch(word)]
    known = {*task.files, *(task.solution if isinstance(task.solution, dict) else ())}
    if not isinstance(task.tests, RepositoryTests):
        known.add(task.tests.path)
    last = {_last(path) for path in known}
    missing = [name for name in names if _last(name) not in last]
    if missing and (task.sandbox.image is not None or isinstance(task.solution, Script)):
        missing = _absent(provider, task, missing)  # an image may hold it, a script may make it
    return f"the instruction names a file that does not exist: {missing[0]}" if missing else ""


def _last(path: str) -> str:
    return path.rpartition("/")[2]


def _absent(provider: SandboxProvider, task: Task, names: list[str]) -> list[str]:
    """Those that no sandbox has, before the solution and after it; none when that fails, as another check tells."""
    for solve in (False, True):
        try:
            sandbox = start_solved(provider, task) if solve else provider.start(task.files, task.sandbox)
        except SolutionFailed:
            return []
        try:
            names = [name for name in names if not _is_there(sandbox, name)]
        finally:
            sandbox.close()
    return names


def _is_there(sandbox: Sandbox, name: str) -> bool:
    command = f"test -e {name} || find . -name {_last(name)} | grep -q ."
    return sandbox.exec(command, timeout=10).exit_code == 0


def _visible(provider: SandboxProvider, task: Task) -> str:
    """The tests that the agent may run hold for the solution, or they would lead it astray."""
    try:
        sandbox = start_solved(provider, task)
    except SolutionFailed as error:
        return str(error)
    try:
        found = run_visible(provider, task, sandbox)
    finally:
        sandbox.close()
    return "" if found.passed else f"the reference solution fails them: {found.output.strip()[-_SAID:]}"


def _leaks(provider: SandboxProvider, task: Task) -> str:
    """Where the agent's sandbox holds what only hidden tests or the solution should hold."""
    sandbox = provider.start(task.files, task.sandbox)
    try:
        command = "find /tests/ /solution/ /logs/verifier/ -type f 2>/dev/null | head -n 1"
        if left := sandbox.exec(command, timeout=10).output.strip():
            return f"the agent's sandbox holds {left}"
        held = {path: _lines(_text(sandbox, path)) for path in sandbox.list_files()}
    finally:
        sandbox.close()
    secrets = [secret for secret in _secrets(provider, task, held) if secret.lines]
    for path, lines in held.items():
        for secret in secrets:
            if (secret.lines & lines).total() >= secret.share * secret.lines.total():
                return f"{path} gives {secret.name} away"
    return ""


@dataclass(frozen=True, slots=True)
class _Secret:
    """A file that the agent must not see, and how much of it another file may hold."""

    name: str
    lines: Counter[str]
    share: float


def _secrets(provider: SandboxProvider, task: Task, held: Mapping[str, Counter[str]]) -> list[_Secret]:
    """Hidden tests, the solution, and what a script makes of files; ``held``: the lines of each file at first.

    Of a solution only the lines count that the files which it changes did not have before.
    """
    hidden: dict[str, str] = {}
    if isinstance(task.tests, RepositoryTests):
        hidden = {f"the hidden test {path}": text for path, text in task.tests.script.files.items()}
    elif isinstance(task.tests, AssertTests):
        hidden = {"the hidden test": task.tests.hidden}
    found = [_Secret(name, _lines(text), _TEST_SHARE) for name, text in hidden.items()]
    made = _made(provider, task)
    solution = {f"the solution {path}": text for path, text in made.items() if text is not None}
    if isinstance(task.solution, Script):
        solution |= {f"the solution {path}": text for path, text in task.solution.files.items()}
    known = {line for path in made for line in held.get(path, ())}
    for name, text in solution.items():
        new = Counter({line: count for line, count in _lines(text).items() if line not in known})
        found.append(_Secret(name, new, _SOLUTION_SHARE))
    return found


def _made(provider: SandboxProvider, task: Task) -> Files:
    """The files that the solution changes, as it leaves them; none when it fails, as another check tells."""
    try:
        made = solved(provider, task)
    except SolutionFailed:
        return {}
    return {path: text for path, text in made.items() if text != task.files.get(path)}


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
