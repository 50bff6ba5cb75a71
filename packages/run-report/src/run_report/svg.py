"""Line charts as inline SVG. Colours and fonts come from the page's style sheet; its script reads the numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from markupsafe import Markup

from .render import number, render

MAX_POINTS = 320  # more steps than this are averaged into bins before they are drawn

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """One curve: (step, value) points; `colour` is one of the page's c1 … c6.

    `line` is a plain line, `smooth` a line of moving averages over its own faint raw curve, `dots` a line with markers.
    `spread` draws value ± spread: as whiskers on dots, as a band elsewhere.
    """

    label: str
    points: Sequence[Point]
    colour: str = "c1"
    style: Literal["line", "smooth", "dots"] = "line"
    spread: Sequence[float] | None = None

    @property
    def main(self) -> Sequence[Point]:
        """What the strong line goes through."""
        return _smoothed(self.points) if self.rough else self.points

    @property
    def rough(self) -> bool:
        """Whether the raw curve is drawn too, faintly."""
        return self.style == "smooth" and len(self.points) > 8

    @property
    def edges(self) -> tuple[list[Point], list[Point]]:
        """value + spread and value - spread."""
        pairs = list(zip(self.points, self.spread or [0.0] * len(self.points), strict=True))
        return [(x, y + s) for (x, y), s in pairs], [(x, y - s) for (x, y), s in pairs]


@dataclass(frozen=True)
class Axes:
    """From steps and values to the pixels of a chart."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float
    width: float = 420
    height: float = 216
    left: float = 46
    right: float = 12
    top: float = 12
    bottom: float = 26

    def x(self, value: float) -> float:
        share = (value - self.x_low) / ((self.x_high - self.x_low) or 1.0)
        return self.left + share * (self.width - self.left - self.right)

    def y(self, value: float) -> float:
        share = (value - self.y_low) / ((self.y_high - self.y_low) or 1.0)
        return self.height - self.bottom - share * (self.height - self.top - self.bottom)

    def path(self, points: Sequence[Point]) -> str:
        return " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)


def line_chart(
    title: str, series: Sequence[Series], *, note: str = "", floor: float | None = None, marks: Sequence[float] = ()
) -> Markup:
    """A figure with title, legend and curves; empty where there is nothing to draw. `floor` is a value that the vertical axis
    must include, `marks` are places on the horizontal one that get a dashed line."""
    drawn = [s for s in map(_binned, map(_finite, series)) if s.points]
    if not drawn:
        return Markup()
    edges = [point for s in drawn for side in s.edges for point in side]
    xs, ys = [x for x, _ in edges], [y for _, y in edges] + ([] if floor is None else [floor])
    low, high = min(ys), max(ys)
    if low == high == 0:
        high = 1.0  # nothing happened: a line on the floor, not in mid-air
    y_ticks = nice_ticks(low, high, 4)
    axes = Axes(min(xs), max(xs), min(low, y_ticks[0]), max(high, y_ticks[-1]))
    data = [{"l": s.label, "c": s.colour, "p": [[_short(x), _short(y)] for x, y in s.points]} for s in drawn]
    return render(
        "chart.html",
        title=title,
        note=note,
        series=drawn,
        axes=axes,
        x_ticks=[x for x in nice_ticks(axes.x_low, axes.x_high, 5) if axes.x_low <= x <= axes.x_high],
        y_ticks=y_ticks,
        marks=[x for x in dict.fromkeys(marks) if axes.x_low <= x <= axes.x_high],
        numbers=json.dumps(data, separators=(",", ":")),
        spoken=f"{title}: " + ", ".join(_spoken(title, s) for s in drawn),
    )


def sparkline(points: Sequence[Point]) -> Markup:
    """A small curve without axes, for the table of all metrics."""
    points = _binned(_finite(Series("", points)), 80).points
    xs, ys = [p[0] for p in points], [p[1] for p in points]
    axes = Axes(min(xs), max(xs), min(ys), max(ys), width=120, height=24, left=2, right=2, top=4, bottom=4)
    return render("sparkline.html", path=axes.path(points), end=axes.path(points[-1:]).split(","))


def nice_ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers that enclose [low, high]."""
    if high <= low:
        pad = abs(low) * 0.1 or 0.5
        low, high = low - pad, high + pad
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = power * min((m for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999), default=10)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def _finite(series: Series) -> Series:
    keep = [i for i, point in enumerate(series.points) if all(map(math.isfinite, point))]
    spread = series.spread and [series.spread[i] if math.isfinite(series.spread[i]) else 0.0 for i in keep]
    return replace(series, points=[series.points[i] for i in keep], spread=spread)


def _binned(series: Series, limit: int = MAX_POINTS) -> Series:
    size = math.ceil(len(series.points) / limit)
    if size <= 1:
        return series

    def means(values: Sequence[float]) -> list[float]:
        parts = [values[i : i + size] for i in range(0, len(values), size)]
        return [sum(part) / len(part) for part in parts]

    xs, ys = (means(values) for values in zip(*series.points, strict=True))
    return replace(series, points=list(zip(xs, ys, strict=True)), spread=series.spread and means(series.spread))


def _smoothed(points: Sequence[Point]) -> list[Point]:
    """Centred moving average over about a twelfth of the curve; the ends use what there is."""
    reach = max(1, len(points) // 24)
    smooth = []
    for i, (x, _) in enumerate(points):
        window = points[max(0, i - reach) : i + reach + 1]
        smooth.append((x, sum(y for _, y in window) / len(window)))
    return smooth


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def _spoken(title: str, series: Series) -> str:
    return f"{series.label or title} from {number(series.points[0][1])} to {number(series.points[-1][1])}"
