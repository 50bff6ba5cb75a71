"""The pieces of policy-gradient losses, as pure functions of per-step tensors ([B] or [B, W], elementwise).

Log-ratios are differences of log-probs that are MEANS over latent elements, as in every public system, hence clips
of 1e-4 and below. Comparisons are made on the log-ratio: fp32 has a spacing of 1.2e-7 above 1 but 2e-13 around 2e-6.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .config import CLIP_SPACES, MASK_BOUNDARIES, require_positive
from .elements import element_mean, per_step, require_above_zero
from .errors import LossError, check_name
from .types import Metrics

# exp(20) is already far outside any trust region; beyond it fp32 overflows and the backward pass turns 0 * inf into
# NaN.
LOG_RATIO_LIMIT = 20.0
ROUNDING = 1e-6
"""What fp32 may add to a log-ratio: log-probs are of the order of 1, where its spacing is 1.2e-7."""


def safe_exp(log_ratio: Tensor) -> Tensor:
    """exp with the argument kept within +-`LOG_RATIO_LIMIT` (the gradient is zero outside)."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def log_clip_bounds(clip_ratio: float) -> tuple[float, float]:
    """The log-ratios at which a ratio leaves 1 +- clip_ratio. A clip of 1 or more has no lower bound."""
    require_positive("clip_ratio", clip_ratio)
    low = math.log1p(-clip_ratio) if clip_ratio < 1 else -math.inf
    return low, math.log1p(clip_ratio)


def outside_clip(log_ratio: Tensor, clip_ratio: float, space: str = "log_ratio") -> tuple[Tensor, Tensor]:
    """Two bool tensors: where the ratio is below 1 - clip_ratio and where it is above 1 + clip_ratio.

    space="log_ratio" compares exactly; "ratio" compares after rounding ratio and bound to the tensor's dtype, which
    is what `torch.clamp(ratio, ...)` in public code does.
    """
    check_name("space", space, CLIP_SPACES)
    low, high = log_clip_bounds(clip_ratio)
    value = log_ratio.detach()
    if space == "log_ratio":
        return value < low, value > high
    ratio = safe_exp(value)
    bounds = torch.tensor([1.0 - clip_ratio, 1.0 + clip_ratio], dtype=ratio.dtype, device=ratio.device)
    return ratio < bounds[0], ratio > bounds[1]


def clip_shares(log_ratio: Tensor, clip_ratio: float) -> Metrics:
    """1 where the ratio is outside of 1 +- clip_ratio, above it, and below it."""
    low, high = outside_clip(log_ratio, clip_ratio)
    shares = {"actor/pg_clipfrac": low | high, "actor/pg_clipfrac_higher": high, "actor/pg_clipfrac_lower": low}
    return {name: share.float() for name, share in shares.items()}


def on_policy(log_ratio: Tensor) -> Tensor:
    """1 where the ratio is 1 but for rounding, as all are before the first update. Rounding depends on the batch's shape, so
    that a count of ratios that are 1 to the bit would differ with the number of ranks."""
    return (log_ratio.detach().abs() <= ROUNDING).float()


def clipped_surrogate(log_ratio: Tensor, advantages: Tensor, clip_ratio: float, *, space: str = "log_ratio") -> Tensor:
    """PPO's pessimistic surrogate max(-A r, -A clip(r, 1 - e, 1 + e)) with r = exp(log_ratio), elementwise.

    Used by FlowGRPO, DanceGRPO and MixGRPO. Its derivative in log_ratio is -A r, and exactly 0 where A > 0 and r > 1
    + e or A < 0 and r < 1 - e. Raises `LossError` for clip_ratio <= 0.
    """
    low, high = outside_clip(log_ratio, clip_ratio, space)
    cut = torch.where(advantages > 0, high, low) & (advantages != 0)
    one = torch.ones_like(log_ratio.detach())
    bound = torch.where(high, one * (1.0 + clip_ratio), one * max(1.0 - clip_ratio, 0.0))
    return -advantages * torch.where(cut, bound, safe_exp(log_ratio))


