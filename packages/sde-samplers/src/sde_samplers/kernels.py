"""The fused step: one pass over memory for the new sample and its log-prob, with its gradient.

Least traffic per element in fp32: drawing reads x, v and noise and writes the sample (16 bytes); scoring reads x, v and
the sample (12 bytes) and writes only [B] numbers; the backward pass reads the same three and writes the gradient of v.
The mean is not among the outputs: `SdeStep.mean` computes it when something asks for it.

`steps.take_step` decides between this and `plain.plain_step`; both follow the same formulas and agree within fp32
rounding (the sample to the bit). The kernels themselves are in `triton_kernels.py`.
"""

from __future__ import annotations

import contextlib
import importlib.util
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .coefficients import Scalar, StepCoefficients

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MIN_ELEMENTS = 1  # of the whole batch; the README shows that the kernel wins at every size that was measured
_ROUND_TO = {None: "none", torch.float32: "none", torch.bfloat16: "bf16", torch.float16: "fp16"}


@cache
def _triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def why_unavailable(sample: Tensor, *others: Tensor | None) -> str | None:
    """Why the fused step cannot run on these tensors, or None when it can."""
    if not sample.is_cuda:
        return f"the tensors are on {sample.device}, and the kernel runs on CUDA"
    if not _triton_installed():
        return "triton is not installed (it comes with the CUDA builds of torch)"
    for tensor in (sample, *others):
        if tensor is not None and tensor.dtype not in DTYPES:
            return f"{tensor.dtype} is not one of the kernel's dtypes fp32, bf16, fp16"
    if sample.numel() // sample.shape[0] >= 2**31:
        return "one sample has 2**31 elements or more"
    return None


def wins(sample: Tensor, *others: Tensor | None) -> bool:
    """Whether the fused step is the faster choice, by device, dtype and size only, so rollout and replay agree."""
    return why_unavailable(sample, *others) is None and sample.numel() >= MIN_ELEMENTS


class _Launch(NamedTuple):
    """How a batch is cut into programs, and its coefficients as the kernels take them."""

    grid: tuple[int, int]
    block: int
    warps: int
    elements: int
    blocks: int
    per_sample: bool
    table: Tensor
    scalars: tuple[float, float, float]


class _FusedStep(torch.autograd.Function):
    """(sample, velocity) -> (prev_sample, log_prob, std); the twin of `plain.PlainStep`."""

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
    ) -> tuple[Tensor, Tensor, Tensor]:
        from . import triton_kernels

        x, v = sample.contiguous(), velocity.contiguous()
        draw = noise is not None
        source = (noise if noise is not None else target).contiguous()  # type: ignore[union-attr]
        launch = _launch(x, coefficients)
        batch = x.shape[0]
        prev = torch.empty(x.shape, dtype=torch.float32, device=x.device) if draw else source
        partial = torch.empty((batch, launch.blocks), dtype=torch.float32, device=x.device)
        numbers = torch.empty((2, batch), dtype=torch.float32, device=x.device)
        final = (*terms, coefficients.std)
        final_per_sample = any(isinstance(value, Tensor) for value in final)
        with _on_device(x):
            triton_kernels.step_kernel[launch.grid](
                x,
                v,
                source,
                prev,
                partial,
                launch.table,
                *launch.scalars,
                launch.elements,
                launch.blocks,
                PER_SAMPLE=launch.per_sample,
                DRAW=draw,
                ROUND_TO=_ROUND_TO[storage_dtype] if draw else "none",
                BLOCK=launch.block,
                num_warps=launch.warps,
                enable_fp_fusion=False,
            )
            triton_kernels.finish_kernel[(batch,)](
                partial,
                numbers,
                _table(final, batch, x.device) if final_per_sample else numbers,
                *((0.0, 0.0, 0.0) if final_per_sample else final),
                launch.blocks,
                PER_SAMPLE=final_per_sample,
                BLOCK=min(1024, _power_of_two(launch.blocks)),
                num_warps=4,
                enable_fp_fusion=False,
            )
        ctx.save_for_backward(x, v, prev)
        ctx.coefficients, ctx.weight = coefficients, terms[1]
        ctx.set_materialize_grads(False)
        drawn = prev if draw else prev.detach()
        log_prob, std = numbers.unbind()
        ctx.mark_non_differentiable(drawn, std)
        return drawn, log_prob, std

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor | None, grad_log_prob: Tensor | None, __: Tensor | None) -> tuple[Any, ...]:
        if grad_log_prob is None:
            return (None,) * 7
        from . import triton_kernels

        x, v, prev = ctx.saved_tensors
        needs_x, needs_v = ctx.needs_input_grad[:2]
        launch = _launch(x, ctx.coefficients)
        upstream = (2 * ctx.weight * grad_log_prob.double()).float().contiguous()
        grad_x = torch.empty_like(x) if needs_x else None
        grad_v = torch.empty_like(v) if needs_v else None
        with _on_device(x):
            triton_kernels.grad_kernel[launch.grid](
                x,
                v,
                prev,
                upstream,
                x if grad_x is None else grad_x,
                v if grad_v is None else grad_v,
                launch.table,
                *launch.scalars[:2],
                launch.elements,
                PER_SAMPLE=launch.per_sample,
                NEEDS_X=needs_x,
                NEEDS_V=needs_v,
                BLOCK=launch.block,
                num_warps=launch.warps,
                enable_fp_fusion=False,
            )
        return grad_x, grad_v, None, None, None, None, None


