"""Which curves a report shows, from which metrics. A chart whose metrics a run does not log is left out."""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup

from .metrics import NON_FINITE_KEY
from .svg import Point, Series, line_chart, sparkline

Rows = Sequence[dict[str, float]]

_NOT_A_PART = {"reward", "strict", "clean", "parts", "off"}
_MOVED: tuple[tuple[str, str, dict[str, str]], ...] = (
    (
        "Clipped share",
        "",
        {
            "actor/pg_clipfrac_higher": "too high",
            "actor/pg_clipfrac_lower": "too low",
            "actor/dppo_masked_fraction": "masked",
        },
    ),
    ("Policy KL of one update", "", {"actor/ppo_kl": "KL"}),
    (
        "Winners and losers",
        "against the reference",
        {"actor/dpo_winner_gain": "gain on winners", "actor/dpo_loser_gain": "gain on losers"},
    ),
    ("Pairs ordered rightly", "", {"actor/dpo_accuracy": "share"}),
    (
        "Loss",
        "",
        {
            "actor/dpo_loss": "DPO",
            "actor/nft_positive_loss": "NFT, positive",
            "actor/nft_negative_loss": "NFT, negative",
            "actor/pg_loss": "policy gradient",
        },
    ),
    ("Gradient norm", "", {"actor/grad_norm": "norm"}),
    ("Learning rate", "", {"actor/lr": "rate"}),
    ("Rollout against trainer", "largest |Δ log-prob|", {"actor/rollout_log_prob_diff_max": "gap"}),
)


def curves(rows: Rows, marks: Sequence[float] = ()) -> list[Markup]:
    """The main charts of a run: what it was for first, then how the policy moved, then what it cost. `marks` are steps."""

    def chart(title: str, note: str, series: list[Series], floor: float | None = None) -> Markup:
        return line_chart(title, series, note=note, floor=floor, marks=marks)

    def trained(title: str, note: str, keys: dict[str, str]) -> Markup:
        shown = [(key, label) for key, label in keys.items() if any(key in row for row in rows)]
        series = [Series(label, points(rows, key), f"c{1 + i}", "smooth") for i, (key, label) in enumerate(shown)]
        return chart(title, note, series, floor=0.0)  # all of them are measured from zero

    def judged(title: str, note: str, key: str, measure: str) -> Markup:
        samples = Series("training samples", points(rows, key), "c1", "smooth")
        return chart(title, note, [samples, _validated(rows, measure, "held-out prompts", "c2")])

    parts = [_validated(rows, name, name, f"c{1 + i}") for i, name in enumerate(_part_names(rows))]
    found = [
        judged("Reward", "whiskers: one standard error", "reward/mean", "reward"),
        judged("Strictly right", "share of pictures", "reward/strict_mean", "strict"),
        chart("Parts, held out", "each judged alone", [*parts, _validated(rows, "clean", "clean", "c6")]),
        trained("Distance from the base model", "KL to the reference", {"actor/kl_loss": "KL"}),
        chart("Policy ratio", "band: one standard deviation", _ratio(rows)),
        *(trained(*moved) for moved in _MOVED),
        chart("Seconds per step", "validation left out", _times(rows), floor=0.0),
    ]
    return [markup for markup in found if markup]


def all_metrics(rows: Rows) -> list[tuple[str, Markup, list[float]]]:
    """Of everything that was logged: its name, a small curve, and the first, last, lowest and highest value."""
    found = []
    for key in metric_names(rows):
        values = [y for _, y in points(rows, key) if math.isfinite(y)]
        if values:
            ends = [values[0], values[-1], min(values), max(values)]
            found.append((key, sparkline(points(rows, key)), ends))
    return found


def metric_names(rows: Rows) -> list[str]:
    """Every key of the rows in order of first appearance, grouped by what stands before the slash."""
    names = dict.fromkeys(key for row in rows for key in row if key not in ("step", NON_FINITE_KEY))
    groups = list(dict.fromkeys(name.split("/")[0] for name in names))
    return sorted(names, key=lambda name: groups.index(name.split("/")[0]))


def points(rows: Rows, key: str) -> list[Point]:
    """(step, value) of every row that has the metric."""
    return [(row["step"], row[key]) for row in rows if key in row]


def step_seconds(row: dict[str, float]) -> float:
    """Seconds of a training step without the validation that followed it; NaN where the row has none."""
    return row.get("time/step", math.nan) - row.get("time/validate", 0.0)


def _validated(rows: Rows, name: str, label: str, colour: str) -> Series:
    key, error = f"val/{name}_mean", f"val/{name}_stderr"
    spread = [row.get(error, 0.0) for row in rows if key in row]
    return Series(label, points(rows, key), colour, "dots", spread)


def _part_names(rows: Rows) -> list[str]:
    keys = [key for key in metric_names(rows) if key.startswith("val/") and key.endswith("_mean")]
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
