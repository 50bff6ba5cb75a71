"""The fused step: one pass over memory for the new sample and its log-prob, and one for its gradient.

Least traffic per element in fp32: drawing reads x, v and noise and writes the sample (16 bytes); scoring reads x, v and
the sample (12 bytes) and writes only [B] numbers; the backward pass reads the same three and writes the gradient of v.
The mean is not among the outputs: `SdeStep.mean` computes it when something asks for it.

It agrees with `steps.reference_step` within fp32 rounding (the sample to the bit). The kernels themselves are in
`triton_kernels.py`.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..coefficients import StepCoefficients, for_each_sample, times
from ..errors import SamplerError
from ..kinds import LogProbForm
from ..logprob import log_prob_of
from ..types import SdeStep

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@cache
def _triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def why_unavailable(sample: Tensor, *others: Tensor | None) -> str | None:
    """Why the fused step cannot run on these tensors, or None when it can.

    It is used wherever it can: it is several times faster for large latents, and for small ones the host's launches decide
    (MEASURED.md). A rule that looks only at device, dtype and shape makes the rollout and its replay agree.
    """
    if not sample.is_cuda:
        return f"the tensors are on {sample.device}, and the kernel runs on CUDA"
    if not _triton_installed():
        return "triton is not installed (it comes with the CUDA builds of torch)"
    for tensor in (sample, *others):
        if tensor is not None and tensor.dtype not in DTYPES:
            return f"{tensor.dtype} is not one of the kernel's dtypes fp32, bf16, fp16"
    if sample.numel() // sample.shape[0] >= 2**31 or sample.shape[0] >= 2**16:
        return f"the shape {list(sample.shape)} has 2**31 elements or more per sample, or 2**16 samples or more"
    return None


def step(
    sample: Tensor,
    velocity: Tensor,
    coefficients: StepCoefficients,
    *,
    noise: Tensor | None,
    prev_sample: Tensor | None,
    form: LogProbForm | None,
) -> SdeStep:
    """`steps.reference_step` on CUDA, from exactly one of noise and prev_sample."""
    source = prev_sample if noise is None else noise
    assert source is not None
    prev, squares = _FusedStep.apply(
        sample, velocity, source.detach(), _numbers(coefficients, sample), noise is not None
    )
    log_prob = None if form is None else log_prob_of(squares, coefficients.std, sample[0].numel(), form)
    return SdeStep(
        prev.detach().to(torch.float32),
        _mean_later(sample, velocity, coefficients),
        for_each_sample(coefficients.std, sample),
        log_prob,
    )


class _Numbers(NamedTuple):
    """scale_x, scale_v and std: floats for the batch, or a table [B, 3] fp32 on the device."""

    floats: tuple[float, ...]
    table: Tensor | None


class _FusedStep(torch.autograd.Function):
    """(sample, velocity) -> (prev_sample, sum of (prev_sample - mean)² of each sample)."""

    @staticmethod
    def forward(
        ctx: Any, sample: Tensor, velocity: Tensor, source: Tensor, numbers: _Numbers, draw: bool
    ) -> tuple[Tensor, Tensor]:
        from . import triton_kernels

        x, v, source = sample.contiguous(), velocity.contiguous(), source.contiguous()
        grid, block, warps = launch_grid(x)
        prev = torch.empty(x.shape, dtype=torch.float32, device=x.device) if draw else source
        partial = torch.empty(grid[::-1], dtype=torch.float32, device=x.device)
        with _on_device(x):
            triton_kernels.step_kernel[grid](
                x,
                v,
                source,
                prev,
                partial,
                partial if numbers.table is None else numbers.table,  # a pointer that is not read
                *numbers.floats,
                x[0].numel(),
                grid[0],
                PER_SAMPLE=numbers.table is not None,
                DRAW=draw,
                EVICTION=eviction_policy(x.numel()),
                BLOCK=block,
                num_warps=warps,
                enable_fp_fusion=False,
            )
        ctx.save_for_backward(x, v, prev)
        ctx.numbers = numbers
        ctx.mark_non_differentiable(prev)
        ctx.set_materialize_grads(False)
        return prev, partial.sum(dim=1, dtype=torch.float64)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor | None, grad_squares: Tensor | None) -> tuple[Any, ...]:
        if grad_squares is None:
            return (None,) * 5
        from . import triton_kernels

        x, v, prev = ctx.saved_tensors
        grad_x, grad_v = (
            torch.empty_like(t) if needed else None for t, needed in zip((x, v), ctx.needs_input_grad[:2], strict=True)
        )
        grid, block, warps = launch_grid(x)
        table = ctx.numbers.table
        with _on_device(x):
            triton_kernels.grad_kernel[grid](
                x,
                v,
                prev,
                (-2 * grad_squares).float(),  # of the squares with respect to the mean, but for (prev - mean)
                x if grad_x is None else grad_x,
                v if grad_v is None else grad_v,
                x if table is None else table,
                *ctx.numbers.floats[:2],
                x[0].numel(),
                PER_SAMPLE=table is not None,
                NEEDS_X=grad_x is not None,
                NEEDS_V=grad_v is not None,
                BLOCK=block,
                num_warps=warps,
                enable_fp_fusion=False,
            )
        return grad_x, grad_v, None, None, None


def _mean_later(sample: Tensor, velocity: Tensor, coefficients: StepCoefficients) -> Callable[[], Tensor]:
    """The mean on request, as if it had been computed now: the same inputs, the same grad mode."""

    def versions() -> list[int | None]:
        return [None if tensor.is_inference() else tensor._version for tensor in (sample, velocity)]

    before, with_grad = versions(), torch.is_grad_enabled()

    def mean() -> Tensor:
        if versions() != before:
            raise SamplerError(
                "SdeStep.mean is first read after sample or velocity changed in place; read it before that"
            )
        with torch.set_grad_enabled(with_grad):
            return times(coefficients.scale_x, sample) + times(coefficients.scale_v, velocity)

    return mean


def launch_grid(x: Tensor) -> tuple[tuple[int, int], int, int]:
    """((programs per sample, samples), elements per program, warps). The block depends on the sample's size alone: the sum's
    order must not vary otherwise."""
    elements = x[0].numel()
    if elements >= 1 << 22:
        block, warps = 16384, 16
    elif elements >= 1 << 20:
        block, warps = 4096, 8
    else:
        block, warps = min(2048, max(256, 1 << (elements - 1).bit_length())), 8
    return (-(-elements // block), x.shape[0]), block, warps


def eviction_policy(elements: int) -> str:
    """Of the inputs' cache lines: a batch whose four tensors (16 bytes an element) fit into the L2 cache stays in it."""
    return "" if elements <= 1 << 21 else "evict_first"


def _numbers(coefficients: StepCoefficients, sample: Tensor) -> _Numbers:
    tensors = [value for value in coefficients if isinstance(value, Tensor)]
    if not tensors:
        return _Numbers(tuple(float(value) for value in coefficients), None)
    columns = [
        torch.as_tensor(value, dtype=torch.float64, device=tensors[0].device).expand(sample.shape[0])
        for value in coefficients
    ]
    return _Numbers((0.0,) * 3, torch.stack(columns, dim=1).to(torch.float32).to(sample.device))


def _on_device(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(x.device)
