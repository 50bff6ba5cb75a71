"""DPM-Solver++ for flow matching, orders 1 to 3 (multistep).

Source: DPM-Solver++ (arXiv 2211.01095) with alpha = 1 - t, sigma = t, lambda = ln((1-t)/t), as MixGRPO and DiffusionNFT
use it. One step t -> u, with H = lambda_u - lambda_t > 0, E = e^-H, data read-outs x̂0 = x - t v:

    x_u = (u/t) x + (1-u)(1-E) D0 + …       order 1 is the Euler step

The dots are the usual corrections from the x̂0 of one or two earlier steps. Order 1 is used where there is no history
and at u = 0, where H is infinite and the result is x̂0 itself. A step that starts at t = 1 has lambda = -∞, so it adds
nothing to the correction of the next one: the first step that is really of order 2 is the third. The second difference is
weighed as every public copy does it, which makes "order 3" converge with order 2.

Coefficients are float64; latents are fp32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .coefficients import as_scalar
from .errors import SamplerError
from .steps import check_tensors
from .types import SdeStep

SolverType = Literal["midpoint", "heun"]


class PastOutput(NamedTuple):
    """A data read-out of an earlier step: its sigma and x̂0 [B, ...] fp32."""

    sigma: float
    x0: Tensor


class DpmCoefficients(NamedTuple):
    """`x_u = scale_x * x + Σ scale_x0[i] * x̂0 of i steps ago`."""

    scale_x: float
    scale_x0: tuple[float, ...]


def dpm_step(
    sample: Tensor,
    velocity: Tensor,
    sigma: float | Tensor,
    sigma_next: float | Tensor,
    history: Sequence[PastOutput] = (),
    *,
    order: int = 2,
    solver_type: SolverType = "midpoint",
) -> SdeStep:
    """One multistep DPM-Solver++ step.

    Args:
        sample, velocity: [B, ...], any floating dtype; gradient through both.
        sigma, sigma_next: numbers shared by the batch.
        history: read-outs of earlier steps (`read_out`), newest first; () starts anew.
        order: 1, 2 or 3; no more than one above the length of the history is used. See `effective_order` for the
            orders of a whole schedule.
        solver_type: form of the second-order correction.

    Raises:
        SamplerError: an order outside 1 … 3, sigmas that do not decrease, per-sample sigmas, history out of order.
    """
    check_tensors(sample, velocity)
    t, u = as_scalar(sigma, "sigma"), as_scalar(sigma_next, "sigma_next")
    if isinstance(t, Tensor) or isinstance(u, Tensor):
        raise SamplerError("a multistep solver needs one sigma for the batch; pass numbers, not a tensor per sample")
    past = [entry.sigma for entry in history]
    coefficients = dpm_coefficients(t, u, past, order=order, solver_type=solver_type)
    mean = coefficients.scale_x * sample.to(torch.float32)
    outputs = (read_out(sample, velocity, t), *history)
    for scale, output in zip(coefficients.scale_x0, outputs, strict=False):
        mean = mean + scale * output.x0
    return SdeStep(mean.detach(), mean, torch.zeros(sample.shape[0], device=sample.device), None)


def read_out(sample: Tensor, velocity: Tensor, sigma: float) -> PastOutput:
    """x̂0 = x - t v, in fp32: what the next steps' `history` holds of this one."""
    return PastOutput(sigma, sample.to(torch.float32) - sigma * velocity.to(torch.float32))


def dpm_coefficients(
    sigma: float,
    sigma_next: float,
    past_sigmas: Sequence[float] = (),
    *,
    order: int = 2,
    solver_type: SolverType = "midpoint",
) -> DpmCoefficients:
    """float64 coefficients of one step; `past_sigmas` newest first, each larger than the next."""
    t, u = float(sigma), float(sigma_next)
    if order not in (1, 2, 3):
        raise SamplerError(f"order={order!r} must be 1, 2 or 3")
    if solver_type not in ("midpoint", "heun"):
        raise SamplerError(f"solver_type={solver_type!r} is unknown; choose 'midpoint' or 'heun'")
    if not 0.0 <= u < t <= 1.0:
        raise SamplerError(f"a step needs 0 <= sigma_next < sigma <= 1, got sigma={t!r} and sigma_next={u!r}")
    if any(a <= b for a, b in pairwise([*reversed(past_sigmas), t])):
        raise SamplerError(
            f"history must hold larger sigmas than the step, newest first; got {past_sigmas!r} before {t!r}"
        )
    if u == 0.0:
        return DpmCoefficients(0.0, (1.0,))

    use = min(order, len(past_sigmas) + 1)
    ratio = (1 - t) * u / (t * (1 - u))  # e^-H without a logarithm; 0 at t = 1
    gain, scale_x = (1 - u) * (1 - ratio), u / t
    if use == 1 or ratio == 0.0:
        return DpmCoefficients(scale_x, (gain,))

    big_h = -math.log(ratio)
    shrink = math.exp(-big_h)
    linear = (1 - u) * ((shrink - 1) / big_h + 1)
    # d10 = (x̂0 - x̂0_prev) / r0 with 1/r0 = H / (lambda_t - lambda_prev), which is 0 after a step from t = 1.
    inverse0 = big_h / _lambda_gap(t, past_sigmas[0])
    if use == 2:
        weight = (0.5 * gain if solver_type == "midpoint" else linear) * inverse0
        return DpmCoefficients(scale_x, (gain + weight, -weight))

    quadratic = (1 - u) * ((1 - shrink - big_h) / (big_h * big_h) + 0.5)
    inverse1 = big_h / _lambda_gap(past_sigmas[0], past_sigmas[1])
    # With D1 = d10 + c (d10 - d11), D2 = g (d10 - d11): c = r0/(r0+r1), g = 1/(r0+r1), in terms of the inverses.
    share = inverse1 / (inverse0 + inverse1) if inverse0 + inverse1 > 0 else 0.0
    spread = inverse0 * share
    on_d10 = linear * (1 + share) + quadratic * spread
    on_d11 = -linear * share - quadratic * spread
    first, second = on_d10 * inverse0, on_d11 * inverse1
    return DpmCoefficients(scale_x, (gain + first, second - first, -second))


def effective_order(order: int, step_index: int, num_steps: int) -> int:
    """The order at a step of a whole schedule: short third-order runs (under 15 steps) finish 3, 2, 1."""
    if step_index == num_steps - 1:
        return 1
    if order == 3 and num_steps < 15 and step_index == num_steps - 2:
        return 2
    return order


def _lambda_gap(t: float, earlier: float) -> float:
    """lambda_t - lambda_earlier > 0, infinite when the earlier step started at 1."""
    if earlier >= 1.0:
        return math.inf
    return math.log((1 - t) * earlier / (t * (1 - earlier)))
