"""When the sampler's policy is not quite the trainer's: importance weights, rejection, and what the gap looks like.

The sampler may run other kernels, other precision or older weights. With pi_rollout the policy that drew the samples
and pi_old the trainer's at the start of the update, two ways are in use:

    decoupled   PPO clips around pi_old; each element is weighted by min(pi_old / pi_rollout, cap)   (three policies)
    bypass      PPO clips around pi_rollout itself; no weights, and pi_old is never evaluated        (two policies)

Log-probs here are means over latent elements, so every ratio is the true density ratio to the power 1 / D; caps and
bounds are on that scale.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .config import require_positive
from .elements import per_step, refuse_non_finite, require_full_precision, step_shape
from .errors import LossError, check_name
from .groups import metric
from .surrogates import safe_exp
from .types import CorrectionOutput, Metrics

MODES = ("decoupled", "bypass")
LEVELS = ("step", "trajectory", "trajectory_mean")


def rollout_correction(
    old_log_probs: Tensor | None,
    rollout_log_probs: Tensor,
    *,
    mode: str = "decoupled",
    level: str = "step",
    cap: float = 2.0,
    reject: Sequence[float] | None = None,
    mask: Tensor | None = None,
) -> CorrectionOutput:
    """Weights, mask and diagnostics for a batch; call it once, before the batch is cut into micro-batches.

    Args:
        old_log_probs: the trainer's, [B] or [B, W]; may be None in bypass mode, which then has no diagnostics.
        rollout_log_probs: the sampler's, same shape.
        mode: see the module docstring. "decoupled" is the default because it keeps the trust region where the trainer
            measures it.
        level: what one ratio is about: "step" exp(d_k), "trajectory" exp(sum_k d_k) (the product over the window),
            "trajectory_mean" exp(mean_k d_k) (geometric), with d = old - rollout.
        cap: weights are truncated at this value (decoupled only).
        reject: (low, high): elements, or whole trajectories, whose ratio is outside are masked out.
        mask: bool, elements that count at all.

    Metrics: correction/kl (mean of rollout - old), k3 (mean of e^d - 1 - d, never negative), chi2 (mean of e^2d,
    minus 1), abs_delta_mean, abs_delta_max, abs_delta_step_<k> for every window step, weight_mean|min|max (of what is
    kept; absent where nothing is), truncated and rejected (shares), effective_sample_share. Raises `LossError` for
    mismatching shapes, non-finite counted log-probs, cap <= 0, an empty interval or an unknown name.
    """
    check_name("mode", mode, MODES)
    check_name("level", level, LEVELS)
    require_positive("cap", cap)
    rollout = require_full_precision("rollout_log_probs", rollout_log_probs).detach()
    shape = step_shape("rollout_log_probs", rollout)
    counted = torch.ones(shape, dtype=torch.bool, device=rollout.device)
    if mask is not None:
        counted = per_step("mask", mask, shape, rollout).bool()
    if old_log_probs is None:
        if mode != "bypass" or reject is not None:
            raise LossError(
                f"old_log_probs=None, but mode={mode!r} with reject={reject!r} compares with it; compute it"
            )
        refuse_non_finite(counted, rollout_log_probs=rollout)
        return CorrectionOutput(rollout, torch.ones_like(rollout), counted, {})
    old = require_full_precision("old_log_probs", old_log_probs).detach()
    if old.shape != shape:
        raise LossError(
            f"old_log_probs has shape {tuple(old.shape)}, rollout_log_probs {tuple(shape)}; they must be equal"
        )
    refuse_non_finite(counted, old_log_probs=old, rollout_log_probs=rollout)
    delta = torch.where(counted, old - rollout, torch.zeros_like(old))
    ratio = safe_exp(_pooled(delta, counted, level))
    kept, weights = counted, torch.ones_like(ratio)
    if reject is not None:
        low, high = _interval(reject)
        kept = counted & (ratio >= low) & (ratio <= high)
    if mode == "decoupled":
        weights = ratio.clamp(max=cap)
    metrics = _diagnostics(delta, counted)
    metrics |= _weight_metrics(weights, ratio, kept, counted, cap if mode == "decoupled" else None)
    return CorrectionOutput(rollout if mode == "bypass" else old, weights, kept, metrics)


def _pooled(delta: Tensor, counted: Tensor, level: str) -> Tensor:
    if level == "step" or delta.ndim == 1:
        return delta
    total = delta.sum(dim=1, keepdim=True)
    if level == "trajectory_mean":
        total = total / counted.sum(dim=1, keepdim=True).clamp(min=1)
    return total.expand(delta.shape)


def _interval(reject: Sequence[float]) -> tuple[float, float]:
    if len(reject) != 2 or not 0 <= reject[0] < reject[1]:
        raise LossError(f"reject={reject!r} must be (low, high) with 0 <= low < high: the ratios that are kept")
    return float(reject[0]), float(reject[1])


def _diagnostics(delta: Tensor, counted: Tensor) -> Metrics:
    d = delta.double()
    count = counted.sum().clamp(min=1)

    def average(value: Tensor) -> Tensor:
        return (torch.where(counted, value, torch.zeros_like(value)).sum() / count).float()

    metrics = {
        "correction/kl": average(-d),
        "correction/k3": average(torch.expm1(d) - d),
        "correction/chi2": average(torch.expm1(2.0 * d)),
        "correction/abs_delta_mean": average(d.abs()),
        "correction/abs_delta_max": d.abs().max().float(),
    }
    per_window_step = d.abs().reshape(d.shape[0], -1)
    flags = counted.reshape(d.shape[0], -1)
    for k in range(per_window_step.shape[1]):
        metrics[f"correction/abs_delta_step_{k}"] = (
            per_window_step[:, k].sum() / flags[:, k].sum().clamp(min=1)
        ).float()
    return metrics


def _weight_metrics(weights: Tensor, ratio: Tensor, kept: Tensor, counted: Tensor, cap: float | None) -> Metrics:
    used, count = weights[kept].double(), counted.sum().clamp(min=1)
    truncated = ((ratio > cap) & counted).sum() / count if cap is not None else metric(0.0)
    metrics = {
        "correction/truncated": truncated.float(),
        "correction/rejected": ((counted & ~kept).sum() / count).float(),
    }
    if used.numel() == 0:  # no weight to speak of
        return metrics | {"correction/effective_sample_share": metric(0.0)}
    metrics["correction/weight_mean"] = used.mean().float()
    metrics["correction/weight_min"], metrics["correction/weight_max"] = used.min().float(), used.max().float()
    metrics["correction/effective_sample_share"] = (used.sum() ** 2 / (used.square().sum() * count)).float()
    return metrics
