"""Charts as inline SVG, made on the server by pure functions; colours and fonts are the style sheet's.

A series is told apart by its colour, by its dashes or the shape of its marks, and by its name in the legend.
A point of the chart under the pointer shows what it stands for, without a script.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from markupsafe import Markup

Style = Literal["line", "dashed", "faint", "circle", "square", "triangle", "diamond"]
Point = tuple[float, float]
SHAPES: tuple[Style, ...] = ("circle", "square", "triangle", "diamond")
COLOURS = 6
"""Classes ``c1`` to ``c6`` of the style sheet."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 10, 20, 34
_MAX_TIPS = 60


@dataclass(frozen=True, slots=True)
class Series:
    """One curve, or one row of marks with intervals."""

    label: str
    points: Sequence[Point]
    colour: int
    style: Style = "line"
    intervals: Sequence[Point] = ()
    """Low and high for each point, drawn as error bars."""


@dataclass(frozen=True, slots=True)
class Frame:
    """The range of both axes and the size of the picture, in pixels."""

    x: Point
    y: Point
    width: int
    height: int

    def at(self, x: float, y: float) -> Point:
        """Where a point of the data is in the picture; what is above or below the range is at its edge."""
        y = min(max(y, self.y[0]), self.y[1])
        across = (x - self.x[0]) / ((self.x[1] - self.x[0]) or 1.0)
        up = (y - self.y[0]) / ((self.y[1] - self.y[0]) or 1.0)
        return (
            _LEFT + across * (self.width - _LEFT - _RIGHT),
            self.height - _BOTTOM - up * (self.height - _TOP - _BOTTOM),
        )


def chart(
    series: Sequence[Series],
    *,
    about: str,
    x_label: str,
    y_range: tuple[float | None, float | None] = (None, None),
    percent: bool = False,
    width: int = 420,
    height: int = 210,
    tips: Sequence[tuple[float, str]] = (),
) -> Markup:
    """All series in one picture, or a line that there is nothing yet. ``about`` is what a screen reader says.

    ``y_range`` holds bounds that are given; the others come from the data. ``tips`` are texts along x.
    """
    points = [point for each in series for point in each.points]
    if not points:
        return Markup('<p class="nothing">nothing yet</p>')
    ys = [y for _, y in points] + [y for each in series for pair in each.intervals for y in pair]
    y = nice_range(min(ys), max(ys), *y_range)
    frame = Frame((min(x for x, _ in points), max(x for x, _ in points)), y, width, height)
    body = [
        *_grid(frame, percent),
        _text(width - _RIGHT, height - 4, x_label, "end"),
        *(_drawn(each, frame) for each in series),
        *_tips(tips, frame),
    ]
    head = Markup('<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}">')
    return head.format(width, height, about) + Markup("").join(body) + Markup("</svg>")


def swatch(series: Series) -> Markup:
    """A piece of the series for a legend."""
    frame = Frame((0, 1), (0, 1), _LEFT + _RIGHT + 22, _TOP + _BOTTOM + 10)
    points = [(0.5, 0.5)] if series.style in SHAPES else [(0.0, 0.5), (1.0, 0.5)]
    drawn = _drawn(Series("", points, series.colour, series.style), frame)
    view = f"{_LEFT - 2} {_TOP - 2} 26 14"
    return Markup('<svg class="swatch" viewBox="{}" aria-hidden="true">{}</svg>').format(view, drawn)


def bar(share: float, colour: int) -> Markup:
    """A horizontal bar of a share between 0 and 1."""
    width = 100 * min(max(share, 0.0), 1.0)
    return Markup(
        '<svg class="bar" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true">'
        '<rect class="rail" width="100" height="8"/><rect class="f{}" width="{:.2f}" height="8"/></svg>'
    ).format(colour, width)


def stacked(parts: Sequence[tuple[float, int]]) -> Markup:
    """Parts of a whole side by side: values and colours."""
    whole = sum(value for value, _ in parts) or 1.0
    made, left = [], 0.0
    for value, colour in parts:
        width = 100 * value / whole
        made.append(
            Markup('<rect class="f{}" x="{:.2f}" width="{:.2f}" height="8"/>').format(colour, left, width)
        )
        left += width
    head = Markup('<svg class="bar" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true">')
    return head + Markup("").join(made) + Markup("</svg>")


def spark(values: Sequence[float]) -> Markup:
    """A small curve from 0 to its maximum, without axes."""
    if len(values) < 2 or not max(values) > 0:
        return Markup("")
    top, last = max(values), len(values) - 1
    points = " ".join(
        f"{88 * at / last + 1:.1f},{17 - 15 * value / top:.1f}" for at, value in enumerate(values)
    )
    return Markup(
        '<svg class="spark" viewBox="0 0 90 18" aria-hidden="true"><polyline class="c1" points="{}"/></svg>'
    ).format(points)


