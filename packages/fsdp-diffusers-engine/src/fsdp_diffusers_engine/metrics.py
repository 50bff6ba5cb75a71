"""Many micro-batches' metrics as one row: sums that pool exactly, and the numbers that they make."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from diffusion_losses.statistics import numbers, pool_statistics


def reduce_metrics(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """One number per name, as the whole batch would give it; what counted nothing is left out.

    Values are `diffusion_losses.Statistic`, each of which says how it pools; a plain number counts as one element's.
    """
    return numbers(pool_statistics(rows))
