"""The step of `steps.reference_step` with less traffic to memory: the same arguments, the same numbers.

    kernels   one fused Triton kernel, on CUDA
    chunks    a large batch on a CPU, piece by piece through the cache

A small batch on a CPU gains nothing here, so the reference itself takes it. Nothing outside this folder depends on it but one call
in `steps.take_step`.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ..errors import SamplerError
from ..types import SdeStep
from . import chunks, kernels


def pick(fused: bool | None, sample: Tensor, *others: Tensor | None) -> Callable[..., SdeStep] | None:
    """The fast step for these tensors, or None where the reference is as fast or the only one.

    It looks at device, dtype and shape alone, so that a rollout and its replay take the same way.

    Args:
        fused: as in `sde_step`.

    Raises:
        SamplerError: fused=True, and the kernel cannot run on these tensors.
    """
    if fused is False:
        return None
    reason = kernels.why_unavailable(sample, *others)
    if reason is None:
        return kernels.step
    if fused:
        raise SamplerError(f"fused=True, but {reason}; pass fused=None to fall back to plain torch")
    return chunks.step if sample.device.type == "cpu" and sample.numel() > chunks.CPU_CHUNK else None
