"""The fixed evaluation: the same held-out tasks before, during and after, with its uncertainty.

One row per (label, version, split, temperature) goes to ``evaluation.jsonl``; a row that is there already is
not measured again. An episode that the infrastructure loses is played again and otherwise reported as lost;
it is no failure of the agent.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hintloop.agent.engine import Sampling
from hintloop.agent.episode import EpisodeSpec, Played, Player
from hintloop.replay.episode import Episode, Outcome
from hintloop.rollout.episodes import OnLost, OpenEnvironment, opened, play_in, play_until_kept
from hintloop.rollout.failures import Part
from hintloop.rollout.manager import TooManyLost
from hintloop.rollout.offload import persist
from hintloop.rollout.status import append_line, write_json
from hintloop.rollout.watchdog import Pulse, Watchdog

TRIES = 3
STORAGE_S = 300.0
"""How long the run's folder may fail before the evaluation does."""
Z95 = 1.959964


def _ignore(part: Part, reason: str) -> None:
    """Nobody counts it."""


@dataclass(frozen=True, slots=True)
class EvalResult:
    """What an evaluation found; ``low``..``high`` is the 95 % Wilson interval of ``rate``."""

    n: int
    """Episodes that were graded."""
    solved: int
    rate: float
    low: float
    high: float
    lost: int
    """Tasks for which no episode could be finished."""
    truncated: int
    errors_per_episode: float
    errors_by_kind: dict[str, float]
    """Tool errors per episode, whatever their cause."""
    turns_per_episode: float
    tokens_per_episode: float
    """Sampled tokens."""
    seconds: float


