"""Line charts as inline SVG. Colours and fonts come from the page's style sheet; its script reads the numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

WIDTH, HEIGHT = 420, 216
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 12, 26
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


def line_chart(
    title: str, series: Sequence[Series], *, note: str = "", floor: float | None = None, marks: Sequence[float] = ()
) -> str:
    """A figure with title, legend and curves. `floor` is a value that the vertical axis must include, `marks` are places on
    the horizontal one that get a dashed line."""
    drawn = [_binned(_finite(s)) for s in series]
    drawn = [s for s in drawn if s.points]
    if not drawn:
        return ""
    x_low, x_high, y_low, y_high = _ranges(drawn, floor)
    if y_low == y_high == 0:
        y_high = 1.0  # nothing happened: a line on the floor, not in mid-air
    y_ticks = nice_ticks(y_low, y_high, 4)
    y_low, y_high = min(y_low, y_ticks[0]), max(y_high, y_ticks[-1])
    axes = _Axes(x_low, x_high, y_low, y_high)
    body = [_grid(axes, nice_ticks(x_low, x_high, 5), y_ticks)]
    body += [_curve(axes, s) for s in drawn]
    body += [
        f'<line class="mark" x1="{axes.x(m):.1f}" x2="{axes.x(m):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
        for m in dict.fromkeys(marks)
        if x_low <= m <= x_high
    ]
    data = [{"l": s.label, "c": s.colour, "p": [[_short(x), _short(y)] for x, y in s.points]} for s in drawn]
    legend = (
        "".join(f'<span class="{s.colour}"><i></i>{escape(s.label)}</span>' for s in drawn) if len(drawn) > 1 else ""
    )
    numbers = escape(json.dumps(data, separators=(",", ":")))
    remark = f"<small>{escape(note)}</small>" if note else ""
    return (
        f'<figure class="chart" data-range="{x_low:g} {x_high:g}" data-series="{numbers}">'
        f"<figcaption><b>{escape(title)}</b>{remark}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(_spoken(title, drawn))}">'
        f"{''.join(body)}</svg>"
        f'<div class="legend">{legend}</div></figure>'
    )


def sparkline(points: Sequence[Point]) -> str:
    """A small curve without axes, for the table of all metrics."""
    series = _binned(_finite(Series("", points)), 80)
    if not series.points:
        return ""
    xs, ys = [p[0] for p in series.points], [p[1] for p in series.points]
    span_x, span_y = (max(xs) - min(xs)) or 1.0, (max(ys) - min(ys)) or 1.0
    path = " ".join(
        f"{2 + 116 * (x - min(xs)) / span_x:.1f},{20 - 16 * (y - min(ys)) / span_y:.1f}" for x, y in series.points
    )
    end_x, end_y = path.rsplit(" ", 1)[-1].split(",")
    return (
        f'<svg class="spark" viewBox="0 0 122 24" aria-hidden="true"><polyline class="stroke c1" points="{path}"/>'
        f'<circle class="fill c1" cx="{end_x}" cy="{end_y}" r="2"/></svg>'
    )


def number(value: float) -> str:
    """Three significant digits, exponents only where they help: 0.652, 12.4, 1340, 8.4e-05."""
    if not math.isfinite(value):
        return "–"
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        digits = 3 if abs(value) < 10 else 1 if abs(value) < 100 else 0
        return f"{value:.{digits}f}"
    return f"{value:.1e}"


def nice_ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers that enclose [low, high]."""
    if high <= low:
        pad = abs(low) * 0.1 or 0.5
        low, high = low - pad, high + pad
    raw = (high - low) / max(1, count)
    power = 10.0 ** math.floor(math.log10(raw))
    step = power * min((m for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999), default=10)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


@dataclass(frozen=True)
class _Axes:
    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        share = (value - self.x_low) / ((self.x_high - self.x_low) or 1.0)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.y_low) / ((self.y_high - self.y_low) or 1.0)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    def path(self, points: Sequence[Point]) -> str:
        return " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)


