"""Which task a group plays: drawn alike, by weights, or where the agent is neither sure to fail nor sure to solve.

A draw follows from the seed, the group's number and attempt, and (curriculum) what the groups before it brought;
that is read back from the run's own files after a restart.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, Protocol

from hintloop.replay.episode import Episode, Outcome
from hintloop.replay.journal import Journal

MEMORY = 0.8
"""What a further group of a task leaves of the weight of those before it: the agent changes."""
PRIOR = 0.5
"""Solved and unsolved episodes that a task is thought to have had before its first."""
_LINE = {"task": str, "group": str, "time": float, "solved": int, "episodes": int}
"""What is read of a line about a group."""


@dataclass(frozen=True, slots=True)
class Result:
    """What one group of a task brought."""

    task_id: str
    solved: int
    episodes: int


class TaskSampler(Protocol):
    """Chooses tasks, and learns from what came of them."""

    def choose(self, index: int, attempt: int = 0) -> str:
        """The task of group number ``index``, at its ``attempt`` (from 0)."""
        ...

    def observe(self, result: Result) -> None:
        """A group of a task has been played."""
        ...


def choose_task(task_ids: Sequence[str], seed: int, index: int, attempt: int = 0) -> str:
    """The task of a group when all are alike: a function of the seed alone."""
    return _draw(seed, index, attempt).choice(task_ids)


class UniformSampler:
    """All tasks alike."""

    def __init__(self, task_ids: Sequence[str], seed: int) -> None:
        self._task_ids = task_ids
        self._seed = seed

    def choose(self, index: int, attempt: int = 0) -> str:
        return choose_task(self._task_ids, self._seed, index, attempt)

    def observe(self, result: Result) -> None:
        """Nothing follows from it."""


class WeightedSampler:
    """Each task by its weight. ``ValueError`` when no task has any."""

    def __init__(self, task_ids: Sequence[str], seed: int, weights: Mapping[str, float]) -> None:
        """``weights``: by pattern of the task id, as ``fnmatch`` has them; see ``weight_of``."""
        base = {task: weight_of(task, weights) for task in task_ids}
        self._base = {task: weight for task, weight in base.items() if weight > 0}
        if not self._base:
            raise ValueError("rollout.task_weights leaves no task: every task has the weight 0")
        self._seed = seed
        self._weights = dict(self._base)

    def choose(self, index: int, attempt: int = 0) -> str:
        draw = _draw(self._seed, index, attempt)
        return draw.choices(list(self._weights), list(self._weights.values()))[0]

    def observe(self, result: Result) -> None:
        """Nothing follows from it."""


class CurriculumSampler(WeightedSampler):
    """Each task by its weight times the chance that a group of it is solved by some and not by all.

    The chance is that of a group drawn from what is known of the task's success rate (a beta distribution), so a
    task that was never played is likely to be tried, and one that always fails is tried again now and then.
    """

    def __init__(
        self, task_ids: Sequence[str], seed: int, weights: Mapping[str, float], *, group_size: int
    ) -> None:
        super().__init__(task_ids, seed, weights)
        self._group_size = group_size
        self._known: dict[str, tuple[float, float]] = {}
        for task, weight in self._base.items():
            self._weights[task] = weight * chance_of_both(PRIOR, PRIOR, group_size)

    def observe(self, result: Result) -> None:
        """The task's success rate is known a little better."""
        if result.task_id not in self._base:
            return
        solved, failed = self._known.get(result.task_id, (0.0, 0.0))
        solved = MEMORY * solved + result.solved
        failed = MEMORY * failed + result.episodes - result.solved
        self._known[result.task_id] = solved, failed
        chance = chance_of_both(PRIOR + solved, PRIOR + failed, self._group_size)
        self._weights[result.task_id] = self._base[result.task_id] * chance


def make_sampler(
    task_ids: Sequence[str],
    seed: int,
    *,
    kind: Literal["uniform", "weighted", "curriculum"],
    weights: Mapping[str, float],
    group_size: int,
) -> TaskSampler:
    """The sampler of that kind, which has seen nothing yet. Raises ``ValueError``."""
    if kind == "uniform":
        return UniformSampler(task_ids, seed)
    if kind == "weighted":
        return WeightedSampler(task_ids, seed, weights)
    return CurriculumSampler(task_ids, seed, weights, group_size=group_size)


def weight_of(task_id: str, weights: Mapping[str, float]) -> float:
    """The weight of the first pattern that a task id matches; 1 when it matches none."""
    return next((weight for pattern, weight in weights.items() if fnmatchcase(task_id, pattern)), 1.0)


def chance_of_both(solved: float, failed: float, n: int) -> float:
    """The chance that of ``n`` episodes some are solved and some not, the rate being beta(``solved``, ``failed``).

    A group of one can have no two outcomes; it is counted as two.
    """
    all_solved = none_solved = 1.0
    for number in range(max(n, 2)):
        all_solved *= (solved + number) / (solved + failed + number)
        none_solved *= (failed + number) / (solved + failed + number)
    return 1.0 - all_solved - none_solved


def result_of(episodes: Sequence[Episode]) -> Result:
    """What a group of one task brought."""
    solved = sum(episode.outcome is Outcome.SOLVED for episode in episodes)
    return Result(episodes[0].task_id, solved, len(episodes))


def all_equal(episodes: Sequence[Episode]) -> bool:
    """Whether the rewards of a group say nothing: there are several, and no two differ."""
    return len(episodes) > 1 and len({episode.reward for episode in episodes}) == 1


def past_results(kept: Path, resampled: Path, journal: Journal, done: Iterable[str]) -> list[Result]:
    """What the groups of a run brought so far, in their order.

    The files have a line for each group that was ``kept`` or ``resampled``. A group in ``done`` (ids in the journal)
    that lacks its line, as after a crash, is read from the journal.
    """
    journalled = _lines(kept)
    lines = sorted(journalled + _lines(resampled), key=lambda line: float(line["time"]))
    found = [Result(line["task"], line["solved"], line["episodes"]) for line in lines]
    missing = set(done) - {line["group"] for line in journalled}
    return found + (_from_journal(journal, missing) if missing else [])


def _from_journal(journal: Journal, groups: set[str]) -> list[Result]:
    found: list[Result] = []
    reader = journal.reader()
    while segment := reader.poll_segment():
        by_group: dict[str, list[Episode]] = {}
        for episode in segment.episodes:
            if episode.group_id in groups:
                by_group.setdefault(episode.group_id, []).append(episode)
        found += [result_of(episodes) for episodes in by_group.values()]
    return found


def _lines(path: Path) -> list[dict[str, Any]]:
    """The lines about groups in a file; what a crash cut off is left out."""
    if not path.is_file():
        return []
    found = [_parse(text) for text in path.read_text(errors="replace").splitlines()]
    return [line for line in found if line is not None]


def _parse(text: str) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except ValueError:
        return None
    fits = isinstance(line, dict) and all(isinstance(line.get(name), kind) for name, kind in _LINE.items())
    return line if fits else None


def _draw(seed: int, index: int, attempt: int) -> random.Random:
    return random.Random(f"task:{seed}:{index}" + (f":{attempt}" if attempt else ""))
