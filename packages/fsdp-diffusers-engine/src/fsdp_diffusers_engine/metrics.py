"""Many micro-batches' metrics as one row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

COUNT = "actor/count"
"""Number of counted elements behind a micro-batch's metrics: the weight of its means, and summed itself."""


def reduce_metrics(rows: Iterable[Mapping[str, Tensor | float]]) -> dict[str, float]:
    """One number per name: ``*_max`` and ``*_min`` stay extremes, counts add up, the rest is averaged over elements.

    A name that only some rows have is averaged over those.
    """
    values: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        weight = float(row.get(COUNT, 1.0))
        for name, value in row.items():
            values.setdefault(name, []).append((float(value), weight))
    result = {}
    for name, pairs in values.items():
        numbers = [number for number, _ in pairs]
        total = sum(weight for _, weight in pairs)
        if name.endswith("_max"):
            result[name] = max(numbers)
        elif name.endswith("_min"):
            result[name] = min(numbers)
        elif name == COUNT:
            result[name] = sum(numbers)
        else:
            result[name] = sum(n * w for n, w in pairs) / total if total else sum(numbers) / len(numbers)
    return result
