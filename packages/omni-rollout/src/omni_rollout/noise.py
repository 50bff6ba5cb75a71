"""The noise that samples start from: each its own, or one for the group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from sde_samplers import initial_noise, sample_generator
from torch import Tensor

from .errors import RolloutConfigError
from .types import GenerationRequest, Kept


def generators_of(rows: Sequence[GenerationRequest]) -> list[torch.Generator]:
    """One generator per sample, for its start and then for its steps."""
    return [sample_generator(row.seed, row.uid, row.index) for row in rows]


def start_noise(
    rows: Sequence[GenerationRequest], generators: list[torch.Generator], shape: torch.Size | tuple[int, ...]
) -> Tensor:
    """[B, …] fp32 on the CPU. A row with `shared_noise` starts where sample 0 of its group starts.

    Every generator is drawn from, also where its draw is not used: so the noise of the steps is a sample's own, the same
    with shared starts and without, and index 0 does not meet its start again as step noise.
    """
    noise = initial_noise(generators, tuple(shape))
    starts: dict[tuple[int, str], Tensor] = {}
    for i, row in enumerate(rows):
        if row.settings.shared_noise and row.index != 0:
            group = (row.seed, row.uid)
            if group not in starts:
                starts[group] = initial_noise([sample_generator(*group, 0)], tuple(shape))[0]
            noise[i] = starts[group]
    return noise


def clean_latents(given: Tensor | Kept | None, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """Latents […] of the picture that an edit begins from, fp32. Raises `RolloutConfigError` when they do not fit."""
    size = tuple(given.shape) if isinstance(given, Tensor) else None
    if not isinstance(given, Tensor) or size != tuple(shape):
        raise RolloutConfigError(f"init_latents {size} do not fit: this size of picture needs {tuple(shape)}.")
    return given.float()
