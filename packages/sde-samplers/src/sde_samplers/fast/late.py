"""The mean on request: a loss that reads only the log-prob never needs it in memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..coefficients import StepCoefficients
from ..errors import SamplerError


def late_mean(
    compute: Callable[[Tensor, Tensor, StepCoefficients], Tensor],
    sample: Tensor,
    velocity: Tensor,
    coefficients: StepCoefficients,
) -> Callable[[], Tensor]:
    """`compute(sample, velocity, coefficients)` later, as if it had run now: the same inputs, the same grad mode."""
    versions, with_grad = _versions(sample, velocity), torch.is_grad_enabled()

    def mean() -> Tensor:
        if versions != _versions(sample, velocity):
            raise SamplerError(
                "SdeStep.mean is first read after sample or velocity changed in place; read it before that"
            )
        with torch.set_grad_enabled(with_grad):
            return compute(sample, velocity, coefficients)

    return mean


def _versions(sample: Tensor, velocity: Tensor) -> tuple[int, int] | None:
    if sample.is_inference() or velocity.is_inference():
        return None
    return sample._version, velocity._version
