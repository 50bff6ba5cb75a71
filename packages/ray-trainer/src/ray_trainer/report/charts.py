"""Which curves a report shows, from which metrics. A chart whose metrics a run does not log is left out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from html import escape

from . import svg
from .metrics import NON_FINITE_KEY
from .svg import Point, Series, number, sparkline

Rows = Sequence[dict[str, float]]

_NOT_A_PART = {"reward", "strict", "clean", "parts", "off"}


def curves(rows: Rows, marks: Sequence[float] = ()) -> str:
    """The main charts of a run: what it was for first, then how the policy moved, then what it cost. `marks` are steps."""
    line_chart = partial(svg.line_chart, marks=marks)
    _chart = partial(_of_metrics, marks=marks)
    judged = [
        line_chart(
            "Reward",
            [
                Series("training samples", points(rows, "reward/mean"), "c1", "smooth"),
                _validated(rows, "reward", "held-out prompts", "c2"),
            ],
            note="whiskers: one standard error",
        ),
        line_chart(
            "Strictly right",
            [
                Series("training samples", points(rows, "reward/strict_mean"), "c1", "smooth"),
                _validated(rows, "strict", "held-out prompts", "c2"),
            ],
            note="share of pictures",
        ),
        line_chart(
            "Parts, held out",
            [_validated(rows, name, name, f"c{1 + i}") for i, name in enumerate(_part_names(rows))]
            + [_validated(rows, "clean", "clean", "c6")],
            note="each judged alone",
        ),
    ]
    moved = [
        _chart(rows, "Distance from the base model", {"actor/kl_loss": "KL"}, note="KL to the reference"),
        line_chart("Policy ratio", _ratio(rows), note="band: one standard deviation"),
        _chart(
            rows,
            "Clipped share",
            {
                "actor/pg_clipfrac_higher": "too high",
                "actor/pg_clipfrac_lower": "too low",
                "actor/dppo_masked_fraction": "masked",
            },
        ),
        _chart(rows, "Policy KL of one update", {"actor/ppo_kl": "KL"}),
        _chart(
            rows,
            "Winners and losers",
            {"actor/dpo_winner_gain": "gain on winners", "actor/dpo_loser_gain": "gain on losers"},
            note="against the reference",
        ),
        _chart(rows, "Pairs ordered rightly", {"actor/dpo_accuracy": "share"}),
        _chart(
            rows,
            "Loss",
            {
                "actor/dpo_loss": "DPO",
                "actor/nft_positive_loss": "NFT, positive",
                "actor/nft_negative_loss": "NFT, negative",
                "actor/pg_loss": "policy gradient",
            },
        ),
        _chart(rows, "Gradient norm", {"actor/grad_norm": "norm"}),
        _chart(rows, "Learning rate", {"actor/lr": "rate"}),
        _chart(
            rows, "Rollout against trainer", {"actor/rollout_log_prob_diff_max": "gap"}, note="largest |Δ log-prob|"
        ),
    ]
    cost = [line_chart("Seconds per step", _times(rows), floor=0.0, note="validation left out")]
    shown = "".join([*judged, *moved, *cost])
    return f'<div class="charts">{shown}</div>' if shown else ""


def all_metrics(rows: Rows) -> str:
    """A table with a small curve and the first, last, lowest and highest value of everything that was logged."""
    lines = []
    for key in metric_names(rows):
        values = [y for _, y in points(rows, key) if math.isfinite(y)]
        if not values:
            continue
        cells = "".join(f"<td>{number(value)}</td>" for value in (values[0], values[-1], min(values), max(values)))
        lines.append(f"<tr><th><code>{escape(key)}</code></th><td>{sparkline(points(rows, key))}</td>{cells}</tr>")
    head = "<tr><th>metric</th><td></td><td>first</td><td>last</td><td>lowest</td><td>highest</td></tr>"
    return f'<table class="metrics"><thead>{head}</thead><tbody>{"".join(lines)}</tbody></table>' if lines else ""


def metric_names(rows: Rows) -> list[str]:
    """Every key of the rows in order of first appearance, grouped by what stands before the slash."""
    names = dict.fromkeys(key for row in rows for key in row if key not in ("step", NON_FINITE_KEY))
    groups = dict.fromkeys(name.split("/")[0] for name in names)
    return [name for group in groups for name in names if name.split("/")[0] == group]


def points(rows: Rows, key: str | None) -> list[Point]:
    """(step, value) of every row that has the metric."""
    return [(row["step"], row[key]) for row in rows if key in row] if key else []


def _of_metrics(rows: Rows, title: str, keys: dict[str, str], note: str = "", marks: Sequence[float] = ()) -> str:
    """A chart of training metrics by name; the axis includes zero, which all of them are measured from."""
    shown = [(key, label) for key, label in keys.items() if any(key in row for row in rows)]
    series = [Series(label, points(rows, key), f"c{1 + i}", "smooth") for i, (key, label) in enumerate(shown)]
    return svg.line_chart(title, series, note=note, floor=0.0, marks=marks)


def _validated(rows: Rows, name: str, label: str, colour: str) -> Series:
    key, error = f"val/{name}_mean", f"val/{name}_stderr"
    spread = [row.get(error, 0.0) for row in rows if key in row]
    return Series(label, points(rows, key), colour, "dots", spread)


def _part_names(rows: Rows) -> list[str]:
    keys = dict.fromkeys(key for row in rows for key in row if key.startswith("val/") and key.endswith("_mean"))
    names = [key.removeprefix("val/").removesuffix("_mean") for key in keys]
    return [name for name in names if name not in _NOT_A_PART][:5]


def _ratio(rows: Rows) -> list[Series]:
    spread = [row.get("actor/ratio_std", 0.0) for row in rows if "actor/ratio_mean" in row]
    return [
        Series("mean", points(rows, "actor/ratio_mean"), "c1", "line", spread),
        Series("largest", points(rows, "actor/ratio_max"), "c4"),
        Series("smallest", points(rows, "actor/ratio_min"), "c3"),
    ]


def _times(rows: Rows) -> list[Series]:
    """The whole step and its five longest parts. Validation, which few steps have, is taken out of both."""
    keys = [key for key in metric_names(rows) if key.startswith("time/") and key not in ("time/step", "time/validate")]
    cost = {key: sum(y for _, y in points(rows, key) if math.isfinite(y)) for key in keys}
    longest = sorted(cost, key=lambda key: cost[key], reverse=True)[:5]
    whole = [(row["step"], step_seconds(row)) for row in rows if "time/step" in row]
    parts = [Series(key.removeprefix("time/"), points(rows, key), f"c{2 + i}") for i, key in enumerate(longest)]
    return [Series("whole step", whole, "c1"), *parts]


def step_seconds(row: dict[str, float]) -> float:
    """Seconds of a training step without the validation that followed it; NaN where the row has none."""
    return row.get("time/step", math.nan) - row.get("time/validate", 0.0)
