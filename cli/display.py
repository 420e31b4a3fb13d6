"""What a run is doing, while it runs: a live view on a terminal, a line now and then elsewhere.

Everything shown is read from the files of the run; no process is asked.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from hintloop.cli.config import Config
from hintloop.cli.runfolder import LineTail, RunFolder

LIVE_S = 0.5
PLAIN_S = 10.0
_STEPS_OF_RATE = 20
CHANNELS = {"grpo": "reward", "sdpo": "hints", "dpo": "preferences"}


@dataclass(frozen=True, slots=True)
class View:
    """One look at a run. None where nothing is known yet."""

    name: str
    elapsed_s: float
    training_left_s: float | None
    episodes: int
    """Finished and in the journal, over all restarts."""
    episodes_per_s: float
    success: float | None
    """Share of solved episodes in the last groups."""
    rollout_version: int | None
    learner_version: int | None
    step: int
    steps: int
    states: dict[str, str]
    """Part -> what it does, and for how long."""
    losses: dict[str, float]
    """Of the last step, by channel."""
    hint_sites: int
    pairs: int
    errors: dict[str, int]
    """Tool errors by kind, most frequent first."""
    lost: dict[str, int]
    """Episodes lost to the infrastructure, by reason."""
    evaluations: list[dict[str, Any]] = field(default_factory=list)


class Display:
    """Shows a run until closed. ``refresh`` may be called as often as one likes."""

    def __init__(self, folder: RunFolder, config: Config, console: Console | None = None) -> None:
        self._reader = Reader(folder, config)
        self._console = console or Console()
        self._live = Live(console=self._console, auto_refresh=False) if self._console.is_terminal else None
        self._due = 0.0
        self._evaluations = 0

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Show the last state and stop. Can be called again."""
        if self._live:
            self._live.stop()

    def refresh(self) -> None:
        """Show what is new, if it is time to."""
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + (LIVE_S if self._live else PLAIN_S)
        view = self._reader.look()
        if self._live:
            self._live.update(panel(view), refresh=True)
            return
        for row in view.evaluations[self._evaluations :]:
            self._print(evaluation_line(row))
        self._evaluations = len(view.evaluations)
        self._print(plain_line(view))

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class Reader:
    """Makes views of one run; remembers how far its files were read."""

    def __init__(self, folder: RunFolder, config: Config) -> None:
        self._folder = folder
        self._config = config
        self._steps = LineTail(folder.metrics("learner"), keep=_STEPS_OF_RATE)
        self._evaluations = LineTail(folder.evaluation)
        self._started = time.time()

    def look(self) -> View:
        """The state right now."""
        for tail in (self._steps, self._evaluations):
            tail.read()
        rollout, learner = self._fresh("rollout"), self._fresh("learner")
        last = self._steps.lines[-1] if self._steps.lines else {}
        return View(
            name=self._folder.path.name,
            elapsed_s=time.time() - self._started,
            training_left_s=self._training_left(int(last.get("step", 0))),
            episodes=rollout.get("groups_journalled", 0) * self._config.rollout.group_size,
            episodes_per_s=rollout.get("episodes_per_s", 0.0),
            success=rollout.get("success_rate"),
            rollout_version=rollout.get("version"),
            learner_version=learner.get("version"),
            step=int(last.get("step", 0)),
            steps=self._config.learner.steps,
            states={"rollout": state_text(rollout), "learner": state_text(learner)},
            losses={name: last[f"loss_{name}"] for name in CHANNELS if f"loss_{name}" in last},
            hint_sites=rollout.get("hint_sites", 0),
            pairs=rollout.get("teachers", {}).get("pairs", 0),
            errors=_most_frequent(rollout.get("tool_errors", {})),
            lost=_most_frequent(rollout.get("lost", {})),
            evaluations=list(self._evaluations.lines),
        )

    def _fresh(self, part: str) -> dict[str, Any]:
        """What the part said since this play began; an earlier process says nothing of this one."""
        status = self._folder.status(part) or {}
        return status if last_word(status) >= self._started else {}

    def _training_left(self, step: int) -> float | None:
        lines, learner = self._steps.lines, self._config.learner
        if len(lines) < 2:
            return None
        per_step = (lines[-1]["time"] - lines[0]["time"]) / (len(lines) - 1)
        left = float(per_step * (learner.steps - step))
        if learner.max_minutes is not None:
            left = min(left, 60.0 * learner.max_minutes - (time.time() - self._started))
        return max(left, 0.0)