def nice_range(low: float, high: float, at_least: float | None, at_most: float | None) -> Point:
    """Bounds that hold all data with a little air, widened to round numbers; given ones stay as they are."""
    air = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    low = low - air if at_least is None else at_least
    high = max(high + air if at_most is None else at_most, low + 1e-9)
    step = _step(high - low)
    return (
        math.floor(low / step) * step if at_least is None else at_least,
        math.ceil(high / step) * step if at_most is None else at_most,
    )


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers between two bounds, about ``count`` of them."""
    step = _step(high - low, count)
    first = math.ceil(low / step - 1e-9)
    return [at * step for at in range(first, first + 2 * count + 2) if at * step <= high + 1e-9 * step]


def smoothed(points: Sequence[Point], window: int) -> list[Point]:
    """Each y as the mean of itself and the ``window - 1`` before it."""
    made, total = [], 0.0
    for at, (x, y) in enumerate(points):
        total += y - (points[at - window][1] if at >= window else 0.0)
        made.append((x, total / min(at + 1, window)))
    return made


def _step(span: float, count: int = 5) -> float:
    if not span > 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(span / count))
    return power * next(
        factor for factor in (1, 2, 2.5, 5, 10, 20) if span / count <= factor * power * 1.0001
    )


def _label(value: float, percent: bool) -> str:
    if percent:
        return f"{100 * value:.0f} %"
    return f"{value / 1000:g}k" if abs(value) >= 10_000 else f"{round(value, 9):g}"


def _grid(frame: Frame, percent: bool) -> Iterable[Markup]:
    for value in ticks(*frame.y, 4):
        _, y = frame.at(frame.x[0], value)
        line = '<line class="grid" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"/>'
        yield Markup(line).format(_LEFT, frame.width - _RIGHT, y, y)
        yield _text(_LEFT - 5, y + 3.5, _label(value, percent), "end")
    for value in ticks(*frame.x, frame.width // 90):
        x, _ = frame.at(value, frame.y[0])
        if x < frame.width - 24:
            yield _text(x, frame.height - _BOTTOM + 14, _label(value, False), "middle")


def _text(x: float, y: float, text: str, anchor: str) -> Markup:
    return Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>').format(x, y, anchor, text)


def _drawn(series: Series, frame: Frame) -> Markup:
    places = [frame.at(x, y) for x, y in series.points]
    if series.style in SHAPES:
        pairs = zip(places, series.intervals, strict=True) if series.intervals else ()
        bars = [_interval(x, pair, frame, series.colour) for (x, _), pair in pairs]
        marks = [_mark(x, y, series.style, series.colour) for x, y in places]
        return Markup("").join([_polyline(places, series.colour, "faint"), *bars, *marks])
    if len(places) == 1:
        return _mark(*places[0], "circle", series.colour)
    return _polyline(places, series.colour, series.style)


def _polyline(places: Sequence[Point], colour: int, style: Style) -> Markup:
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    return Markup('<polyline class="c{} {}" points="{}"/>').format(colour, style, line)


def _interval(x: float, pair: Point, frame: Frame, colour: int) -> Markup:
    (_, low), (_, high) = (frame.at(frame.x[0], value) for value in pair)
    path = f"M{x - 3:.1f},{low:.1f}h6M{x:.1f},{low:.1f}V{high:.1f}M{x - 3:.1f},{high:.1f}h6"
    return Markup('<path class="c{} interval" d="{}"/>').format(colour, path)


def _mark(x: float, y: float, shape: Style, colour: int) -> Markup:
    paths = {
        "circle": f"M{x - 4:.1f},{y:.1f}a4,4 0 1,0 8,0a4,4 0 1,0 -8,0z",
        "square": f"M{x - 3.6:.1f},{y - 3.6:.1f}h7.2v7.2h-7.2z",
        "triangle": f"M{x:.1f},{y - 5:.1f}l5,8.6h-10z",
        "diamond": f"M{x:.1f},{y - 5.2:.1f}l5.2,5.2l-5.2,5.2l-5.2,-5.2z",
    }
    return Markup('<path class="f{} mark" d="{}"/>').format(colour, paths[shape])


def _tips(tips: Sequence[tuple[float, str]], frame: Frame) -> Iterable[Markup]:
    """Columns over the whole picture; the one under the pointer shows its text."""
    every = math.ceil(len(tips) / _MAX_TIPS)
    shown = [(frame.at(x, frame.y[0])[0], text) for x, text in tips[::-1][:: every or 1][::-1]]
    between = [(left[0] + right[0]) / 2 for left, right in pairwise(shown)]
    edges = [_LEFT, *between, frame.width - _RIGHT]
    for at, (x, text) in enumerate(shown):
        left, right = edges[at : at + 2]
        column = (
            '<g class="tip"><rect x="{:.1f}" y="0" width="{:.1f}" height="{}"/>'
            '<line x1="{:.1f}" x2="{:.1f}" y1="{}" y2="{}"/>{}</g>'
        )
        said = _text(frame.width - _RIGHT, 12, text, "end")
        bottom = frame.height - _BOTTOM
        yield Markup(column).format(left, max(right - left, 0.1), bottom, x, x, _TOP, bottom, said)
