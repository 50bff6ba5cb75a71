"""The step on a CPU, through the cache in chunks: a chunk of each input is loaded once, all operations run on it, and only the
new sample is stored.

Two choices make a replay reproduce a rollout to the bit. Every product and sum is its own rounded operation (no fused
multiply-add, whose use depends on vector width and chunking), and one forward serves drawing and scoring, with or
without gradient, so the order of the reduction is the same too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..coefficients import Scalar, StepCoefficients, for_each_sample
from ..logprob import log_prob_terms
from ..types import LogProbForm, SdeStep
from .late import late_mean

CPU_CHUNK = 1 << 17  # elements; the two buffers of a chunk are 1 MB and stay in the cache


class _ChunkedStep(torch.autograd.Function):
    """(sample, velocity) -> (prev_sample, log_prob); the twin of the kernel, formula by formula."""

    @staticmethod
    def forward(
        ctx: Any,
        sample: Tensor,
        velocity: Tensor,
        noise: Tensor | None,
        target: Tensor | None,
        coefficients: StepCoefficients,
        terms: tuple[Scalar, Scalar],
        storage_dtype: torch.dtype | None,
    ) -> tuple[Tensor, Tensor]:
        prev, sums = _forward(sample, velocity, noise, target, coefficients, storage_dtype)
        offset, weight = terms
        log_prob = (offset - weight * sums.double()).float()
        ctx.coefficients, ctx.weight = coefficients, weight
        ctx.save_for_backward(sample, velocity, prev)
        ctx.mark_non_differentiable(prev)
        ctx.set_materialize_grads(False)
        return prev, log_prob

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor | None, grad_log_prob: Tensor | None) -> tuple[Any, ...]:
        if grad_log_prob is None:
            return (None,) * 7
        sample, velocity, prev = ctx.saved_tensors
        scale_x, scale_v, _std = ctx.coefficients
        # d log_prob / d mean = 2 weight (x_u - mean)
        distance = prev - mean_of(sample, velocity, ctx.coefficients)
        grad_mean = distance.mul_(_rows(2 * ctx.weight * grad_log_prob.double(), prev))
        needs_sample, needs_velocity = ctx.needs_input_grad[:2]
        grad_sample = (grad_mean * _rows(scale_x, prev)).to(sample.dtype) if needs_sample else None
        grad_velocity = (grad_mean * _rows(scale_v, prev)).to(velocity.dtype) if needs_velocity else None
        return grad_sample, grad_velocity, None, None, None, None, None


def step(
    sample: Tensor,
    velocity: Tensor,
    coefficients: StepCoefficients,
    *,
    noise: Tensor | None,
    prev_sample: Tensor | None,
    form: LogProbForm | None,
    storage_dtype: torch.dtype | None = None,
) -> SdeStep:
    """`steps.reference_step` on a CPU; the mean is computed when it is first read."""
    coefficients = StepCoefficients(*(v.cpu() if isinstance(v, Tensor) else v for v in coefficients))
    std = for_each_sample(coefficients.std, sample)
    if noise is None and prev_sample is None:
        mean = mean_of(sample, velocity, coefficients)
        return SdeStep(mean.detach(), mean, std, None)
    terms: tuple[Scalar, Scalar] = (
        (0.0, 1.0) if form is None else log_prob_terms(coefficients.std, sample[0].numel(), form)
    )
    prev, log_prob = _ChunkedStep.apply(sample, velocity, noise, prev_sample, coefficients, terms, storage_dtype)
    late = late_mean(mean_of, sample, velocity, coefficients)
    return SdeStep(prev, late, std, None if form is None else log_prob)


def mean_of(sample: Tensor, velocity: Tensor, coefficients: StepCoefficients) -> Tensor:
    """`scale_x * x + scale_v * v`, [B, ...] fp32, with gradient; the same bits as inside the step."""
    scale_x, scale_v, _ = coefficients
    scaled = velocity.to(torch.float32) * _rows(scale_v, velocity)
    x = sample.to(torch.float32)
    return scaled.add_(x if isinstance(scale_x, float) and scale_x == 1.0 else x * _rows(scale_x, sample))


def _forward(
    sample: Tensor,
    velocity: Tensor,
    noise: Tensor | None,
    target: Tensor | None,
    coefficients: StepCoefficients,
    storage_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    batch = sample.shape[0]
    if noise is not None:
        prev = torch.empty((batch, sample.numel() // batch), dtype=torch.float32)
        inputs = [sample, velocity, noise]
    else:
        assert target is not None
        # A copy where it is fp32 already would cost a pass; the view keeps autograd from seeing the caller's tensor.
        prev = target.detach().to(torch.float32).reshape(batch, -1)
        inputs = [sample, velocity]
    # fp32 tensors from the start: torch would convert a Python number again in every operation of every chunk.
    shared = [v if isinstance(v, Tensor) else torch.tensor(v, dtype=torch.float32) for v in coefficients]
    sums: list[Tensor] = []
    buffers: list[Tensor] = []
    for rows, p, *parts in _chunks(prev, *(t.reshape(batch, -1) for t in inputs)):
        x, v = parts[:2]
        if not buffers or buffers[0].shape != p.shape:
            buffers = [torch.empty(p.shape, dtype=torch.float32) for _ in range(2)]
        mean, work = buffers
        a, b, s = (value[rows, None].float() if value.ndim else value for value in shared)
        _scaled(v, b, work)
        _scaled(x, a, mean).add_(work)
        if noise is not None:
            torch.add(mean, _scaled(parts[2], s, work), out=p)
            if storage_dtype is not None:
                p.copy_(p.to(storage_dtype))
        torch.sub(p, mean, out=work)
        sums.append(work.mul_(work).sum(dim=1))
    per_row = torch.cat(sums).view(batch, -1) if len(sums) > 1 else sums[0][:, None]
    return prev.view(sample.shape), per_row.sum(dim=1)


def _scaled(source: Tensor, factor: Tensor, out: Tensor) -> Tensor:
    """out = fp32(source) * factor, rounded once."""
    if source.dtype == torch.float32:
        return torch.mul(source, factor, out=out)
    return out.copy_(source).mul_(factor)


def _chunks(*tensors: Tensor) -> Iterator[tuple[Any, ...]]:
    """(rows, part of each [B, D] tensor): groups of whole rows, or pieces of one row, in memory order."""
    elements = tensors[0].shape[1]
    if elements <= CPU_CHUNK:
        group = CPU_CHUNK // elements
        for number, parts in enumerate(zip(*(t.split(group) for t in tensors), strict=True)):
            yield slice(number * group, number * group + parts[0].shape[0]), *parts
    else:
        pieces = -(-elements // CPU_CHUNK)
        for number, parts in enumerate(zip(*(_pieces(t) for t in tensors), strict=True)):
            row = number // pieces
            yield slice(row, row + 1), *parts


def _pieces(tensor: Tensor) -> list[Tensor]:
    return [piece for row in tensor.split(1) for piece in row.split(CPU_CHUNK, dim=1)]


def _rows(factor: Scalar, like: Tensor) -> Scalar:
    """Broadcast a per-sample factor over the latent dims, in fp32."""
    if not isinstance(factor, Tensor):
        return factor
    return factor.to(torch.float32).reshape(-1, *([1] * (like.ndim - 1)))
