"""The step of `steps.reference_step` in one pass over memory, on CUDA: the same arguments, the same numbers.

Nothing outside this folder depends on it but one call in `steps.take_step`.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ..errors import SamplerError
from ..types import SdeStep
from . import kernels


def pick(
    fused: bool | None, sample: Tensor, velocity: Tensor, noise: Tensor | None, prev_sample: Tensor | None
) -> Callable[..., SdeStep] | None:
    """The fused step for these tensors, or None where the reference is the only one, or as fast (a step without noise).

    It looks at device, dtype and shape alone, so that a rollout and its replay take the same way.

    Args:
        fused: as in `sde_step`.

    Raises:
        SamplerError: fused=True, and the kernel cannot run on these tensors.
    """
    if fused is False:
        return None
    reason = kernels.why_unavailable(sample, velocity, noise, prev_sample)
    if reason is None:
        return None if noise is None and prev_sample is None else kernels.step
    if fused:
        raise SamplerError(f"fused=True, but {reason}; pass fused=None to fall back to plain torch")
    return None
