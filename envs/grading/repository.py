"""Grading by a script: what it says of the hand-in, unless altered tests show that the hand-in forges.

What a script runs is the agent's code in the script's own processes, and that code could write the verdict itself:
patch the test runner, equal everything, look the expectation up. So good work has to fail as well: with some of the
expectations altered (``canary``), in fresh sandboxes of their own, the same files must do exactly as the reference
solution does there (``guard``): fail what is altered, and pass the rest. The real tests run last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from hintloop.envs.grading import canary
from hintloop.envs.grading.evidence import Run, claims_too_much, contradiction, exceeds, lacks
from hintloop.envs.grading.guard import TRIES, find_guard
from hintloop.envs.grading.result import Grade, VisibleResult
from hintloop.envs.grading.script import run_script
from hintloop.envs.sandbox.base import SandboxProvider, Status
from hintloop.envs.task import RepositoryTests, Task

if TYPE_CHECKING:
    from hintloop.envs.tools import Workspace

VISIBLE_SECONDS = 60.0
MAX_RUNS = 4 + (1 + TRIES) * canary.NUM_VERSIONS
"""Of the script: for the hand-in with the real and the altered tests, and for the reference solution with each."""


def grade(
    provider: SandboxProvider, task: Task, tests: RepositoryTests, files: Mapping[str, str | None]
) -> Grade:
    """Grade what was handed in (see ``handin.Files``). Raises ``SandboxDead``, and never scores that.

    Parts: ``tests``, the script's number; 1.0 for each of ``timeout``, ``no_reward``, ``bad_reward``, ``forged``
    and ``unsteady`` that applies; ``planted``, how many files were refused; ``unguarded`` when no altered tests can
    tell a forged reward.
    """
    guard = find_guard(provider, task, tests)
    if guard is None:
        run = run_script(provider, task, tests, tests.script.files, files)
        return Grade(run.reward, _parts(run) | ({"unguarded": 1.0} if run.reward else {}), run.said)
    tried: list[tuple[Run, Run]] = []
    for altered, known in guard.wanted():
        run = run_script(provider, task, tests, altered, files)
        tried.append((run, known))
        if guard.gives_parts():
            continue
        if exceeds(run, known, guard.reference):  # by chance, or forged: the real tests will tell
            break
        if lacks(run, known, guard.reference):
            return Grade(0.0, _parts(replace(run, reward=0.0)), run.said)
    run = run_script(provider, task, tests, tests.script.files, files)
    problem = _problem(run, guard.reference, tried) if run.reward else None
    if problem:
        return Grade(0.0, {**_parts(run), problem: 1.0}, run.said)
    return Grade(run.reward, _parts(run), run.said)


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
    return isinstance(task.tests, RepositoryTests) and find_guard(provider, task, task.tests) is not None
