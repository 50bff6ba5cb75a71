"""Group-relative advantages.

A = (r - mean) / (std + eps). The mean is that of the sample's group (its prompt's samples); public systems disagree
on everything else, so everything else is an argument:

    system                       std      ddof   eps
    flow_grpo, DiffusionNFT      batch    0      1e-4 added      (or group)
    verl-omni                    batch    1      1e-4 added      (or group)
    DanceGRPO, MixGRPO           group    1      1e-8 added      (or the whole batch: mean="batch", std="batch")
    Flow-Factory                 batch    0      1e-6 floor      (or group)

Statistics are computed in float64 over the finite rewards of a group. A sample carries no signal, gets A = 0, mask
False, and is counted in the metrics, when its reward is NaN or infinite, when it is alone in its group, or when all
rewards of its group are equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import LossError, check_name
from .groups import GroupIds, metric, read_groups, read_rewards, result_dtype
from .types import AdvantageOutput, Metrics

SCOPES = ("group", "batch", "none")
EPS_KINDS = ("add", "floor")


def group_advantages(
    rewards: Tensor | Sequence[float],
    groups: GroupIds,
    *,
    std: str = "group",
    mean: str = "group",
    ddof: int = 1,
    eps: float = 1e-4,
    eps_kind: str = "add",
    clip: float | None = None,
) -> AdvantageOutput:
    """Advantages of `rewards` [B] relative to their `groups`.

    Args:
        groups: one id per sample, in any order.
        std: "group" (default: the definition in the FlowGRPO paper, arXiv 2505.05470, also DanceGRPO's and MixGRPO's;
            every prompt gets the same weight), "batch" (one std for all; flow_grpo, verl-omni and Flow-Factory ship
            this; prompts with a wide spread weigh more), or "none" (no division).
        mean: "group", "batch" (DanceGRPO without groups) or "none" (the raw reward).
        ddof: 1 divides by n - 1 (default: groups are small samples), 0 by n.
        eps: added to the std, or with `eps_kind="floor"` the least value it may have.
        clip: clamp to +-clip; the losses clamp on their own, so the default is not to.

    Returns:
        Advantages and mask [B]; float64 for float64 rewards and else float32.

    Raises:
        LossError: a wrong shape, missing ids, clip <= 0, eps < 0 or an unknown name.
    """
    for name, value in (("std", std), ("mean", mean)):
        check_name(name, value, SCOPES)
    if ddof not in (0, 1):
        raise LossError(f"ddof={ddof!r} must be 0 (divide by n) or 1 (divide by n - 1)")
    if not eps >= 0:
        raise LossError(f"eps={eps!r} must not be negative; it keeps the division by the std finite")
    check_name("eps_kind", eps_kind, EPS_KINDS)
    values = read_rewards("rewards", rewards)
    rows, finite = read_groups(groups, values.numel()), torch.isfinite(values)
    whole = moments(values[finite], ddof)
    relative = mean == "group" or std == "group"
    advantages, mask = torch.zeros_like(values), torch.zeros_like(finite)
    counts = {"groups": len(rows), "nonfinite": int((~finite).sum()), "singleton_groups": 0, "equal_groups": 0}
    for members in rows.values():
        index = torch.tensor(members, device=values.device)
        index = index[finite[index]]
        own = moments(values[index], ddof)
        counts["singleton_groups"] += own.count == 1
        counts["equal_groups"] += own.count > 1 and own.flat
        if own.count == 0 or (relative and own.flat) or (whole.flat and mean == "batch"):
            continue
        centre = {"group": own.mean, "batch": whole.mean, "none": 0.0}[mean]
        scale = {"group": own.std, "batch": whole.std, "none": 1.0}[std]
        divisor = 1.0 if std == "none" else scale_of(scale, eps, eps_kind)
        advantages[index] = (values[index] - centre) / divisor
        mask[index] = True
    return finish(advantages, mask, counts, clip=clip, dtype=result_dtype(rewards))


@dataclass(frozen=True)
class Moments:
    """Mean, std, number of values, and whether they are all equal (or fewer than two)."""

    mean: float
    std: float
    count: int
    flat: bool


def moments(values: Tensor, ddof: int) -> Moments:
    """Statistics of finite float64 `values` [n]; the std of fewer than two values is 0."""
    if values.numel() == 0:
        return Moments(0.0, 0.0, 0, True)
    flat = bool(values.max() == values.min())
    spread = float(values.std(correction=ddof)) if values.numel() > max(ddof, 1) else 0.0
    return Moments(float(values.mean()), spread, values.numel(), flat)


def scale_of(std: float, eps: float, eps_kind: str) -> float:
    """What a centred reward is divided by; 1 when that would be zero (the caller masks such samples)."""
    scale = std + eps if eps_kind == "add" else max(std, eps)
    return scale if scale > 0 else 1.0


def finish(
    advantages: Tensor, mask: Tensor, counts: Mapping[str, float], *, clip: float | None, dtype: torch.dtype
) -> AdvantageOutput:
    """Clip, cast and report."""
    if clip is not None and not clip > 0:
        raise LossError(f"clip={clip!r} must be above zero, or None for no clipping")
    clipped = advantages if clip is None else advantages.clamp(-clip, clip)
    kept = clipped[mask]
    metrics: Metrics = {f"advantages/{name}": metric(value) for name, value in counts.items()}
    metrics["advantages/masked"] = metric(float((~mask).sum()))
    metrics["advantages/mean"] = metric(float(kept.mean()) if kept.numel() else 0.0)
    metrics["advantages/std"] = metric(float(kept.std(correction=0)) if kept.numel() else 0.0)
    metrics["advantages/abs_max"] = metric(float(kept.abs().max()) if kept.numel() else 0.0)
    return AdvantageOutput(clipped.to(dtype), mask, metrics)
