"""The fused step: one pass over memory for the new sample and its log-prob, with its gradient.

Least traffic per element in fp32: drawing reads x, v and noise and writes the sample (16 bytes); scoring reads x, v and
the sample (12 bytes) and writes only [B] numbers; the backward pass reads the same three and writes the gradient of v.
The mean is not among the outputs: `SdeStep.mean` computes it when something asks for it.

It agrees with `steps.reference_step` within fp32 rounding (the sample to the bit). The kernels themselves are in
`triton_kernels.py`.
"""

from __future__ import annotations

import contextlib
import importlib.util
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..coefficients import Scalar, StepCoefficients, for_each_sample
from ..logprob import log_prob_terms
from ..types import LogProbForm, SdeStep
from .late import late_mean

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ROUND_TO = {None: "none", torch.float32: "none", torch.bfloat16: "bf16", torch.float16: "fp16"}


@cache
def _triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def why_unavailable(sample: Tensor, *others: Tensor | None) -> str | None:
    """Why the fused step cannot run on these tensors, or None when it can.

    It is used wherever it can: it was the faster one at every size measured (README), and a rule that looks only at
    device, dtype and shape makes the rollout and its replay agree.
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
    storage_dtype: torch.dtype | None = None,
) -> SdeStep:
    """`steps.reference_step` on CUDA; the mean is computed when it is first read."""
    if noise is None and prev_sample is None:
        mean = fused_mean(sample, velocity, coefficients)
        return SdeStep(mean.detach(), mean, for_each_sample(coefficients.std, sample), None)
    terms: tuple[Scalar, Scalar] = (
        (0.0, 1.0) if form is None else log_prob_terms(coefficients.std, sample[0].numel(), form)
    )
    prev, log_prob, std = fused_step(sample, velocity, noise, prev_sample, coefficients, terms, storage_dtype)
    late = late_mean(fused_mean, sample, velocity, coefficients)
    return SdeStep(prev, late, std, None if form is None else log_prob)


class _Numbers(NamedTuple):
    """scale_x, scale_v, std, offset, weight: five floats for the batch, or a table [B, 5] fp32 on the device."""

    floats: tuple[float, ...]
    table: Tensor | None


class _Launch(NamedTuple):
    """How a batch is cut into programs."""

    grid: tuple[int, int]
    block: int
    warps: int
    elements: int
    blocks: int


class _FusedStep(torch.autograd.Function):
    """(sample, velocity) -> (prev_sample, log_prob, std); the twin of `chunks._ChunkedStep`."""

    @staticmethod
    def forward(
        ctx: Any, sample: Tensor, velocity: Tensor, source: Tensor, numbers: _Numbers, draw: bool, round_to: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        x, v, source = sample.contiguous(), velocity.contiguous(), source.contiguous()
        prev, log_prob, std = _run(x, v, source, numbers, draw, round_to)
        ctx.save_for_backward(x, v, prev)
        ctx.numbers = numbers
        ctx.mark_non_differentiable(prev, std)
        ctx.set_materialize_grads(False)
        return prev, log_prob, std

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor | None, grad_log_prob: Tensor | None, __: Tensor | None) -> tuple[Any, ...]:
        if grad_log_prob is None:
            return (None,) * 6
        from . import triton_kernels

        x, v, prev = ctx.saved_tensors
        needs_x, needs_v = ctx.needs_input_grad[:2]
        scale_x, scale_v, _std, _offset, weight = ctx.numbers.floats
        launch = _launch(x)
        grad_x = torch.empty_like(x) if needs_x else None
        grad_v = torch.empty_like(v) if needs_v else None
        with _on_device(x):
            triton_kernels.grad_kernel[launch.grid](
                x,
                v,
                prev,
                grad_log_prob.float().contiguous(),
                x if grad_x is None else grad_x,
                v if grad_v is None else grad_v,
                x if ctx.numbers.table is None else ctx.numbers.table,  # a pointer that is not read
                scale_x,
                scale_v,
                weight,
                launch.elements,
                PER_SAMPLE=ctx.numbers.table is not None,
                NEEDS_X=needs_x,
                NEEDS_V=needs_v,
                BLOCK=launch.block,
                num_warps=launch.warps,
                enable_fp_fusion=False,
            )
        return grad_x, grad_v, None, None, None, None


class _FusedMean(torch.autograd.Function):
    """(sample, velocity) -> mean."""

    @staticmethod
    def forward(ctx: Any, sample: Tensor, velocity: Tensor, numbers: _Numbers) -> Tensor:
        from . import triton_kernels

        x, v = sample.contiguous(), velocity.contiguous()
        launch = _launch(x)
        mean = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        with _on_device(x):
            triton_kernels.mean_kernel[launch.grid](
                x,
                v,
                mean,
                x if numbers.table is None else numbers.table,
                *numbers.floats[:2],
                launch.elements,
                PER_SAMPLE=numbers.table is not None,
                BLOCK=launch.block,
                num_warps=launch.warps,
                enable_fp_fusion=False,
            )
        ctx.numbers, ctx.dtypes = numbers, (sample.dtype, velocity.dtype)
        return mean

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_mean: Tensor) -> tuple[Any, ...]:
        scale_x, scale_v = _columns(ctx.numbers, grad_mean)
        needs_x, needs_v = ctx.needs_input_grad[:2]
        grad_x = (grad_mean * scale_x).to(ctx.dtypes[0]) if needs_x else None
        grad_v = (grad_mean * scale_v).to(ctx.dtypes[1]) if needs_v else None
        return grad_x, grad_v, None


def fused_step(
    sample: Tensor,
    velocity: Tensor,
    noise: Tensor | None,
    target: Tensor | None,
    coefficients: StepCoefficients,
    terms: tuple[Scalar, Scalar],
    storage_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(prev_sample [B, ...] fp32 detached, log_prob [B] fp32 with gradient, std [B] fp32).

    From exactly one of noise and target. Coefficients and terms are numbers, or float64 [B] on any device: from the CPU
    they cross in one copy.
    """
    draw = noise is not None
    source = noise if noise is not None else target
    assert source is not None
    numbers = _numbers(coefficients, terms, sample)
    round_to = _ROUND_TO[storage_dtype] if draw else "none"
    if torch.is_grad_enabled() and (sample.requires_grad or velocity.requires_grad):
        scored = source.detach() if draw else source.detach().to(torch.float32)
        prev, log_prob, std = _FusedStep.apply(sample, velocity, scored, numbers, draw, round_to)
    else:
        x, v, source = (t.detach().contiguous() for t in (sample, velocity, source))
        prev, log_prob, std = _run(x, v, source, numbers, draw, round_to)
    return prev.detach().to(torch.float32), log_prob, std