class _FusedMean(torch.autograd.Function):
    """(sample, velocity) -> mean."""

    @staticmethod
    def forward(ctx: Any, sample: Tensor, velocity: Tensor, coefficients: StepCoefficients) -> Tensor:
        from . import triton_kernels

        x, v = sample.contiguous(), velocity.contiguous()
        launch = _launch(x, coefficients)
        mean = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        with _on_device(x):
            triton_kernels.mean_kernel[launch.grid](
                x,
                v,
                mean,
                launch.table,
                *launch.scalars[:2],
                launch.elements,
                PER_SAMPLE=launch.per_sample,
                BLOCK=launch.block,
                num_warps=launch.warps,
                enable_fp_fusion=False,
            )
        ctx.coefficients, ctx.dtypes = coefficients, (sample.dtype, velocity.dtype)
        return mean

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_mean: Tensor) -> tuple[Any, ...]:
        scale_x, scale_v, _ = (_rows(value, grad_mean) for value in ctx.coefficients)
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
    """(prev_sample [B, ...] fp32 detached, log_prob [B] fp32 with gradient, std [B] fp32), from noise or a target."""
    prev, log_prob, std = _FusedStep.apply(sample, velocity, noise, target, coefficients, terms, storage_dtype)
    return prev.detach().to(torch.float32), log_prob, std


def fused_mean(sample: Tensor, velocity: Tensor, coefficients: StepCoefficients) -> Tensor:
    """`scale_x * x + scale_v * v`, [B, ...] fp32, with gradient."""
    return _FusedMean.apply(sample, velocity, coefficients)  # type: ignore[no-any-return]


def _launch(x: Tensor, coefficients: StepCoefficients) -> _Launch:
    batch = x.shape[0]
    elements = x.numel() // batch
    block, warps = block_size(elements)
    blocks = -(-elements // block)
    per_sample = any(isinstance(value, Tensor) for value in coefficients)
    table = _table(coefficients, batch, x.device) if per_sample else x  # any pointer will do when it is not read
    scalars = (0.0, 0.0, 0.0) if per_sample else tuple(float(value) for value in coefficients)
    return _Launch((blocks, batch), block, warps, elements, blocks, per_sample, table, scalars)  # type: ignore[arg-type]


def block_size(elements: int) -> tuple[int, int]:
    """(elements per program, warps). A function of the sample's size alone: the sum's order must not vary otherwise."""
    if elements >= 1 << 20:
        return 4096, 8
    return min(2048, max(256, _power_of_two(elements))), 4


def _table(values: tuple[Scalar, ...], batch: int, device: torch.device) -> Tensor:
    columns = [torch.as_tensor(value, dtype=torch.float64, device=device).expand(batch) for value in values]
    return torch.stack(columns, dim=1).float()


def _rows(value: Scalar, like: Tensor) -> Scalar:
    return value.float().reshape(-1, *([1] * (like.ndim - 1))) if isinstance(value, Tensor) else value


def _power_of_two(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()


def _on_device(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()