def trajectory_log_ratio(log_ratio: Tensor, mask: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
    """One log-ratio per trajectory, the mean over its counted steps: [B, W] -> [B].

    GSPO's sequence ratio for a chain of denoising steps (AWM calls it `sum_first`). weights multiply the steps and
    should have mean 1.
    """
    if log_ratio.ndim != 2:
        raise LossError(
            f"log_ratio has shape {tuple(log_ratio.shape)}; a trajectory ratio needs all window steps at once, as "
            "[B, W] (a window of one step is [B, 1])"
        )
    weighted = log_ratio if weights is None else log_ratio * weights
    if mask is None:
        return weighted.mean(dim=1)
    kept = torch.where(mask, weighted, torch.zeros_like(weighted))
    return kept.sum(dim=1) / mask.sum(dim=1).clamp(min=1)


def guard_log_ratio(
    means: Tensor,
    old_means: Tensor,
    std: Tensor | float,
    *,
    next_latents: Tensor | None = None,
    noise: Tensor | None = None,
    log_ratio: Tensor | None = None,
    dims: int = 1,
    mask: Tensor | None = None,
) -> Tensor:
    """GRPO-Guard's normalised log-ratio (arXiv 2510.22319, Eq. 8), [B] or [B, W].

    Eq. 8 is S (D + b) with D = logp - logp_old and b = <(mu - mu_old)^2> / (2 S^2). With Gaussian log-probs this is
    identically <z (mu - mu_old)>, z = (x_next - mu_old) / S the rollout's noise: no cancelling of two near-equal
    numbers, and right for every sampler kind, also those whose stored log-prob is not a density (Flow-CPS).

    Args:
        means, old_means: [B, D...] (or [B, W, D...] with dims=2).
        std: TOTAL std S, above zero.
        next_latents, noise: x_next or z, for the identity.
        log_ratio: D, for Eq. 8 as written where neither is given: right only for log-probs with the 1 / (2 S^2) of a Gaussian.

    Raises:
        LossError: none of the three, or a std that is not above zero.
    """
    shape = means.shape[:dims]
    counted = torch.ones(shape, dtype=torch.bool, device=means.device) if mask is None else mask
    total = require_above_zero("std", per_step("std", std, shape, means).detach(), counted)
    move = means - old_means.detach()
    if noise is not None:
        return element_mean(noise.detach() * move, dims)
    if next_latents is not None:
        return element_mean((next_latents - old_means).detach() * move, dims) / total
    if log_ratio is not None:
        return total * (log_ratio + element_mean(move.square(), dims) / (2.0 * total * total))
    raise LossError(
        "next_latents, noise and log_ratio are all None; give the rollout's next_latents or its noise (or, for "
        "Gaussian log-probs, the log-ratio)"
    )


def divergence_keep(
    divergence: Tensor, log_ratio: Tensor, advantages: Tensor, threshold: float, *, boundary: str = "at_or_above"
) -> Tensor:
    """Flow-DPPO's mask (arXiv 2606.11025), True where an element keeps its gradient.

    An element is dropped when its divergence reaches the threshold AND the update would push it further away: A > 0
    with ratio > 1, or A < 0 with ratio < 1. boundary "at_or_above" is the public codes' D >= threshold, "above" the
    paper's D > threshold.
    """
    check_name("boundary", boundary, MASK_BOUNDARIES)
    far = divergence >= threshold if boundary == "at_or_above" else divergence > threshold
    away = ((advantages > 0) & (log_ratio > 0)) | ((advantages < 0) & (log_ratio < 0))
    return ~(far & away).detach()


def noise_scale_weights(std: Tensor, mask: Tensor | None = None) -> Tensor:
    """Per-step weights proportional to the TOTAL std of each step, with mean 1 over the window: [W] or [B, W] -> same.

    Our reading of TempFlow-GRPO (arXiv 2508.04324), which weighs a step by its noise scale s sqrt(h) but published
    neither code nor the exact normalisation. Compute it over the whole window and pass it as `data["step_weights"]`:
    one step alone has no window.
    """
    if std.ndim not in (1, 2) or std.numel() == 0:
        raise LossError(f"std has shape {tuple(std.shape)}; give the total std of every window step, [W] or [B, W]")
    counted = torch.ones_like(std, dtype=torch.bool) if mask is None else mask
    kept = torch.where(counted, std.detach(), torch.zeros_like(std))
    total = kept.sum(dim=-1, keepdim=True)
    if not torch.isfinite(kept).all() or (kept < 0).any() or ((total == 0) & counted.any(dim=-1, keepdim=True)).any():
        raise LossError(f"std={std!r} must be finite, not negative, and above zero somewhere in every window")
    return kept * counted.sum(dim=-1, keepdim=True) / total.clamp(min=torch.finfo(kept.dtype).tiny)
