"""DPM-Solver++ for flow matching, orders 1 to 3 (multistep), and its SDE form.

Source: DPM-Solver++ (arXiv 2211.01095) with alpha = 1 - t, sigma = t, lambda = ln((1-t)/t), as MixGRPO and DiffusionNFT
use it. One step t -> u, with H = lambda_u - lambda_t > 0, E = e^-H, data read-outs x̂0 = x - t v:

    ODE  x_u  = (u/t) x   + (1-u)(1-E)  D0 + …       order 1 is the Euler step
    SDE  mean = (u/t) E x + (1-u)(1-E²) D0 + …, S = u √(1-E²)

The dots are the usual corrections from the x̂0 of one or two earlier steps. Order 1 is used where there is no history
and at u = 0, where H is infinite and the result is x̂0 itself. A step that starts at t = 1 has lambda = -∞, so it adds
nothing to the correction of the next one: the first step that is really of order 2 is the third.

Coefficients are float64; latents are fp32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .coefficients import as_scalar
from .errors import SamplerError
from .logprob import gaussian_log_prob
from .noise import Generators, draw_noise
from .steps import check_tensors
from .types import LogProbForm, SdeStep

SolverType = Literal["midpoint", "heun"]
ThirdOrder = Literal["published", "consistent"]


class PastOutput(NamedTuple):
    """A data read-out of an earlier step: its sigma and x̂0 [B, ...] fp32."""

    sigma: float
    x0: Tensor


@dataclass(frozen=True)
class DpmStep:
    """`step` as from `sde_step` (log_prob only for the SDE form), the read-out `x0`, the history for the next step."""

    step: SdeStep
    x0: Tensor
    history: tuple[PastOutput, ...]

    @property
    def prev_sample(self) -> Tensor:
        return self.step.prev_sample


class DpmCoefficients(NamedTuple):
    """`mean = scale_x * x + Σ scale_x0[i] * x̂0 of i steps ago`, total std `std`."""

    scale_x: float
    scale_x0: tuple[float, ...]
    std: float


def dpm_step(
    sample: Tensor,
    velocity: Tensor,
    sigma: float | Tensor,
    sigma_next: float | Tensor,
    history: tuple[PastOutput, ...] = (),
    *,
    order: int = 2,
    solver_type: SolverType = "midpoint",
    third_order: ThirdOrder = "published",
    sde: bool = False,
    noise: Tensor | None = None,
    prev_sample: Tensor | None = None,
    generator: Generators = None,
    log_prob_form: LogProbForm = "density",
) -> DpmStep:
    """One multistep DPM-Solver++ step.

    Args:
        sample, velocity: [B, ...], any floating dtype; gradient through both.
        sigma, sigma_next: numbers shared by the batch.
        history: what the previous step returned; () starts anew.
        order: 1, 2 or 3; no more than one above the length of the history is used. See `effective_order` for the
            orders of a whole schedule.
        solver_type: form of the second-order correction.
        third_order: "published" weighs the second difference as every public copy does, which makes "order 3" converge
            with order 2; "consistent" weighs it twice, as the integral asks, and converges with order 3. The SDE form
            always does the latter.
        sde: the stochastic form; `noise`, `prev_sample`, `generator` and `log_prob_form` as in `sde_step`.

    Raises:
        SamplerError: an order outside 1 … 3, sigmas that do not decrease, per-sample sigmas, history out of order.
    """
    check_tensors(sample, velocity, noise, prev_sample)
    if noise is not None and prev_sample is not None:
        raise SamplerError("noise and prev_sample were both given: pass noise to draw, prev_sample to score")
    t, u = as_scalar(sigma, "sigma"), as_scalar(sigma_next, "sigma_next")
    if isinstance(t, Tensor) or isinstance(u, Tensor):
        raise SamplerError("a multistep solver needs one sigma for the batch; pass numbers, not a tensor per sample")
    past = [entry.sigma for entry in history]
    coefficients = dpm_coefficients(t, u, past, order=order, solver_type=solver_type, third_order=third_order, sde=sde)

    x = sample.to(torch.float32)
    x0 = x - t * velocity.to(torch.float32)
    mean = coefficients.scale_x * x
    for scale, read_out in zip(coefficients.scale_x0, (x0, *(entry.x0 for entry in history)), strict=False):
        mean = mean + scale * read_out
    std = torch.full((x.shape[0],), coefficients.std, dtype=torch.float32, device=x.device)
    log_prob = None
    if not sde:
        prev = mean.detach() if prev_sample is None else prev_sample.detach().to(torch.float32)
    else:
        if prev_sample is not None:
            prev = prev_sample.detach().to(torch.float32)
        else:
            z = draw_noise(x, generator) if noise is None else noise.to(torch.float32)
            prev = (mean + coefficients.std * z).detach()
        if coefficients.std > 0:
            log_prob = gaussian_log_prob(prev, mean, coefficients.std, form=log_prob_form)
    kept = (PastOutput(t, x0.detach()), *history)[: max(order - 1, 0)]
    return DpmStep(SdeStep(prev, mean, std, log_prob), x0, kept)


def dpm_coefficients(
    sigma: float,
    sigma_next: float,
    past_sigmas: list[float] | tuple[float, ...] = (),
    *,
    order: int = 2,
    solver_type: SolverType = "midpoint",
    sde: bool = False,
    third_order: ThirdOrder = "published",
) -> DpmCoefficients:
    """float64 coefficients of one step; `past_sigmas` newest first, each larger than the next."""
    t, u = float(sigma), float(sigma_next)
    if order not in (1, 2, 3):
        raise SamplerError(f"order={order!r} must be 1, 2 or 3")
    if solver_type not in ("midpoint", "heun"):
        raise SamplerError(f"solver_type={solver_type!r} is unknown; choose 'midpoint' or 'heun'")
    if third_order not in ("published", "consistent"):
        raise SamplerError(f"third_order={third_order!r} is unknown; choose 'published' or 'consistent'")
    if not 0.0 <= u < t <= 1.0:
        raise SamplerError(f"a step needs 0 <= sigma_next < sigma <= 1, got sigma={t!r} and sigma_next={u!r}")
    path = [*reversed(list(past_sigmas)), t]
    if any(a <= b for a, b in pairwise(path)):
        raise SamplerError(
            f"history must hold larger sigmas than the step, newest first; got {past_sigmas!r} before {t!r}"
        )
    if u == 0.0:
        return DpmCoefficients(0.0, (1.0,), 0.0)

    use = min(order, len(past_sigmas) + 1)
    ratio = (1 - t) * u / (t * (1 - u))  # e^-H without a logarithm; 0 at t = 1
    gain = (1 - u) * (1 - ratio * ratio if sde else 1 - ratio)
    scale_x = u / t * ratio if sde else u / t
    std = u * math.sqrt(1 - ratio * ratio) if sde else 0.0
    if use == 1 or ratio == 0.0:
        return DpmCoefficients(scale_x, (gain,), std)

    big_h = -math.log(ratio)
    rate = 2 * big_h if sde else big_h  # the SDE form integrates e^-2(..), the ODE form e^-(..)
    shrink = math.exp(-rate)
    linear = (1 - u) * ((shrink - 1) / rate + 1)
    # d10 = (x̂0 - x̂0_prev) / r0 with 1/r0 = H / (lambda_t - lambda_prev), which is 0 after a step from t = 1.
    inverse0 = big_h / _lambda_gap(t, past_sigmas[0])
    if use == 2:
        weight = (0.5 * gain if solver_type == "midpoint" else linear) * inverse0
        return DpmCoefficients(scale_x, (gain + weight, -weight), std)

    quadratic = (1 - u) * ((1 - shrink - rate) / (rate * rate) + 0.5)
    inverse1 = big_h / _lambda_gap(past_sigmas[0], past_sigmas[1])
    # With D1 = d10 + c (d10 - d11), D2 = g (d10 - d11): c = r0/(r0+r1), g = 1/(r0+r1), in terms of the inverses.
    share = inverse1 / (inverse0 + inverse1) if inverse0 + inverse1 > 0 else 0.0
    spread = inverse0 * inverse1 / (inverse0 + inverse1) if inverse0 + inverse1 > 0 else 0.0
    if third_order == "consistent" or sde:
        quadratic *= 2
    on_d10 = linear * (1 + share) + quadratic * spread
    on_d11 = -linear * share - quadratic * spread
    first, second = on_d10 * inverse0, on_d11 * inverse1
    return DpmCoefficients(scale_x, (gain + first, second - first, -second), std)


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
