"""The bugfix task set: small functions with one wrong token, and the splits that keep training and test apart.

Task id: ``bugfix/<function key>.<mutation>.<variant>``; the variant chooses the spelling of the variables.
Everything follows from the id, so the same id is the same task everywhere.

Splits: ``train``; ``heldmut`` (other bugs of functions that training sees); ``heldfn`` (functions that
training never sees; most are compositions whose parts occur in training, so they test recombination).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from threading import Lock

from hintloop.envs.task import Case, FunctionTests, Task
from hintloop.envs.tasksets.bugfix.functions import Function, all_functions, run
from hintloop.envs.tasksets.bugfix.mutations import Mutation, mutations, random_spelling, rename

PATH = "solution.py"
NUM_VARIANTS = 4
"""Spellings of each training bug; held-out bugs have one."""
NUM_VISIBLE = 4
_HELD_OUT_BUGS = 6
"""One bug of so many is held out."""
_SPLIT_SEED = 0
_LOADING = Lock()


class Bugfix:
    """See the module docstring. Loading runs every mutant once to keep those that a test can tell (about 1 s)."""

    name = "bugfix"
    description = "small Python functions with one wrong token: find it, mend it, submit"

    def __init__(self) -> None:
        self.functions = {function.key: function for function in all_functions()}
        self.bugs: dict[str, list[Mutation]] = {}
        self._expected: dict[str, list[object]] = {}
        self._splits: dict[str, list[str]] = {"train": [], "heldmut": [], "heldfn": []}
        rng = random.Random(_SPLIT_SEED)
        for function in self.functions.values():
            self._add(function, rng)

    def splits(self) -> dict[str, Sequence[str]]:
        """Split name -> task ids."""
        return {name: tuple(ids) for name, ids in self._splits.items()}

    def get(self, task_id: str) -> Task:
        """The task of an id. ``KeyError`` when there is no such task."""
        try:
            key, number, variant = task_id.removeprefix("bugfix/").split(".")
            bug = self.bugs[key][int(number)]
            if not (0 <= int(variant) < NUM_VARIANTS and str(int(number)) == number):
                raise ValueError(task_id)
        except (KeyError, ValueError, IndexError):
            raise KeyError(f"the bugfix set has no task {task_id!r}") from None
        return self.make(key, [bug], random_spelling(random.Random(task_id)), task_id)

    def make(self, key: str, bugs: Sequence[Mutation], spelling: dict[str, str], task_id: str) -> Task:
        """A task from a function, the bugs in it and the spelling of its variables."""
        function = self.functions[key]
        lines: list[str] = list(function.lines)
        for bug in sorted(bugs, key=lambda b: (b.line, -b.start)):
            lines = bug.apply(lines)
        hidden = tuple(
            Case(arguments, expected)
            for arguments, expected in zip(function.inputs, self._expected[key], strict=True)
        )
        return Task(
            task_id=task_id,
            instruction=f"Fix {PATH}: {function.name} should give: {function.intent}",
            files={PATH: "\n".join(rename(lines, spelling))},
            tests=FunctionTests(PATH, function.name, _visible(function, lines, hidden), hidden),
            solution={PATH: "\n".join(rename(function.lines, spelling))},
            metadata={"function": key},
        )

    def _add(self, function: Function, rng: random.Random) -> None:
        reference = run("\n".join(function.lines), function.name, function.inputs)
        if any(status != "ok" for status, _ in reference):
            raise ValueError(f"the reference of {function.key} fails on its own inputs")
        self._expected[function.key] = [value for _, value in reference]
        bugs = [
            bug
            for bug in mutations(function.lines)
            if not _same(run("\n".join(bug.apply(function.lines)), function.name, function.inputs), reference)
        ]
        self.bugs[function.key] = bugs
        order = list(range(len(bugs)))
        rng.shuffle(order)
        held = (
            len(order) if function.held_out else max(1, len(order) // _HELD_OUT_BUGS) if len(order) > 2 else 0
        )
        split = "heldfn" if function.held_out else "heldmut"
        self._splits[split] += [f"bugfix/{function.key}.{number}.0" for number in order[:held]]
        self._splits["train"] += [
            f"bugfix/{function.key}.{number}.{variant}"
            for number in order[held:]
            for variant in range(NUM_VARIANTS)
        ]


def _same(left: object, right: object) -> bool:
    """Equal value and equal type all the way down, as the grader compares."""
    return repr(left) == repr(right)


def _visible(function: Function, lines: Sequence[str], hidden: tuple[Case, ...]) -> tuple[Case, ...]:
    """The first few cases, with one among them that the given file fails."""
    results = run("\n".join(lines), function.name, function.inputs)
    failing = [
        index
        for index, (result, case) in enumerate(zip(results, hidden, strict=True))
        if not _same(result, ("ok", case.expected))
    ]
    shown = list(range(min(NUM_VISIBLE, len(hidden))))
    if failing and not set(failing) & set(shown):
        shown[-1] = failing[0]
    return tuple(hidden[index] for index in shown)


def reference(task: Task) -> str:
    """The right text of a task's file."""
    assert isinstance(task.solution, dict), "a task of this set"
    return task.solution[PATH]


def load() -> Bugfix:
    """The task set; made once per process, also when many threads ask at once."""
    with _LOADING:
        return _load()


@cache
def _load() -> Bugfix:
    return Bugfix()
