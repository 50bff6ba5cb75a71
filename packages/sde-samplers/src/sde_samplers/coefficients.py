"""Every step is linear: `mean = scale_x * x + scale_v * v`, `x_u = mean + std * z`. A kind is the formula of the three numbers.

Notation: one reverse step t -> u with u < t, h = t - u; v is the velocity (target e - x0); x̂0 = x - t v,
ê = x + (1-t) v; s is the instantaneous std of an SDE, S = s √h (or as given) the TOTAL std of a step, η the noise
level.

    ode        x - h v
    flow_sde   s² = η² t / (1 - t̄), t̄ = t but sigma_cap where t is 1 or a training step below. Flow-GRPO, arXiv 2505.05470, Eq. 29
    dance_sde  s = η. DanceGRPO, arXiv 2505.07818
    wan_sde    s = sigma_cap * t, no η. flow_grpo's Wan pipeline, for a schedule that ends at 0
               all three: mean = x - h [v + s²/(2t) (x + (1-t) v)], which keeps the marginals of the ODE
    flow_cps   S = u sin(ηπ/2), mean = (1-u) x̂0 + √(u²-S²) ê. arXiv 2509.05952
    ddim       S = η u √(1 - u²(1-t)² / (t²(1-u)²)), mean as in flow_cps. DiffusionNFT, arXiv 2509.16117, Eq. 16

Coefficients are float64 until they meet the latents, and come from the same formulas whether a batch shares a number or
every sample has its own, so both give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .errors import SamplerError
from .kinds import Kind, check_noise_level, find_kind

NEAR_ONE = 0.9989
"""From here on sigma counts as 1 in the std of Flow-SDE. Multistep schedulers begin at 0.999 shifted instead of at 1 (diffusers'
DPM-Solver++ with flow_shift 3: 0.9997); their first step would have ten times the std of the same step from 1."""

Scalar = float | Tensor
"""One number for the batch, or a float64 tensor [B]."""


class StepCoefficients(NamedTuple):
    """`mean = scale_x * x + scale_v * v`, total std `std`; each a float or a float64 tensor [B]."""

    scale_x: Scalar
    scale_v: Scalar
    std: Scalar


def step_coefficients(
    kind: Kind,
    sigma: float | Tensor,
    sigma_next: float | Tensor,
    noise_level: float,
    sigma_cap: float | Tensor | None = None,
    *,
    batch: int | None = None,
) -> StepCoefficients:
    """The coefficients of one step.

    Args:
        kind: see the top of this file.
        sigma, sigma_next: a number, or a tensor with one value per sample [B].
        noise_level: η >= 0; inside [0, 1] for flow_cps and ddim; unused by ode and wan_sde.
        sigma_cap: the schedule's second entry. Flow-SDE uses it only where sigma is 1 (to a training step), and takes sigma_next
            when it is None (at the first step they are the same); wan_sde needs it at every step.
        batch: B, checked against the tensors when given.

    Raises:
        SamplerError: unknown kind, noise level out of range, sigmas outside 0 <= sigma_next < sigma <= 1 (values on an
            accelerator are not read back and so not checked), wan_sde without sigma_cap.
    """
    found = find_kind(kind)
    if found.needs_cap and sigma_cap is None:
        raise SamplerError(
            f"kind={kind!r} scales its std by the schedule's second entry at every step, but sigma_cap=None; "
            "pass sigma_cap=schedule.sigma_cap"
        )
    eta = check_noise_level(kind, noise_level)
    formula = ode if found.has_noise_level and eta == 0.0 else found.load()
    t = as_scalar(sigma, "sigma", batch)
    u = as_scalar(sigma_next, "sigma_next", batch)
    cap = u if sigma_cap is None else as_scalar(sigma_cap, "sigma_cap", batch)
    tensors = [value for value in (t, u, cap) if isinstance(value, Tensor)]
    away = next((value.device for value in tensors if value.device.type != "cpu"), None)
    if not tensors:
        return _checked(formula, t, u, eta, cap)
    if away is not None:  # nothing waits for the device, so the values are not checked
        return StepCoefficients(*formula(_to(t, away), _to(u, away), eta, _to(cap, away)))
    # A handful of numbers on the CPU: plain floats are much faster than a chain of tiny tensor operations.
    rows = tensors[0].numel()
    if any(value.numel() != rows for value in tensors):
        raise SamplerError(
            f"sigma, sigma_next and sigma_cap have {[v.numel() for v in tensors]} values; pass one batch"
        )
    columns = [v.tolist() if isinstance(v, Tensor) else [v] * rows for v in (t, u, cap)]
    numbers = list(zip(*columns, strict=True))
    done = {row: _checked(formula, row[0], row[1], eta, row[2]) for row in dict.fromkeys(numbers)}
    table = zip(*(done[row] for row in numbers), strict=True)
    return StepCoefficients(*(torch.tensor(column, dtype=torch.float64) for column in table))


def ode(t: Scalar, u: Scalar, eta: float, cap: Scalar) -> StepCoefficients:
    return StepCoefficients(1.0, u - t, 0.0)


def flow_sde(t: Scalar, u: Scalar, eta: float, cap: Scalar) -> StepCoefficients:
    gap = _gap_to_one(t, cap)
    return _marginal_keeping(t, t - u, half_rate=eta * eta / (2 * gap), variance=eta * eta * t / gap)


def dance_sde(t: Scalar, u: Scalar, eta: float, cap: Scalar) -> StepCoefficients:
    return _marginal_keeping(t, t - u, half_rate=eta * eta / (2 * t), variance=eta * eta)


def wan_sde(t: Scalar, u: Scalar, eta: float, cap: Scalar) -> StepCoefficients:
    _check_cap(cap)
    return _marginal_keeping(t, t - u, half_rate=cap * cap * t / 2, variance=cap * cap * t * t)


def flow_cps(t: Scalar, u: Scalar, eta: float, cap: Scalar) -> StepCoefficients:
    keep = u * (0.0 if eta == 1.0 else math.cos(eta * math.pi / 2))  # √(u² - S²) without the cancellation
    return _read_outs(t, u, keep, std=u * math.sin(eta * math.pi / 2))


def ddim(t: Scalar, u: Scalar, eta: float, cap: Scalar) -> StepCoefficients:
    ratio = u * (1 - t) / (t * (1 - u))
    std = eta * u * _sqrt(1 - ratio * ratio)
    return _read_outs(t, u, _sqrt(u * u - std * std), std)


def as_scalar(value: float | Tensor, name: str, batch: int | None = None) -> Scalar:
    """A float for a number (or a one-element CPU tensor), a float64 tensor [B] for one value per sample.

    A tensor may carry trailing ones ([B, 1, 1]). A one-element tensor on an accelerator stays a tensor [1], so that
    nothing waits for the device.
    """
    if isinstance(value, Tensor):
        if value.numel() == 1 and value.device.type == "cpu":
            return float(value)
        if value.numel() != 1 and batch is not None and value.numel() != batch:
            raise SamplerError(
                f"{name} has shape {list(value.shape)} for a batch of {batch}; pass a number or one per sample [B]"
            )
        if value.ndim > 1 and value.shape[0] != value.numel():
            raise SamplerError(f"{name} has shape {list(value.shape)}; pass a number or one value per sample [B]")
        return value.detach().reshape(-1).to(torch.float64)
    try:
        return float(value)
    except (TypeError, ValueError):
        raise SamplerError(f"{name}={value!r} must be a number or a tensor with one value per sample [B]") from None


def for_each_sample(std: Scalar, sample: Tensor) -> Tensor:
    """[B] fp32 on the device of `sample` [B, ...]."""
    if isinstance(std, Tensor):
        return std.to(device=sample.device, dtype=torch.float32).expand(sample.shape[0])
    return torch.full((sample.shape[0],), std, dtype=torch.float32, device=sample.device)


def times(factor: Scalar, latents: Tensor) -> Tensor:
    """In fp32; `factor` is one number, or one per sample [B] that holds for all of its elements."""
    if isinstance(factor, Tensor):
        factor = factor.to(device=latents.device, dtype=torch.float32).reshape(-1, *([1] * (latents.ndim - 1)))
    elif factor == 1.0:
        return latents.to(torch.float32)
    return latents.to(torch.float32) * factor


def _marginal_keeping(t: Scalar, h: Scalar, half_rate: Scalar, variance: Scalar) -> StepCoefficients:
    """`half_rate` is s²/(2t): it multiplies (x + (1-t) v), which is -t times the score."""
    return StepCoefficients(1 - h * half_rate, -h * (1 + half_rate * (1 - t)), _sqrt(variance * h))


def _read_outs(t: Scalar, u: Scalar, keep: Scalar, std: Scalar) -> StepCoefficients:
    """mean = (1-u) x̂0 + keep ê, in terms of x and v."""
    return StepCoefficients((1 - u) + keep, (1 - t) * keep - t * (1 - u), std)


def _gap_to_one(t: Scalar, cap: Scalar) -> Scalar:
    """1 - t, and 1 - cap where t is 1, or so near that 1 - t says nothing but where a scheduler's table ends."""
    if not isinstance(t, Tensor):
        if t < NEAR_ONE:
            return 1 - t
        _check_cap(cap)
        return 1 - min(t, cap)
    capped = torch.minimum(t, torch.as_tensor(cap, dtype=t.dtype, device=t.device))
    return 1 - torch.where(t >= NEAR_ONE, capped, t)


def _sqrt(value: Scalar) -> Scalar:
    # Arguments are squares or differences that are >= 0 up to rounding.
    return torch.sqrt(torch.clamp(value, min=0)) if isinstance(value, Tensor) else math.sqrt(max(value, 0.0))


def _checked(formula: Callable[..., Any], t: Scalar, u: Scalar, eta: float, cap: Scalar) -> StepCoefficients:
    if not 0.0 <= u < t <= 1.0:
        raise SamplerError(
            f"a step needs 0 <= sigma_next < sigma <= 1, got sigma={t!r} and sigma_next={u!r}; "
            "sigmas are noise levels (timestep / 1000) and decrease"
        )
    return StepCoefficients(*formula(t, u, eta, cap))


def _check_cap(cap: Scalar) -> None:
    """On an accelerator it is not read back, and so not checked."""
    if not isinstance(cap, Tensor) and not 0.0 <= cap < 1.0:
        raise SamplerError(
            f"sigma_cap={cap!r} stands in for sigma = 1 in the std and must lie in [0, 1); pass schedule.sigma_cap"
        )


def _to(value: Scalar, device: torch.device) -> Scalar:
    return value.to(device) if isinstance(value, Tensor) else value
