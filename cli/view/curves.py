"""The charts of a run: which numbers, over what, and how they are called."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from hintloop.cli.display import CHANNELS, duration, sampling_name
from hintloop.cli.view.charts import SHAPES, Point, Series, chart, smoothed, swatch
from hintloop.cli.view.data import ERROR, RunData, Sums, Track, as_number
from hintloop.cli.view.text import name, number, percent

SMOOTH_GROUPS = 32
SMOOTH_STEPS = 10
RATE_BINS = 60
TREND_BINS = 12
_COLOURS = {"grpo": 1, "sdpo": 3, "dpo": 5}


@dataclass(frozen=True, slots=True)
class Figure:
    """A chart with what belongs around it."""

    title: str
    pictures: tuple[Markup, ...]
    """One, or a wide and a narrow one."""
    legend: tuple[tuple[Markup, str], ...]


def success(data: RunData) -> Figure:
    """Training reward and success over time, and held-out success with its 95 % intervals."""
    start = data.started
    scale, unit = _time_unit(data)
    series = [*_training(data, start, scale), *_held_out(data, start, scale)]
    tips = (
        [(x, f"{duration(x * scale)}: {percent(y, 0)} solved") for x, y in series[0].points] if series else []
    )
    most = max((y for each in series for _, y in each.points), default=0.0)
    pictures = [
        chart(
            series,
            about="share of solved episodes and mean reward over time, with held-out success",
            x_label=unit,
            y_range=(0.0, 1.0 if most <= 1 else None),
            percent=True,
            width=width,
            height=height,
            tips=tips,
        )
        for width, height in ((820, 300), (420, 270))
    ]
    return Figure("Success and reward over time", tuple(pictures), _legend(series))


def loss(data: RunData, channel: str) -> Figure:
    """The loss of one channel over the steps."""
    raw = _over_steps(data, f"loss_{channel}")
    smooth = smoothed(raw, _window(data.steps, SMOOTH_STEPS))
    colour = _COLOURS[channel]
    series = [Series("smoothed", smooth, colour), Series("each step", raw, colour, "faint")]
    return _step_figure(f"Loss: {CHANNELS[channel]} ({channel})", series)


def lag(data: RunData) -> Figure:
    """How many versions behind the tokens of each step were sampled."""
    series = [
        Series("mean", _over_steps(data, "staleness_mean"), 1),
        Series("maximum", _over_steps(data, "staleness_max", most=True), 2, "dashed"),
    ]
    return _step_figure("Lag of what is trained on, in versions", series, "versions", y_range=(0.0, None))


def step_time(data: RunData) -> Figure:
    """Where the learner's time went, per step; a wait for an evaluation is cut off, or nothing else would show."""
    series = [
        Series("training", _over_steps(data, "seconds_training"), 1),
        Series("waiting", _over_steps(data, "seconds_waiting"), 2, "dashed"),
        Series("publishing", _over_steps(data, "seconds_publishing"), 3),
    ]
    values = sorted(y for each in series for _, y in each.points)
    usual = values[int(0.98 * len(values))] if values else 0.0
    cut = values and values[-1] > 3 * usual > 0
    title = f"Seconds of a step{f', up to {number(values[-1])}' if cut else ''}"
    return _step_figure(title, series, "s", y_range=(0.0, 1.5 * usual if cut else None))


def episode_rate(data: RunData) -> Figure:
    """Finished episodes per second over time."""
    return _rate_figure(data, "Episodes per second", [("finished", data.groups, "episodes", 1)])


def token_rate(data: RunData) -> Figure:
    """Tokens per second that are sampled, and that are trained on."""
    lines = [("sampled", data.groups, "sampled_tokens", 1), ("trained on", data.steps, "tokens", 5)]
    return _rate_figure(data, "Tokens per second", lines)


def errors_per_episode(data: RunData, kind: str) -> list[float]:
    """How often an episode had this error, from the beginning of the run to its end in a few parts."""
    buckets = data.groups.buckets
    size = math.ceil(len(buckets) / TREND_BINS) or 1
    made = []
    for at in range(0, len(buckets), size):
        part = buckets[at : at + size]
        episodes = _total(part, "episodes")
        made.append(_total(part, f"{ERROR}{kind}") / episodes if episodes else 0.0)
    return made


