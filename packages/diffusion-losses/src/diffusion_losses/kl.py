"""KL terms between two policies, on transition means or on velocities, by name.

Both transitions of a step are Gaussians with the same total std S, so their KL is ||mu - mu_ref||^2 / (2 S^2) in
closed form (FlowGRPO, arXiv 2505.05470). Public systems scale that differently; D is the number of latent elements,
<.> the mean over them, h = sigma - sigma_next, s = S / sqrt(h) the instantaneous std, t = sigma:

    "std"             <(mu - mu_ref)^2> / (2 S^2)       nats per element; flow_grpo's Wan script
    "paper"           ||mu - mu_ref||^2 / (2 S^2)       nats of the whole transition, D times "std"
    "flow_grpo"       <(mu - mu_ref)^2> / (2 s^2)       flow_grpo and verl-omni; h times "std"
    "unscaled"        <(mu - mu_ref)^2>                 Flow-Factory x-based, FlowCPS for SD3 and FLUX
    "velocity"        <(v - v_ref)^2>                   Flow-Factory v-based, DiffusionNFT, AWM
    "velocity_paper"  (h / 2) (s (1 - t) / (2 t) + 1 / s)^2 ||v - v_ref||^2     "paper" for Flow-SDE and Dance-SDE only
    "velocity_std"    the same with <.>                                          "std" for Flow-SDE and Dance-SDE only

The gradient flows through the first argument; the reference is detached.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .config import MEAN_KL_KINDS, VELOCITY_KL_KINDS
from .elements import element_mean, per_step, require_above_zero, upcast
from .errors import LossError, check_name


def mean_kl(
    mean: Tensor,
    ref_mean: Tensor,
    *,
    kind: str = "std",
    std: Tensor | float | None = None,
    step: Tensor | float | None = None,
    dims: int = 1,
    mask: Tensor | None = None,
) -> Tensor:
    """KL between transitions with means `mean` and `ref_mean` ([B, D...], or [B, W, D...] with `dims=2`).

    Args:
        std: TOTAL std S of the transition, [B] (or [B, W], or with trailing ones); read by every kind but "unscaled".
        step: h = sigma - sigma_next > 0, same shapes; read by "flow_grpo" only.
        mask: elements that count; only those must have a std above zero.

    Returns the step shape, [B] or [B, W]. Raises `LossError` for a shape mismatch, a std that is zero, a missing
    argument or an unknown kind.
    """
    check_name("kind", kind, MEAN_KL_KINDS)
    squares, shape, counted = _squares("ref_mean", mean, ref_mean, dims, mask)
    error = element_mean(squares, dims)
    if kind == "unscaled":
        return error
    total = require_above_zero("std", _given("std", std, kind, shape, error), counted)
    kl = error / (2.0 * total * total)
    if kind == "paper":
        return kl * _elements(squares, dims)
    if kind == "flow_grpo":
        return kl * _given("step", step, kind, shape, error)
    return kl


def velocity_kl(
    velocity: Tensor,
    ref_velocity: Tensor,
    *,
    kind: str = "velocity",
    std: Tensor | float | None = None,
    sigma: Tensor | float | None = None,
    sigma_next: Tensor | float | None = None,
    dims: int = 1,
    mask: Tensor | None = None,
) -> Tensor:
    """Distance between two velocities of shape [B, D...] (or [B, W, D...] with `dims=2`), as the module docstring
    lists it.

    std is the TOTAL std of the transition sigma -> sigma_next; "velocity" reads none of the three. Half-precision
    velocities are compared in float32. Returns the step shape; raises `LossError` as `mean_kl` does.
    """
    check_name("kind", kind, VELOCITY_KL_KINDS)
    squares, shape, counted = _squares("ref_velocity", velocity, ref_velocity, dims, mask)
    error = element_mean(squares, dims)
    if kind == "velocity":
        return error
    t = _given("sigma", sigma, kind, shape, error)
    h = t - _given("sigma_next", sigma_next, kind, shape, error)
    h = require_above_zero("sigma - sigma_next", h, counted, "noise levels must decrease along a trajectory")
    total = require_above_zero("std", _given("std", std, kind, shape, error), counted)
    s = total / h.sqrt()
    factor = 0.5 * h * (s * (1.0 - t) / (2.0 * t) + 1.0 / s) ** 2
    return error * factor * (_elements(squares, dims) if kind == "velocity_paper" else 1.0)


def old_policy_kl(log_ratio: Tensor) -> Tensor:
    """MixGRPO's KL against the behaviour policy: half the squared log-ratio, elementwise."""
    return 0.5 * log_ratio * log_ratio


def _squares(
    name: str, first: Tensor, second: Tensor, dims: int, mask: Tensor | None
) -> tuple[Tensor, torch.Size, Tensor]:
    if first.shape != second.shape or first.ndim < dims:
        raise LossError(
            f"{name} has shape {tuple(second.shape)} but the policy's is {tuple(first.shape)}; they must be equal"
        )
    shape = first.shape[:dims]
    counted = torch.ones(shape, dtype=torch.bool, device=first.device) if mask is None else mask
    return (upcast(first) - upcast(second).detach()).square(), shape, counted


def _elements(squares: Tensor, dims: int) -> int:
    return squares.shape[dims:].numel()


def _given(name: str, value: Tensor | float | None, kind: str, shape: torch.Size, like: Tensor) -> Tensor:
    if value is None:
        raise LossError(f"{name}=None, but kind={kind!r} needs it; give it per sample, or choose a kind that does not")
    return per_step(name, value, shape, like).detach()
