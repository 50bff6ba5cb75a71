"""The optimizer steps of one training step: the order of its samples, its loss, and how its metrics are combined."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean
from typing import Any

import torch
from diffusion_losses.config import DiffusionLossConfig
from fsdp_diffusers_engine.losses import DiffusionLoss


def mini_batches(
    rows: int, size: int, *, epochs: int, shuffle: bool, seed: int, unit: int = 1
) -> Iterator[torch.Tensor]:
    """Row numbers of each mini-batch, epoch after epoch; the order depends on `seed` alone.

    `unit` consecutive rows stay together (a preference pair is two), so `size` must be a multiple of it.
    """
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        units = torch.randperm(rows // unit, generator=generator) if shuffle else torch.arange(rows // unit)
        order = (units[:, None] * unit + torch.arange(unit)).flatten()
        yield from order.split(size)


class UpdateLoss(DiffusionLoss):
    """The configured loss; when `fresh`, it also measures how far rollout and trainer are apart.

    While the weights are those that sampled, every difference of log-probs is noise of the two code paths, not policy.
    """

    def __init__(self, config: DiffusionLossConfig, *, fresh: bool):
        super().__init__(config)
        self.fresh = fresh

    def __call__(self, model_output: Any, data: Any, dp_group: Any = None) -> Any:
        """The loss of one micro-batch."""
        result = super().__call__(model_output, data, dp_group)
        if self.fresh and "rollout_log_probs" in data:
            gap = (model_output["log_probs"].detach() - data["rollout_log_probs"]).abs().max()
            result.metrics["actor/rollout_log_prob_diff_max"] = gap
        return result


class MetricLog:
    """Combines the metrics of many micro-batches: extremes stay extremes, everything else is averaged."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = {}

    def add(self, metrics: Any) -> None:
        """Numbers or 0-dim tensors by name."""
        for name, value in metrics.items():
            self.values.setdefault(name, []).append(float(value))

    def result(self) -> dict[str, float]:
        """One number per name."""
        combine = {"min": min, "max": max}
        return {name: combine.get(name.rsplit("_", 1)[-1], fmean)(values) for name, values in self.values.items()}