def _grid(axes: _Axes, x_ticks: Sequence[float], y_ticks: Sequence[float]) -> str:
    parts = []
    for tick in y_ticks:
        y = axes.y(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 7}" y="{y + 3.5:.1f}" text-anchor="end">{_tick(tick)}</text>')
    for tick in x_ticks:
        if axes.x_low <= tick <= axes.x_high:
            x = axes.x(tick)
            parts.append(f'<text class="tick" x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{_tick(tick)}</text>')
    return "".join(parts)


def _curve(axes: _Axes, series: Series) -> str:
    colour, points = series.colour, series.points
    parts = []
    if series.spread is not None and series.style != "dots":
        upper = [(x, y + s) for (x, y), s in zip(points, series.spread, strict=True)]
        lower = [(x, y - s) for (x, y), s in zip(points, series.spread, strict=True)]
        parts.append(f'<polygon class="band {colour}" points="{axes.path([*upper, *reversed(lower)])}"/>')
    if series.style == "smooth" and len(points) > 8:
        parts.append(f'<polyline class="stroke faint {colour}" points="{axes.path(points)}"/>')
        points = _smoothed(points)
    if len(points) > 1:
        parts.append(f'<polyline class="stroke {colour}" points="{axes.path(points)}"/>')
    if series.style == "dots" or len(points) == 1:
        spread = series.spread or [0.0] * len(points)
        for (x, y), error in zip(points, spread, strict=True):
            px, py = axes.x(x), axes.y(y)
            if error > 0:
                top, bottom = axes.y(y + error), axes.y(y - error)
                parts.append(f'<path class="whisker {colour}" d="M{px:.1f} {top:.1f}V{bottom:.1f}"/>')
            parts.append(f'<circle class="dot {colour}" cx="{px:.1f}" cy="{py:.1f}" r="3.4"/>')
    return "".join(parts)


def _ranges(series: Sequence[Series], floor: float | None) -> tuple[float, float, float, float]:
    xs = [x for s in series for x, _ in s.points]
    ys = [y for s in series for _, y in s.points] + ([floor] if floor is not None else [])
    for s in series:
        if s.spread is not None:
            ys += [y + sign * e for (_, y), e in zip(s.points, s.spread, strict=True) for sign in (1, -1)]
    return min(xs), max(xs), min(ys), max(ys)


def _finite(series: Series) -> Series:
    keep = [i for i, (x, y) in enumerate(series.points) if math.isfinite(x) and math.isfinite(y)]
    spread = None
    if series.spread is not None:
        spread = [series.spread[i] if math.isfinite(series.spread[i]) else 0.0 for i in keep]
    return Series(series.label, [series.points[i] for i in keep], series.colour, series.style, spread)


def _binned(series: Series, limit: int = MAX_POINTS) -> Series:
    size = math.ceil(len(series.points) / limit)
    if size <= 1:
        return series

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    chunks = [slice(i, i + size) for i in range(0, len(series.points), size)]
    points = [(mean([p[0] for p in series.points[c]]), mean([p[1] for p in series.points[c]])) for c in chunks]
    spread = None if series.spread is None else [mean(series.spread[c]) for c in chunks]
    return Series(series.label, points, series.colour, series.style, spread)


def _smoothed(points: Sequence[Point]) -> list[Point]:
    """Centred moving average over about a twelfth of the curve; the ends use what there is."""
    reach = max(1, len(points) // 24)
    smooth = []
    for i, (x, _) in enumerate(points):
        window = points[max(0, i - reach) : i + reach + 1]
        smooth.append((x, sum(y for _, y in window) / len(window)))
    return smooth


def _tick(value: float) -> str:
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:g}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def _spoken(title: str, series: Sequence[Series]) -> str:
    ends = ", ".join(f"{s.label or title} from {number(s.points[0][1])} to {number(s.points[-1][1])}" for s in series)
    return f"{title}: {ends}"
