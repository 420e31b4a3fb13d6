"""What a task's reference solution does with real and with altered tests: the measure for work that may forge.

It takes several runs of the script to know, so it is kept, for the newest tasks.
"""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from dataclasses import dataclass, replace
from hashlib import sha256

from hintloop.envs.grading import canary
from hintloop.envs.grading.evidence import Run, told_apart
from hintloop.envs.grading.handin import Files, SolutionFailed, solved
from hintloop.envs.grading.script import run_script
from hintloop.envs.sandbox.base import SandboxProvider
from hintloop.envs.task import RepositoryTests, Task

TRIES = 2
"""How often altered tests are drawn, until the reference solution shows that they tell enough."""
_NUM_GUARDS = 2
"""Of each task; one is drawn for each grading."""
_NUM_KEPT = 512

Version = tuple[dict[str, str], Run]
"""Altered tests, and what the reference solution gets by them."""


@dataclass(frozen=True, slots=True)
class Guard:
    """What tells forged rewards of one task."""

    reference: Run
    """What the reference solution gets by the real tests."""
    versions: list[Version]
    everything: Version
    """With every test altered: for work that claims a part of the reward only."""

    def told_apart(self) -> set[str]:
        """Which tests the altered versions tell about; see ``evidence.told_apart``."""
        return told_apart(self.reference, [run for _, run in self.versions])

    def gives_parts(self) -> bool:
        """Whether the script gives less of the reward for some of the tests, and not nothing."""
        return "part" in self.told_apart()

    def wanted(self) -> list[Version]:
        """The altered tests that work has to be tried with."""
        return [*self.versions, self.everything] if self.gives_parts() else self.versions

    def is_complete(self) -> bool:
        """Whether the reference shows every test to be altered, or at least that each counts by itself."""
        passed = {name for name, passes in self.reference.outcomes.items() if passes}
        return self.told_apart() >= (passed or {"part"})


def find_guard(provider: SandboxProvider, task: Task, tests: RepositoryTests) -> Guard | None:
    """One of the task's guards, each made once; None when the reference solution does no worse by altered tests."""
    which = secrets.randbelow(_NUM_GUARDS)
    key = sha256(repr((task, provider.isolation, which)).encode("utf-8", "surrogateescape")).hexdigest()
    known, found = _MEMORY.find(key)
    if not known:
        found = _make(provider, task, tests)
        _MEMORY.keep(key, found)
    return found


def _make(provider: SandboxProvider, task: Task, tests: RepositoryTests) -> Guard | None:
    if not task.solution or not canary.versions(tests.script.files, 0, apart=True):
        return None
    try:
        files: Files = solved(provider, task)
    except SolutionFailed:
        return None

    def known(altered: dict[str, str]) -> Version:
        return altered, run_script(provider, task, tests, altered, files)

    reference = run_script(provider, task, tests, tests.script.files, files)
    if reference.reward == 0.0:
        return None
    best = Guard(reference, [], known(canary.all_altered(tests.script.files, secrets.randbits(64))))
    for attempt in range(TRIES):
        apart = bool(reference.outcomes) or attempt == 0
        made = canary.versions(tests.script.files, secrets.randbits(64), apart=apart)
        guard = replace(best, versions=[known(altered) for altered in made])
        best = max(guard, best, key=lambda guard: len(guard.told_apart()))
        if best.is_complete():
            break
    return best if best.told_apart() else None


class _Memory:
    """The guards of the newest tasks; None for a task that can have none."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, Guard | None] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, key: str) -> tuple[bool, Guard | None]:
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
            return key in self._known, self._known.get(key)

    def keep(self, key: str, made: Guard | None) -> None:
        with self._lock:
            self._known[key] = made
            while len(self._known) > _NUM_KEPT:
                self._known.popitem(last=False)


_MEMORY = _Memory()
