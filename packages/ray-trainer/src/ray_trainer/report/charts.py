"""Which curves a report shows, from which metrics. A chart whose metrics a run does not log is left out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from .metrics import NON_FINITE_KEY
from .svg import Point, Series, line_chart, number, sparkline

Rows = Sequence[dict[str, float]]

# The reward of the training samples has had many names; the first one that a run logs is drawn.
TRAIN_REWARD = ("reward/mean", "train/reward_mean", "critic/rewards/mean", "critic/score/mean", "reward_mean")
TRAIN_STRICT = (
    "reward/strict_mean",
    "reward/strict",
    "train/strict_mean",
    "reward/components/strict",
    "reward/strict/mean",
)
GRAD_NORM = ("actor/grad_norm", "optim/grad_norm", "grad_norm")
LEARNING_RATE = ("actor/lr", "optim/lr", "lr")
LOGPROB_GAP = ("rollout/logprob_diff_max", "rollout_corr/logprob_diff_max", "actor/rollout_logprob_diff_max")
_NOT_A_PART = {"reward", "strict", "clean", "parts", "off"}


def curves(rows: Rows) -> str:
    """The main charts of a run."""
    train_reward, train_strict = _first(rows, TRAIN_REWARD), _first(rows, TRAIN_STRICT)
    charts = [
        line_chart(
            "Reward",
            [
                Series("training samples", points(rows, train_reward), "c1", "smooth"),
                _validated(rows, "reward", "held-out prompts", "c2"),
            ],
            note="whiskers: one standard error",
        ),
        line_chart(
            "Strictly right",
            [
                Series("training samples", points(rows, train_strict), "c1", "smooth"),
                _validated(rows, "strict", "held-out prompts", "c2"),
            ],
            note="share of pictures",
        ),
        line_chart(
            "Parts, held out",
            [_validated(rows, name, name, f"c{1 + i % 6}") for i, name in enumerate(_part_names(rows))]
            + [_validated(rows, "clean", "clean", "c6")],
            note="each judged alone",
        ),
        line_chart(
            "Distance from the base model",
            [Series("KL", points(rows, "actor/kl_loss"), "c3", "smooth")],
            note="KL to the reference",
            floor=0.0,
        ),
        line_chart("Policy ratio", _ratio(rows), note="band: one standard deviation"),
        line_chart(
            "Clipped share",
            [
                Series("too high", points(rows, "actor/pg_clipfrac_higher"), "c4", "smooth"),
                Series("too low", points(rows, "actor/pg_clipfrac_lower"), "c1", "smooth"),
                Series("all", points(rows, "actor/pg_clipfrac"), "c5", "smooth"),
            ],
            floor=0.0,
        ),
        line_chart("Policy KL of one update", [Series("KL", points(rows, "actor/ppo_kl"), "c3", "smooth")]),
        line_chart("Gradient norm", [Series("norm", points(rows, _first(rows, GRAD_NORM)), "c5", "smooth")], floor=0.0),
        line_chart("Learning rate", [Series("rate", points(rows, _first(rows, LEARNING_RATE)), "c1")], floor=0.0),
        line_chart(
            "Rollout against trainer",
            [Series("gap", points(rows, _first(rows, LOGPROB_GAP)), "c4")],
            note="largest |Δ log-prob|",
            floor=0.0,
        ),
        line_chart("Seconds per step", _times(rows), floor=0.0),
    ]
    shown = "".join(charts)
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


def _first(rows: Rows, keys: Sequence[str]) -> str | None:
    return next((key for key in keys if any(key in row for row in rows)), None)


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
    """The whole step and its five longest parts; what is not done in most steps (validation) is left out."""
    totals = ("time/step", "time/step_s", "time/total")
    keys = [key for key in metric_names(rows) if key.startswith("time/")]
    keys = [key for key in keys if sum(key in row for row in rows) > len(rows) / 2]
    total = next((key for key in totals if key in keys), None)
    cost = {key: sum(y for _, y in points(rows, key) if math.isfinite(y)) for key in keys if key not in totals}
    longest = sorted(cost, key=lambda key: cost[key], reverse=True)[: 5 if total else 6]
    series = [Series("whole step", points(rows, total), "c1")] if total else []
    first = len(series)
    named = [(key.removeprefix("time/").removesuffix("_s"), key) for key in longest]
    return series + [Series(name, points(rows, key), f"c{first + 1 + i}") for i, (name, key) in enumerate(named)]
