"""What the live line shows of a step: reward with its error, the longest phases, memory, faults."""

from __future__ import annotations

import math
from collections.abc import Mapping

from run_report.faults import FAULTS

_MEASURED = {
    "reward": ("reward/mean", "reward/stderr"),
    "val": ("val/reward_mean", "val/reward_stderr"),
    "val strict": ("val/strict_mean", "val/strict_stderr"),
}


class Progress:
    """Remembers what is counted over steps."""

    def __init__(self) -> None:
        self.faults = 0

    def shown(self, metrics: Mapping[str, float]) -> dict[str, float | str]:
        """Names and values for the line, from a row of metrics."""
        found: dict[str, float | str] = {}
        for name, (key, error_key) in _MEASURED.items():
            mean, error = metrics.get(key), metrics.get(error_key, math.nan)
            if mean is not None:
                found[name] = f"{mean:.3f}" + (f" ± {error:.3f}" if math.isfinite(error) else "")
        if "actor/kl_loss" in metrics:
            found["kl"] = metrics["actor/kl_loss"]
        phases = {key.removeprefix("time/"): metrics[key] for key in ("time/rollout", "time/update") if key in metrics}
        found |= {name: f"{seconds:.1f} s" for name, seconds in phases.items()}
        if "perf/max_memory_gb" in metrics:
            found["memory"] = f"{metrics['perf/max_memory_gb']:.1f} GB"
        self.faults += int(sum(metrics.get(key, 0.0) for key in FAULTS))
        return found | ({"faults": str(self.faults)} if self.faults else {})
