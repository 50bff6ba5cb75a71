"""The step in plain torch: `mean = a x + b v`, `x_u = mean + S z`, Σ (x_u - mean)² per sample, and its gradient.

Two choices make a replay reproduce a rollout to the bit. Every product and sum is its own rounded operation (no fused
multiply-add, whose use depends on vector width and chunking), and one forward serves sampling and scoring, with or
without gradient, so the reduction order is the same too.

On a CPU the work goes through the cache in chunks: each chunk is loaded once, all operations run on it, the results are
stored once. On other devices the whole batch is one chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .coefficients import Scalar, StepCoefficients

CPU_CHUNK = 1 << 16  # elements; 256 KB in fp32, so the handful of buffers of a chunk stays in L2


class PlainStep(torch.autograd.Function):
    """(sample, velocity) -> (mean, prev_sample, log_prob), see `plain_step`; by hand, to mirror the fused kernel."""

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
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        mean, prev, sums = _forward(sample, velocity, noise, target, coefficients, storage_dtype)
        offset, weight = terms
        log_prob = (offset - weight * sums.double()).float()
        ctx.coefficients, ctx.weight = coefficients, weight
        ctx.dtypes = (sample.dtype, velocity.dtype)
        ctx.save_for_backward(mean, prev)
        if prev is not None:
            ctx.mark_non_differentiable(prev)
        ctx.set_materialize_grads(False)
        return mean, prev, log_prob

    @staticmethod
    def backward(ctx: Any, grad_mean: Tensor | None, _: Tensor | None, grad_log_prob: Tensor | None) -> tuple[Any, ...]:
        mean, prev = ctx.saved_tensors
        total = None
        if grad_log_prob is not None and prev is not None:
            total = (prev - mean).mul_(_rows(2 * ctx.weight * grad_log_prob.double(), mean))
        if grad_mean is not None:
            total = grad_mean if total is None else total.add_(grad_mean)
        if total is None:
            return (None,) * 7
        needs_sample, needs_velocity = ctx.needs_input_grad[:2]
        scale_x, scale_v, _std = ctx.coefficients
        grad_sample = (total * _rows(scale_x, mean)).to(ctx.dtypes[0]) if needs_sample else None
        grad_velocity = (total * _rows(scale_v, mean)).to(ctx.dtypes[1]) if needs_velocity else None
        return grad_sample, grad_velocity, None, None, None, None, None


def plain_step(
    sample: Tensor,
    velocity: Tensor,
    noise: Tensor | None,
    target: Tensor | None,
    coefficients: StepCoefficients,
    terms: tuple[Scalar, Scalar],
    storage_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(mean [B, ...] fp32 with gradient, prev_sample [B, ...] fp32 detached, log_prob [B] fp32 with gradient).

    Scores `target` when it is given, otherwise draws `mean + S * noise` (just `mean` without noise). `terms` are the
    offset and weight of `logprob.log_prob_terms`; coefficients and terms are numbers or float64 [B] on the device.
    Without noise and target, prev_sample is the mean itself (one storage) and log_prob is `offset`, or NaN where
    the mean is not finite.
    """
    mean, prev, log_prob = PlainStep.apply(sample, velocity, noise, target, coefficients, terms, storage_dtype)
    return mean, mean.detach() if prev is None else prev, log_prob


def _forward(
    sample: Tensor,
    velocity: Tensor,
    noise: Tensor | None,
    target: Tensor | None,
    coefficients: StepCoefficients,
    storage_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    batch = sample.shape[0]
    x, v = sample.reshape(batch, -1), velocity.reshape(batch, -1)
    z = None if noise is None else noise.reshape(batch, -1)
    mean = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    prev = None if z is None else torch.empty_like(mean)
    if target is not None:
        prev = target.detach().to(torch.float32).reshape(batch, -1)
    chunks = list(_chunks(batch, x.shape[1], x.device.type))
    columns = 1 + max(column for _, _, column in chunks)
    sums = torch.zeros((batch, columns), dtype=torch.float32, device=x.device)
    scratch = torch.empty_like(mean[chunks[0][0], chunks[0][1]])

    for rows, cols, column in chunks:
        m = mean[rows, cols]
        work = scratch if scratch.shape == m.shape else torch.empty_like(m)
        a, b, s = (c[rows, None].float() if isinstance(c, Tensor) else c for c in coefficients)
        _scaled(v[rows, cols], b, work)
        if isinstance(a, float) and a == 1.0 and x.dtype == torch.float32:
            torch.add(x[rows, cols], work, out=m)
        else:
            _scaled(x[rows, cols], a, m)
            m.add_(work)
        if prev is None:
            sums[rows, column] = m.sum(dim=1) * 0.0  # 0, or NaN where something is not finite
            continue
        p = prev[rows, cols]
        if z is not None:
            _scaled(z[rows, cols], s, work)
            torch.add(m, work, out=p)
            if storage_dtype is not None:
                p.copy_(p.to(storage_dtype))
        torch.sub(p, m, out=work)
        torch.mul(work, work, out=work)
        sums[rows, column] = work.sum(dim=1)
    shape = sample.shape
    return mean.view(shape), None if prev is None else prev.view(shape), sums.sum(dim=1)


def _scaled(source: Tensor, factor: Scalar, out: Tensor) -> None:
    """out = fp32(source) * factor, rounded once."""
    if source.dtype == torch.float32:
        torch.mul(source, factor, out=out)
    else:
        out.copy_(source).mul_(factor)


def _chunks(batch: int, elements: int, device_type: str) -> Iterator[tuple[slice, slice, int]]:
    """(rows, columns, column number of the partial sum); a chunk is contiguous in memory."""
    if device_type != "cpu" or batch * elements <= CPU_CHUNK:
        yield slice(0, batch), slice(0, elements), 0
    elif elements <= CPU_CHUNK:
        step = max(1, CPU_CHUNK // elements)
        for row in range(0, batch, step):
            yield slice(row, min(row + step, batch)), slice(0, elements), 0
    else:
        for row in range(batch):
            for column, start in enumerate(range(0, elements, CPU_CHUNK)):
                yield slice(row, row + 1), slice(start, min(start + CPU_CHUNK, elements)), column


def _rows(factor: Scalar, like: Tensor) -> Scalar:
    """Broadcast a per-sample factor over the latent dims, in fp32."""
    if not isinstance(factor, Tensor):
        return factor
    return factor.to(torch.float32).reshape(-1, *([1] * (like.ndim - 1)))
