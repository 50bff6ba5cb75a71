"""One denoising step and its log-probability: `reference_step` is the formula, `sde_step` the same with its inputs checked.

`fast/` computes the same numbers with less traffic to memory; tests hold the two equal.

Source of the formulas: `coefficients.py`; of the log-prob forms: `logprob.py`. Where public trainers differ from the
choices here (std per root of time, products in bf16, a density of zero-noise steps) the README says how and why.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import fast
from .coefficients import StepCoefficients, for_each_sample, step_coefficients, times
from .errors import NonFiniteError, SamplerError
from .kinds import Kind, LogProbForm, find_kind
from .logprob import check_form, log_prob_of
from .noise import Generators, draw_noise
from .types import SdeStep


def sde_step(
    sample: Tensor,
    velocity: Tensor,
    sigma: float | Tensor,
    sigma_next: float | Tensor,
    *,
    kind: Kind,
    noise_level: float,
    sigma_cap: float | Tensor | None = None,
    prev_sample: Tensor | None = None,
    noise: Tensor | None = None,
    generator: Generators = None,
    log_prob_form: LogProbForm | None = None,
    fused: bool | None = None,
    check_finite: bool | None = None,
) -> SdeStep:
    """One transition from `sigma` to `sigma_next`, drawn or (with `prev_sample`) scored.

    Args:
        sample: x_t [B, ...], any floating dtype; tokens [B, S, C], image [B, C, H, W], video [B, C, T, H, W] or any
            other latent shape. Arithmetic is fp32.
        velocity: v(x_t, t), same shape, any floating dtype; carries the gradient.
        sigma, sigma_next: a number, or one per sample [B]. 0 <= sigma_next < sigma <= 1.
        kind: one of `KINDS`, or "module:attribute" of a `SamplerKind`.
        noise_level: η. "wan_sde" has none of its own and ignores it, as does "ode".
        sigma_cap: replaces sigma = 1 in Flow-SDE's std; the schedule's second entry. Defaults to `sigma_next`.
            Needed by "wan_sde" at every step.
        prev_sample: score this x_u instead of drawing one.
        noise: the standard normal to draw with [B, ...].
        generator: draws the noise when neither of the two is given: one torch.Generator, one per sample, or None for
            torch's default generator.
        log_prob_form: None for the kind's own, see `logprob.py`.
        fused: None takes the Triton kernel where it runs (on CUDA), True demands it, False takes `reference_step`.
        check_finite: raise NonFiniteError on NaN or inf. None means on the CPU only, since it waits for the device.

    Returns:
        SdeStep(prev_sample, mean, std, log_prob): prev_sample detached, mean and log_prob with gradient, std [B] total.
        log_prob is None for "ode" and for zero noise.

    Raises:
        SamplerError: anything above that does not hold. NonFiniteError: see check_finite.
    """
    check_tensors(sample, velocity, noise, prev_sample)
    if noise is not None and prev_sample is not None:
        raise SamplerError(
            "noise and prev_sample were both given: pass noise to draw a sample, prev_sample to score one"
        )
    form = check_form(log_prob_form, kind)
    coefficients = step_coefficients(kind, sigma, sigma_next, noise_level, sigma_cap, batch=sample.shape[0])
    has_density = find_kind(kind).draws(noise_level)
    if has_density and noise is None and prev_sample is None:
        noise = draw_noise(sample, generator)
    return take_step(
        sample,
        velocity,
        coefficients,
        noise=noise if has_density else None,
        prev_sample=prev_sample,
        form=form if has_density else None,
        fused=fused,
        check_finite=check_finite,
        where=f"sde_step(kind={kind!r}, sigma={_brief(sigma)}, sigma_next={_brief(sigma_next)})",
    )


def reference_step(
    sample: Tensor,
    velocity: Tensor,
    coefficients: StepCoefficients,
    *,
    noise: Tensor | None,
    prev_sample: Tensor | None,
    form: LogProbForm | None,
) -> SdeStep:
    """The step as its formula, in plain torch with the gradient of autograd. Arguments as in `take_step`.

    mean = a x + b v        x_u = mean + S z        log p = mean over the elements of ln N(x_u; mean, S²)
    """
    a, b, std = coefficients
    mean = times(a, sample) + times(b, velocity)
    if prev_sample is not None:
        x_u = prev_sample.to(torch.float32)
    elif noise is not None:
        x_u = mean + times(std, noise)
    else:
        x_u = mean
    x_u = x_u.detach()
    total_std = for_each_sample(std, sample)
    if form is None:
        return SdeStep(x_u, mean, total_std, None)
    distance = (x_u - mean).flatten(1)
    squares = (distance * distance).sum(dim=1)
    return SdeStep(x_u, mean, total_std, log_prob_of(squares, std, distance.shape[1], form))


def take_step(
    sample: Tensor,
    velocity: Tensor,
    coefficients: StepCoefficients,
    *,
    noise: Tensor | None,
    prev_sample: Tensor | None,
    form: LogProbForm | None,
    fused: bool | None = None,
    check_finite: bool | None = None,
    where: str = "step",
    step_index: int | None = None,
) -> SdeStep:
    """A step from ready coefficients: what `sde_step`, the rollout (which mixes them per sample) and replay share.

    With neither `noise` nor `prev_sample` x_u is the mean. `form=None` means that the step has no log-prob. Everything else as in
    `sde_step`.
    """
    step_fn = fast.pick(fused, sample, velocity, noise, prev_sample) or reference_step
    step = step_fn(sample, velocity, coefficients, noise=noise, prev_sample=prev_sample, form=form)
    if check_finite or (check_finite is None and sample.device.type == "cpu"):
        # The squared distance is NaN or inf as soon as one element of any input is, so [B] numbers tell.
        evidence = step.prev_sample.flatten(1).sum(dim=1) if step.log_prob is None else step.log_prob.detach()
        if not bool(torch.isfinite(evidence).all()):
            raise non_finite(where, step_index, sample=sample, velocity=velocity, noise=noise, prev_sample=prev_sample)
    return step


def check_tensors(sample: Tensor, velocity: Tensor, *others: Tensor | None) -> None:
    """Shapes, dtypes and devices of the tensors of one step.

    Raises:
        SamplerError: naming what was given and what is expected.
    """
    if not isinstance(sample, Tensor) or sample.ndim < 2 or sample.numel() == 0:
        given = list(sample.shape) if isinstance(sample, Tensor) else repr(sample)
        raise SamplerError(
            f"sample must be a tensor [B, ...] with at least one latent dim and one element, got {given}"
        )
    for name, tensor in zip(("sample", "velocity", "noise", "prev_sample"), (sample, velocity, *others), strict=False):
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor) or tensor.shape != sample.shape:
            given = list(tensor.shape) if isinstance(tensor, Tensor) else repr(tensor)
            raise SamplerError(f"{name} has shape {given}, sample has {list(sample.shape)}; they must be equal")
        if tensor.device != sample.device:
            raise SamplerError(f"{name} is on {tensor.device}, sample on {sample.device}; move them to one device")
        if not tensor.is_floating_point():
            raise SamplerError(f"{name} has dtype {tensor.dtype}; pass a real floating dtype (fp32, bf16, fp16, fp64)")


def non_finite(where: str, step_index: int | None, **tensors: Tensor | None) -> NonFiniteError:
    """The error for a step that met NaN or inf: which tensor, which samples."""
    guilty: dict[str, list[int]] = {}
    for name, tensor in tensors.items():
        if tensor is not None:
            rows = (~torch.isfinite(tensor.detach().flatten(1))).any(dim=1).nonzero().flatten().tolist()
            if rows:
                guilty[name] = rows
    found = (
        "; ".join(f"{name} of samples {rows}" for name, rows in guilty.items()) or "an overflow of fp32 inside the step"
    )
    position = "" if step_index is None else f" at step {step_index} of the schedule, the first bad one"
    rows = sorted({row for rows in guilty.values() for row in rows})
    return NonFiniteError(
        f"{where}: NaN or inf{position}: {found}; check the weights, the loss scale and the dtype that produced it",
        step_index,
        tuple(rows),
    )


def _brief(value: float | Tensor) -> str:
    if isinstance(value, Tensor):
        return f"tensor{list(value.shape)}" if value.numel() > 4 or value.device.type != "cpu" else str(value.tolist())
    return repr(value)
