"""Log-probability of a transition, as the MEAN over latent elements (every public trainer means, none sums).

Forms, by name:
    density               ⟨-(x_u - mean)² / (2 S²) - ln S - ½ ln 2π⟩   default of the SDE kinds and ddim
    density_no_constants  ⟨-(x_u - mean)² / (2 S²)⟩                    the same ratios, as MixGRPO's Dance step has it
    squared_error         ⟨-(x_u - mean)²⟩                             default of flow_cps, after the paper's code

`squared_error` is no density: its "ratios" are tempered by 2 S², and a clip range does not carry over from the others.
A sample whose S is 0 (or below `LEAST_NOISE`) has no density; under the first two forms its entry is exactly 0, without a gradient.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor

from .coefficients import Scalar
from .errors import SamplerError
from .kinds import LOG_PROB_FORMS, Kind, LogProbForm, find_kind

HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)
LEAST_NOISE = 2.0**-126
"""The smallest normal float32. Less noise than this does not move a float32 sample, and its square may be 0."""


def check_form(form: str | None, kind: Kind) -> LogProbForm:
    """The form to use: the kind's default for None."""
    form = find_kind(kind).log_prob_form if form is None else form
    if form not in LOG_PROB_FORMS:
        raise SamplerError(
            f"log_prob_form={form!r} is unknown; choose one of {', '.join(LOG_PROB_FORMS)}, or None for the kind's own"
        )
    return cast(LogProbForm, form)


def log_prob_terms(std: Scalar, elements: int, form: LogProbForm) -> tuple[Scalar, Scalar]:
    """(offset, weight) with `log_prob = offset - weight * Σ (x_u - mean)²`, the sum over one sample's elements."""
    if form == "squared_error":
        return 0.0, 1.0 / elements
    if isinstance(std, Tensor) and std.device.type == "cpu":
        rows = [log_prob_terms(value, elements, form) for value in std.tolist()]
        offsets, weights = zip(*rows, strict=True)
        return torch.tensor(offsets, dtype=torch.float64), torch.tensor(weights, dtype=torch.float64)
    if isinstance(std, Tensor):
        noisy = std >= LEAST_NOISE
        safe = torch.where(noisy, std, 1.0)
        weight = torch.where(noisy, 1 / (2 * elements * safe * safe), 0.0)
        offset = torch.where(noisy, -torch.log(safe) - HALF_LOG_TWO_PI, 0.0) if form == "density" else weight * 0
        return offset, weight
    if std < LEAST_NOISE:
        return 0.0, 0.0
    offset_number = -math.log(std) - HALF_LOG_TWO_PI if form == "density" else 0.0
    return offset_number, 1 / (2 * elements * std * std)


def log_prob_of(squares: Tensor, std: Scalar, elements: int, form: LogProbForm) -> Tensor:
    """[B] fp32 from `squares` [B], the sum of (x_u - mean)² over each sample's elements."""
    total = squares.double()
    offset, weight = (
        value.to(total.device) if isinstance(value, Tensor) else value for value in log_prob_terms(std, elements, form)
    )
    return (offset - weight * total).to(torch.float32)


def gaussian_log_prob(x: Tensor, mean: Tensor, std: Tensor | float, *, form: LogProbForm = "density") -> Tensor:
    """[B] fp32 log-prob of `x` [B, ...] under N(mean, std² I); `std` a number or [B], gradient through every argument.

    For losses that rebuild a log-prob from stored means; `sde_step` computes its own.
    """
    difference = (x.float() - mean.float()).flatten(1)
    if form == "squared_error":
        return -difference.square().mean(dim=1)
    std_ = torch.as_tensor(std, dtype=torch.float32, device=x.device).reshape(-1)
    log_prob = -difference.square().mean(dim=1) / (2 * std_.square())
    return log_prob - std_.log() - HALF_LOG_TWO_PI if form == "density" else log_prob
