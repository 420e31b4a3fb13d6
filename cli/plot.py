"""The picture of a run: reward and held-out success over time, and the loss of each channel."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from hintloop.cli.display import CHANNELS, sampling_name
from hintloop.cli.tally import GroupPoint

WINDOW = 32
"""Groups in one point of the smoothed reward curve."""


def draw(
    path: Path,
    groups: Sequence[GroupPoint],
    evaluations: Sequence[dict[str, Any]],
    steps: Sequence[dict[str, Any]],
) -> None:
    """Write the picture as PNG."""
    figure = Figure(figsize=(10, 7), layout="constrained")
    grid = figure.add_gridspec(2, len(CHANNELS), height_ratios=(3, 2))
    times = [point.time for point in groups] + [row["time"] for row in evaluations]
    _reward(figure.add_subplot(grid[0, :]), groups, evaluations, min(times, default=0.0))
    for column, (name, title) in enumerate(CHANNELS.items()):
        _loss(figure.add_subplot(grid[1, column]), name, title, steps)
    figure.savefig(path, dpi=110)


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Trailing mean over at most ``window`` values."""
    made = []
    total = 0.0
    for index, value in enumerate(values):
        total += value - (values[index - window] if index >= window else 0.0)
        made.append(total / min(index + 1, window))
    return made


def _reward(
    axes: Any, groups: Sequence[GroupPoint], evaluations: Sequence[dict[str, Any]], start: float
) -> None:
    minutes = [(point.time - start) / 60 for point in groups]
    axes.plot(
        minutes,
        smoothed([point.reward for point in groups], WINDOW),
        color="tab:blue",
        label=f"training reward (mean of {WINDOW} groups)",
    )
    keys = sorted({(row["split"], row["temperature"]) for row in evaluations})
    for color, (split, temperature) in enumerate(keys, 1):
        rows = [row for row in evaluations if (row["split"], row["temperature"]) == (split, temperature)]
        rates = [row["rate"] for row in rows]
        errors = [
            [row["rate"] - row["low"] for row in rows],
            [row["high"] - row["rate"] for row in rows],
        ]
        axes.errorbar(
            [(row["time"] - start) / 60 for row in rows],
            rates,
            yerr=errors,
            marker="o",
            capsize=3,
            linestyle="--" if temperature == 0 else ":",
            color=f"C{color}",
            label=f"held-out {split}, {sampling_name(temperature)}",
        )
    axes.set(xlabel="minutes", ylabel="reward, share solved", ylim=(0, 1), title="Reward over time")
    axes.legend(loc="upper left", fontsize="small")
    axes.grid(alpha=0.3)


def _loss(axes: Any, name: str, title: str, steps: Sequence[dict[str, Any]]) -> None:
    points = [(row["step"], row[f"loss_{name}"]) for row in steps if f"loss_{name}" in row]
    if points:
        numbers, values = zip(*points, strict=True)
        axes.plot(numbers, values, alpha=0.3, color="tab:gray")
        axes.plot(numbers, smoothed(values, 10), color="tab:red")
    else:
        axes.text(0.5, 0.5, "absent", ha="center", va="center", transform=axes.transAxes)
    axes.set(xlabel="step", title=f"loss: {title} ({name})")
    axes.grid(alpha=0.3)