def fused_mean(sample: Tensor, velocity: Tensor, coefficients: StepCoefficients) -> Tensor:
    """`scale_x * x + scale_v * v`, [B, ...] fp32, with gradient."""
    return _FusedMean.apply(sample, velocity, _numbers(coefficients, (0.0, 0.0), sample))  # type: ignore[no-any-return]


def block_size(elements: int) -> tuple[int, int]:
    """(elements per program, warps). A function of the sample's size alone: the sum's order must not vary otherwise."""
    if elements >= 1 << 22:
        return 16384, 16
    if elements >= 1 << 20:
        return 4096, 8
    return min(2048, max(256, _power_of_two(elements))), 8


def eviction_policy(elements: int) -> str:
    """Of the inputs' cache lines: a batch whose four tensors (16 bytes an element) fit into the L2 cache stays in it."""
    return "" if elements <= 1 << 21 else "evict_first"


def _run(
    x: Tensor, v: Tensor, source: Tensor, numbers: _Numbers, draw: bool, round_to: str
) -> tuple[Tensor, Tensor, Tensor]:
    from . import triton_kernels

    batch, launch = x.shape[0], _launch(x)
    prev = torch.empty(x.shape, dtype=torch.float32, device=x.device) if draw else source
    partial = torch.empty((batch, launch.blocks), dtype=torch.float32, device=x.device)
    out = torch.empty((2, batch), dtype=torch.float32, device=x.device)
    per_sample = numbers.table is not None
    table = out if numbers.table is None else numbers.table
    with _on_device(x):
        triton_kernels.step_kernel[launch.grid](
            x,
            v,
            source,
            prev,
            partial,
            table,
            *numbers.floats[:3],
            launch.elements,
            launch.blocks,
            PER_SAMPLE=per_sample,
            DRAW=draw,
            ROUND_TO=round_to,
            EVICTION=eviction_policy(x.numel()),
            BLOCK=launch.block,
            num_warps=launch.warps,
            enable_fp_fusion=False,
        )
        triton_kernels.finish_kernel[(batch,)](
            partial,
            out,
            table,
            *numbers.floats[2:],
            launch.blocks,
            PER_SAMPLE=per_sample,
            BLOCK=min(1024, _power_of_two(launch.blocks)),
            num_warps=4,
            enable_fp_fusion=False,
        )
    log_prob, std = out.unbind()
    return prev, log_prob, std


def _launch(x: Tensor) -> _Launch:
    batch = x.shape[0]
    elements = x.numel() // batch
    block, warps = block_size(elements)
    blocks = -(-elements // block)
    return _Launch((blocks, batch), block, warps, elements, blocks)


def _numbers(coefficients: StepCoefficients, terms: tuple[Scalar, Scalar], sample: Tensor) -> _Numbers:
    values = (*coefficients, *terms)
    tensors = [value for value in values if isinstance(value, Tensor)]
    if not tensors:
        return _Numbers(tuple(float(value) for value in values), None)
    device, batch = tensors[0].device, sample.shape[0]
    columns = [torch.as_tensor(value, dtype=torch.float64, device=device).expand(batch) for value in values]
    return _Numbers((0.0,) * 5, torch.stack(columns, dim=1).to(torch.float32).to(sample.device))


def _columns(numbers: _Numbers, like: Tensor) -> tuple[Scalar, Scalar]:
    if numbers.table is None:
        return numbers.floats[0], numbers.floats[1]
    shape = (-1, *([1] * (like.ndim - 1)))
    return numbers.table[:, 0].reshape(shape), numbers.table[:, 1].reshape(shape)


def _power_of_two(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()


def _on_device(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(x.device)
