"""What the functions of this package hand back."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from .statistics import Statistic

Metrics = dict[str, Tensor]


@dataclass(frozen=True)
class LossOutput:
    """`loss` is a 0-dim tensor with gradient; `metrics` are detached fp32 0-dim tensors that describe this call.

    `statistics` are the same metrics in the form that pools over calls and ranks: see `statistics`.
    """

    loss: Tensor
    metrics: Metrics
    statistics: dict[str, Statistic] = field(default_factory=dict)


@dataclass(frozen=True)
class AdvantageOutput:
    """`advantages` [B] (or [B, T]), finite everywhere; `mask` of the same shape is True where a sample carries
    signal.
    """

    advantages: Tensor
    mask: Tensor
    metrics: Metrics


@dataclass(frozen=True)
class PairOutput:
    """Row numbers of the better and the worse sample of each pair: two [M] long tensors."""

    winner: Tensor
    loser: Tensor
    metrics: Metrics

    def interleaved(self) -> Tensor:
        """[2M] row numbers w0, l0, w1, l1, ...: indexing a batch with it gives the "interleaved" pair layout."""
        import torch

        return torch.stack([self.winner, self.loser], dim=1).flatten()


@dataclass(frozen=True)
class CorrectionOutput:
    """What a loss needs to know about the gap between the sampler's policy and the trainer's.

    `old_log_probs` go to `data["old_log_probs"]`, `weights` to `data["rollout_weights"]`, `mask` to `data["mask"]`;
    all have the shape of the log-probs, [B] or [B, W].
    """

    old_log_probs: Tensor
    weights: Tensor
    mask: Tensor
    metrics: Metrics


@dataclass
class ElementLoss:
    """A loss before it is averaged: one value per (sample, step), or per pair.

    Args:
        objective: [B] or [B, W], with gradient.
        mask: same shape, bool, which elements count.
        means: detached per-element values reported as their mean over counted elements, by metric name.
        ratio: detached per-element policy ratio, reported as mean, std, min and max.
        distance: detached per-element distance from the policy that sampled, in the units of the config field that
            `LossSpec.limit` names; reported as its maximum.
    """

    objective: Tensor
    mask: Tensor
    means: Metrics = field(default_factory=dict)
    ratio: Tensor | None = None
    distance: Tensor | None = None
