"""Fused step for CUDA (placeholder until the kernel lands): reports itself unavailable."""

from __future__ import annotations

import torch
from torch import Tensor

from .coefficients import Scalar, StepCoefficients


def why_unavailable(sample: Tensor) -> str | None:
    return "the fused kernel is not built yet"


def wins(sample: Tensor) -> bool:
    return False


def fused_step(
    sample: Tensor,
    velocity: Tensor,
    noise: Tensor | None,
    target: Tensor | None,
    coefficients: StepCoefficients,
    terms: tuple[Scalar, Scalar],
    storage_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    raise NotImplementedError


def fused_mean(sample: Tensor, velocity: Tensor, coefficients: StepCoefficients) -> Tensor:
    raise NotImplementedError
