"""Metrics that can be pooled: micro-batches, optimizer steps and ranks together give the number of the whole batch.

A metric travels as a few sums together with how they pool, and becomes a number at the end. Averaging finished numbers
would be wrong for all but equal parts, and for a standard deviation it is wrong even then.

    pool      parts                   the number
    mean      count, sum              sum / count
    std       count, sum, squares     sqrt(squares / count - (sum / count)^2)
    max, min  count, value            the largest, the smallest
    sum       count, value            added over time and over ranks: elements that were counted
    events    count, value            added over time, equal on all ranks: optimizer steps that were skipped
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from .errors import unknown_name

POOLS = ("mean", "std", "max", "min", "sum", "events")


class Statistic(NamedTuple):
    """What one part of a batch adds to a metric.

    Args:
        pool: one of `POOLS`.
        parts: the numbers in the module docstring's table, [2] or [3]: plain floats, or a float64 tensor that stays on its device
            until `pool_statistics` reads it. Squares are around a fixed point near the values, which keeps their digits.
    """

    pool: str
    parts: Any


def statistic(pool: str, value: Any, count: float = 1.0) -> Statistic:
    """A number of this process, weighted by `count` where it is a mean. Raises `LossError` for an unknown pool."""
    if pool not in POOLS or pool == "std":
        raise unknown_name("pool", pool, [name for name in POOLS if name != "std"])
    number = float(value)
    return Statistic(pool, (count, number * count if pool == "mean" else number))


def pool_statistics(rows: Iterable[Mapping[str, Statistic | Any]], *, over_ranks: bool = False) -> dict[str, Statistic]:
    """One statistic per name, with plain floats as parts.

    Args:
        rows: what micro-batches or optimizer steps of one rank gave, or (`over_ranks`) what each rank gave. A plain number counts
            as the mean of one element; a name that only some rows have is pooled over those.

    Raises:
        LossError: two rows disagree on how a name pools.
    """
    found: dict[str, tuple[str, list[Any]]] = {}
    for row in rows:
        for name, entry in row.items():
            one = entry if isinstance(entry, Statistic) else statistic("mean", entry)
            pool, parts = found.setdefault(name, (one.pool, []))
            if pool != one.pool:
                raise unknown_name(f"pool of {name!r}", one.pool, [pool])
            parts.append(one.parts)
    return {
        name: Statistic(pool, _join("max" if pool == "events" and over_ranks else pool, parts))
        for (name, (pool, _)), parts in zip(found.items(), _on_host([p for _, p in found.values()]), strict=True)
    }


def numbers(statistics: Mapping[str, Statistic]) -> dict[str, float]:
    """The number of each statistic; one that counted nothing has none and is left out."""
    return {name: _number(pool, parts) for name, (pool, parts) in statistics.items() if float(parts[0]) > 0}


def _number(pool: str, parts: Sequence[Any]) -> float:
    count, first = float(parts[0]), float(parts[1])
    if pool == "mean":
        return first / count
    if pool == "std":
        return math.sqrt(max(float(parts[2]) / count - (first / count) ** 2, 0.0))
    return first


def _join(pool: str, parts: list[list[float]]) -> tuple[float, ...]:
    counted = [part for part in parts if part[0] > 0] or parts[:1]
    if pool in ("max", "min"):
        choose = max if pool == "max" else min
        # NaN is larger than any number here: it must not be lost because of where it stands.
        values = [part[1] for part in counted]
        bad = [value for value in values if math.isnan(value)]
        return (math.fsum(part[0] for part in counted), bad[0] if bad else choose(values))
    return tuple(
        math.fsum(column) if all(map(math.isfinite, column)) else sum(column) for column in zip(*counted, strict=True)
    )


def _on_host(groups: list[list[Any]]) -> list[list[list[float]]]:
    """All parts as floats, with one transfer for each device instead of one for each metric."""
    tensors = [part for parts in groups for part in parts if hasattr(part, "tolist")]
    moved: dict[int, list[float]] = {}
    if tensors:
        import torch

        for device in {part.device for part in tensors}:
            here = [part for part in tensors if part.device == device]
            flat = torch.cat([part.double() for part in here]).tolist()
            for part in here:
                moved[id(part)], flat = flat[: len(part)], flat[len(part) :]
    return [[moved[id(p)] if hasattr(p, "tolist") else [float(x) for x in p] for p in parts] for parts in groups]
