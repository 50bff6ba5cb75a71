"""What a step cost: seconds by phase, and forward passes by phase."""

from __future__ import annotations

import math
import time

Metrics = dict[str, float]


def forwards_per_sample(metrics: Metrics, trained_share: float) -> float:
    """Rows through the transformer for each sample that was drawn, in all phases of a step; NaN where the sampler counts none.

    Args:
        metrics: what the phases counted, per sample that they saw.
        trained_share: samples scored and trained on over samples drawn.
    """
    update = sum(metrics.get(f"forwards/{phase}", 0.0) for phase in ("log_prob", "train", "no_grad"))
    return metrics.get("forwards/rollout", math.nan) + trained_share * update


class Clock:
    """Seconds of consecutive phases."""

    def __init__(self) -> None:
        self.start = self.last = time.perf_counter()
        self.laps: Metrics = {}

    def lap(self, name: str) -> None:
        """Close the running phase under `name`; phases of one name add up."""
        now = time.perf_counter()
        self.laps[name], self.last = self.laps.get(name, 0.0) + now - self.last, now

    def total(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.start