def rates(buckets: Sequence[Sums], value: str, bins: int = RATE_BINS) -> list[Point]:
    """``value`` per second in equal parts of the time: Unix time in the middle of each part, and the rate."""
    events = [(b["time"].mean, b[value].total) for b in buckets if "time" in b and value in b]
    if len(events) < 2:
        return []
    start, end = min(events)[0], max(events)[0]
    if end <= start:
        return []
    bins = min(bins, len(events))
    width, sums = (end - start) / bins, [0.0] * bins
    for when, amount in events:
        sums[min(int((when - start) / width), bins - 1)] += amount
    return [(start + (at + 0.5) * width, total / width) for at, total in enumerate(sums)]


def _training(data: RunData, start: float, scale: float) -> list[Series]:
    """Of the groups that were played; without such, of those that were trained on. One curve if both agree."""
    track, count = (data.groups, "episodes") if data.groups.buckets else (data.steps, None)
    solved, reward = [], []
    for bucket in track.buckets:
        if {"time", "solved", "reward_mean", count or "time"} <= bucket.keys():
            x, episodes = (bucket["time"].mean - start) / scale, bucket[count or "solved"]
            share = bucket["solved"].total / (episodes.total or 1.0 if count else episodes.count)
            solved.append((x, share))
            reward.append((x, bucket["reward_mean"].mean))
    window = _window(track, SMOOTH_GROUPS)
    if not solved:
        return []
    if all(abs(a - b) < 1e-6 for (_, a), (_, b) in zip(solved, reward, strict=True)):
        return [Series("training: share solved, which is the mean reward", smoothed(solved, window), 1)]
    return [
        Series("training: share solved", smoothed(solved, window), 1),
        Series("training: mean reward", smoothed(reward, window), 6, "dashed"),
    ]


def _held_out(data: RunData, start: float, scale: float) -> list[Series]:
    keys = sorted({(row["split"], row["temperature"]) for row in data.evaluations})
    made = []
    for at, (split, temperature) in enumerate(keys):
        rows = [row for row in data.evaluations if (row["split"], row["temperature"]) == (split, temperature)]
        made.append(
            Series(
                f"held-out {name(split)}, {sampling_name(temperature)}",
                [((row["time"] - start) / scale, row["rate"]) for row in rows],
                2 + at % 4,
                SHAPES[at % len(SHAPES)],
                [(row["low"], row["high"]) for row in rows],
            )
        )
    return made


def _step_figure(
    title: str,
    series: list[Series],
    unit: str = "",
    *,
    y_range: tuple[float | None, float | None] = (None, None),
) -> Figure:
    tips = [(x, f"step {number(x)}: {number(y)} {unit}") for x, y in series[0].points]
    picture = chart(
        [each for each in series if each.points],
        about=f"{title} over the steps",
        x_label="optimizer step",
        y_range=y_range,
        tips=tips,
    )
    return Figure(title, (picture,), _legend(series))


def _rate_figure(data: RunData, title: str, lines: list[tuple[str, Track, str, int]]) -> Figure:
    start = data.started
    scale, unit = _time_unit(data)
    series = [
        Series(label, [((x - start) / scale, y) for x, y in rates(track.buckets, value)], colour)
        for label, track, value, colour in lines
    ]
    picture = chart(
        [each for each in series if each.points],
        about=f"{title} over time",
        x_label=unit,
        y_range=(0.0, None),
        tips=[(x, f"{duration(x * scale)}: {number(y)}/s {lines[0][0]}") for x, y in series[0].points],
    )
    return Figure(title, (picture,), _legend(series) if len(series) > 1 else ())


def _legend(series: Sequence[Series]) -> tuple[tuple[Markup, str], ...]:
    return tuple((swatch(each), each.label) for each in series if each.points)


def _over_steps(data: RunData, value: str, *, most: bool = False) -> list[Point]:
    found = [bucket for bucket in data.steps.buckets if "step" in bucket and value in bucket]
    return [(b["step"].mean, b[value].most if most else b[value].mean) for b in found]


def _window(track: Track, lines: int) -> int:
    """Buckets that hold so many lines."""
    return max(round(lines * len(track.buckets) / max(track.lines, 1)), 1)


def _time_unit(data: RunData) -> tuple[float, str]:
    ends = [track.most("time") for track in (data.groups, data.steps)]
    ends += [as_number(row["time"]) for row in data.evaluations]
    span = max((end for end in ends if end is not None), default=0.0) - data.started
    return (3600.0, "hours") if span > 4 * 3600 else (60.0, "minutes")


def _total(buckets: Sequence[Sums], value: str) -> float:
    return sum(bucket[value].total for bucket in buckets if value in bucket)