def last_word(status: Mapping[str, Any]) -> float:
    """When a status was written, Unix time; 0 for none."""
    return float(status.get("updated", status.get("time", 0.0)))


def state_text(status: Mapping[str, Any]) -> str:
    """A part's state and for how long it has been in it."""
    if not status:
        return "starting"
    does = status["state"].rpartition("; ")[2]  # an evaluation goes on top of what it interrupts
    return f"{does} ({duration(max(time.time() - status['since'], 0.0))})"


def duration(seconds: float) -> str:
    """``1:02:03``, ``2:03`` or ``3 s``."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def percent(rate: float | None) -> str:
    """``41 %``, or a dash for None."""
    return "-" if rate is None else f"{100 * rate:.0f} %"


def plain_line(view: View) -> str:
    """The view in one line."""
    parts = [
        duration(view.elapsed_s),
        f"{view.episodes} episodes ({view.episodes_per_s:.0f}/s)",
        f"solved {percent(view.success)}",
        f"step {view.step}/{view.steps}",
        _versions(view),
        *(f"{part}: {state}" for part, state in view.states.items()),
    ]
    if view.losses:
        parts.append("loss " + _losses(view))
    if view.lost:
        parts.append("lost " + _counts(view.lost))
    return " | ".join(parts)


def evaluation_line(row: Mapping[str, Any]) -> str:
    """One evaluation in one line."""
    where = f"version {row['version']}, {row['split']}, {sampling_name(row['temperature'])}"
    interval = f"95 % interval {percent(row['low'])} to {percent(row['high'])}, n = {row['n']}"
    return f"held-out {row['label']} ({where}): {percent(row['rate'])} solved, {interval}"


def sampling_name(temperature: float) -> str:
    """How a temperature is called in tables."""
    return "greedy" if temperature == 0 else f"T={temperature:g}"


def panel(view: View) -> RenderableType:
    """The view as a live panel."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", justify="right")
    facts.add_column()
    left = (
        "" if view.training_left_s is None else f", about {duration(view.training_left_s)} of training left"
    )
    entries = {
        "time": duration(view.elapsed_s) + left,
        "episodes": f"{view.episodes} ({view.episodes_per_s:.0f}/s)",
        "solved": f"{percent(view.success)} of the last episodes",
        "step": f"{view.step} of {view.steps}; {_versions(view)}",
        **view.states,
        "losses": _losses(view) or "-",
        "hints, pairs": f"{view.hint_sites} hint sites, {view.pairs} preference pairs",
        "tool errors": _counts(view.errors) or "-",
    }
    if view.lost:
        entries["lost episodes"] = _counts(view.lost)
    for name, value in entries.items():
        facts.add_row(name, Text(value))
    held_out = [Text(evaluation_line(row), style="dim") for row in view.evaluations[-4:]]
    return Panel(Group(facts, *held_out), title=f"hintloop play: {view.name}", title_align="left")


def _versions(view: View) -> str:
    if view.rollout_version is None or view.learner_version is None:
        return "no weights yet"
    lag = max(view.learner_version - view.rollout_version, 0)
    return f"plays version {view.rollout_version}, {lag} behind the learner"


def _losses(view: View) -> str:
    return ", ".join(f"{CHANNELS[name]} {value:.3g}" for name, value in view.losses.items())


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in list(counts.items())[:6])


def _most_frequent(counts: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda item: -item[1]))