def wilson(solved: int, n: int) -> tuple[float, float]:
    """The 95 % Wilson score interval of a proportion; (0, 1) when nothing was measured."""
    if n == 0:
        return 0.0, 1.0
    rate, z2 = solved / n, Z95 * Z95
    centre = (rate + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 * math.sqrt(rate * (1 - rate) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return max(0.0, min(centre - half, rate)), min(1.0, max(centre + half, rate))


def draw_tasks(task_ids: Sequence[str], n: int, seed: int) -> list[str]:
    """``n`` different tasks, or all when there are fewer; a smaller ``n`` gives the first of them."""
    order = list(task_ids)
    random.Random(f"evaluation:{seed}").shuffle(order)
    return order[:n]


def held_out(
    splits: Mapping[str, Sequence[str]], chosen: Sequence[str], trained: str
) -> dict[str, Sequence[str]]:
    """The splits to evaluate on, with their tasks: the ``chosen`` ones, or all but the one that is ``trained`` on.

    A set that holds nothing out is evaluated on what it trains on. ``ValueError`` for a split without tasks.
    """
    others = [name for name, tasks in splits.items() if tasks and name != trained]
    names = list(chosen) or others or [trained]
    for name in (trained, *names):
        if not splits.get(name):
            known = ", ".join(sorted(split for split, tasks in splits.items() if tasks))
            raise ValueError(f"the task set has no split {name!r}; it has {known}")
    return {name: splits[name] for name in names}


async def evaluate(
    player: Player,
    open_environment: OpenEnvironment,
    task_ids: Sequence[str],
    sampling: Sampling,
    in_flight: int,
    *,
    name: str = "evaluation",
    progress: Callable[[int], None] = lambda done: None,
    watchdog: Watchdog | None = None,
    turn_s: float | None = None,
    on_lost: OnLost = _ignore,
) -> tuple[EvalResult, list[Episode]]:
    """Play each task once, ``in_flight`` at a time; the result, and the episodes in the order of the tasks.

    ``turn_s`` is the engine's time for one turn; ``on_lost`` hears of each lost try.
    Raises ``TooManyLost`` when no episode at all could be finished.
    """
    started = time.monotonic()
    waiting = list(enumerate(task_ids))[::-1]
    played: dict[int, Played] = {}

    watching = watchdog or Watchdog()

    async def play(spec: EpisodeSpec, pulse: Pulse) -> Played:
        environment = partial(opened, open_environment, pulse)
        return await play_in(environment, player, spec, sampling, pulse=pulse, turn_s=turn_s)

    async def work() -> None:
        while waiting:
            number, task_id = waiting.pop()
            spec = EpisodeSpec(f"{name}-{number:04d}", name, task_id, source="evaluation")
            with watching.task("evaluation episode", spec.episode_id) as pulse:
                kept = await play_until_kept(partial(play, pulse=pulse), spec, tries=TRIES, on_lost=on_lost)
            if kept is not None:
                played[number] = kept
            progress(len(task_ids) - len(waiting))

    async with asyncio.TaskGroup() as tasks:
        for _ in range(min(in_flight, len(task_ids))):
            tasks.create_task(work())
    kept = [played[number] for number in sorted(played)]
    if not kept:
        raise TooManyLost(
            f"{name}: all {len(task_ids)} episodes were lost; is the environment server running?"
        )
    result = summarise(kept, lost=len(task_ids) - len(kept), seconds=time.monotonic() - started)
    return result, [each.episode for each in kept]


def summarise(played: Sequence[Played], *, lost: int, seconds: float) -> EvalResult:
    """The result of finished episodes."""
    n = len(played)
    solved = sum(each.episode.outcome is Outcome.SOLVED for each in played)
    kinds: Counter[str] = sum((each.notes.errors for each in played), Counter())
    turns = sum(turn.role == "assistant" for each in played for turn in each.episode.turns)
    low, high = wilson(solved, n)
    return EvalResult(
        n=n,
        solved=solved,
        rate=solved / max(n, 1),
        low=low,
        high=high,
        lost=lost,
        truncated=sum(each.episode.outcome is Outcome.TRUNCATED for each in played),
        errors_per_episode=kinds.total() / max(n, 1),
        errors_by_kind={kind: times / max(n, 1) for kind, times in kinds.most_common()},
        turns_per_episode=turns / max(n, 1),
        tokens_per_episode=sum(sum(each.episode.loss_mask) for each in played) / max(n, 1),
        seconds=round(seconds, 3),
    )


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A fixed set of tasks by split, and how to play and record them."""

    run_dir: Path
    tasks: dict[str, list[str]]
    """Split -> task ids; an evaluation of n takes the first n."""
    temperatures: Sequence[float]
    max_new_tokens: int
    in_flight: int
    examples: int
    """Whole episodes kept per row."""
    watchdog: Watchdog = field(default_factory=Watchdog)
    turn_s: float | None = None
    on_lost: OnLost = _ignore

    @property
    def rows_file(self) -> Path:
        """Where the rows go."""
        return self.run_dir / "evaluation.jsonl"

    def rows(self) -> list[dict[str, Any]]:
        """All rows so far; a last line that a crash cut off is left out."""
        if not self.rows_file.is_file():
            return []
        lines = self.rows_file.read_text().splitlines()
        return [row for line in lines if (row := _parse(line)) is not None]

    def missing(self, label: str, version: int) -> list[tuple[str, float]]:
        """The (split, temperature) that still lack a row."""
        have = {_key(row) for row in self.rows()}
        wanted = [(split, temperature) for split in self.tasks for temperature in self.temperatures]
        return [(s, t) for s, t in wanted if (label, version, s, float(t)) not in have]

    async def run(
        self,
        label: str,
        version: int,
        n: int,
        player: Player,
        open_environment: OpenEnvironment,
        say: Callable[[str | None], None],
    ) -> list[dict[str, Any]]:
        """Measure and append every missing row of ``label``; the rows that were made.

        ``say`` gets the progress in words, and None at the end. Raises ``TooManyLost``.
        """
        made = []
        try:
            for split, temperature in self.missing(label, version):
                tasks = self.tasks[split][:n]
                name = f"{label}-v{version}-{split}-t{temperature:g}"

                def progress(done: int, name: str = name, total: int = len(tasks)) -> None:
                    say(f"evaluating {name}: {done} of {total}")

                progress(0)
                sampling = Sampling(temperature, self.max_new_tokens)
                result, episodes = await evaluate(
                    player,
                    open_environment,
                    tasks,
                    sampling,
                    self.in_flight,
                    name=name,
                    progress=progress,
                    watchdog=self.watchdog,
                    turn_s=self.turn_s,
                    on_lost=self.on_lost,
                )
                row = {"label": label, "version": version, "split": split, "temperature": float(temperature)}
                row |= {"time": time.time(), **dataclasses.asdict(result)}
                await persist(
                    partial(self._write, name, episodes, row),
                    what=f"writing {self.rows_file.name}",
                    patience_s=STORAGE_S,
                    on_failure=lambda error: self.on_lost(Part.STORAGE, str(error)),
                )
                made.append(row)
        finally:
            say(None)
        return made

    def _write(self, name: str, episodes: Sequence[Episode], row: dict[str, Any]) -> None:
        self._keep(name, episodes)
        append_line(self.rows_file, row)

    def _keep(self, name: str, episodes: Sequence[Episode]) -> None:
        folder = self.run_dir / "examples"
        folder.mkdir(parents=True, exist_ok=True)
        for number, episode in enumerate(episodes[: self.examples]):
            write_json(folder / f"{name}-{number}.json", episode.plain())


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["label"], row["version"], row["split"], float(row["temperature"])


def _parse(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
