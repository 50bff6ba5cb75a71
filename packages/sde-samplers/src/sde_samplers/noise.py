"""Randomness that belongs to a sample: one generator from (seed, uid, index).

The same sample draws the same numbers whatever the batch it sits in, its position, the number of replicas or devices.
Generators live on the CPU unless asked otherwise, so the values do not depend on the accelerator either.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from .errors import SamplerError

Generators = torch.Generator | Sequence[torch.Generator] | None


def seed_of(*parts: int | str) -> int:
    """A seed of 63 bits, which every device takes, from all that the numbers shall depend on.

    The parts are hashed together, so neighbouring seeds or steps give unrelated streams.
    """
    digest = hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def sample_generator(seed: int, uid: str, index: int, device: torch.device | str = "cpu") -> torch.Generator:
    """The generator of sample `index` of the prompt `uid` under the run's `seed`."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise SamplerError(f"seed={seed!r} must be an integer")
    if isinstance(index, bool) or not isinstance(index, int) or index < 0:
        raise SamplerError(f"index={index!r} must be the sample's number in its group, an integer from 0")
    return torch.Generator(device=device).manual_seed(seed_of(seed, uid, index))


def initial_noise(
    generators: Sequence[torch.Generator], shape: Sequence[int], device: torch.device | str | None = None
) -> Tensor:
    """Standard normal [B, *shape] fp32, row b from `generators[b]`, moved to `device` after drawing."""
    if isinstance(generators, torch.Generator) or len(generators) == 0:
        raise SamplerError(f"generators={generators!r}: pass a sequence with one torch.Generator per sample")
    drawn = torch.stack([_draw(tuple(shape), g) for g in generators])
    return drawn if device is None else drawn.to(device)


def draw_noise(like: Tensor, generators: Generators, rows: Tensor | None = None) -> Tensor:
    """Standard normal fp32 of the shape and device of `like` [B, ...].

    Args:
        generators: one per sample (row b from `generators[b]`); a single one (one draw for the whole batch, as `torch.randn`
            does); or None for torch's default generator of the device, which is not reproducible per sample.
        rows: [B] bool, whose noise is wanted where each sample has a generator: the others' are not drawn from.
    """
    if generators is None:
        return torch.randn(like.shape, dtype=torch.float32, device=like.device)
    if isinstance(generators, torch.Generator):
        return _draw(tuple(like.shape), generators).to(like.device)
    if len(generators) != like.shape[0]:
        raise SamplerError(
            f"{len(generators)} generators for a batch of {like.shape[0]} samples; pass exactly one per sample"
        )
    wanted = [True] * len(generators) if rows is None else rows.tolist()
    shape = tuple(like.shape[1:])
    drawn = [
        _draw(shape, g) if on else torch.zeros(shape, device=g.device) for g, on in zip(generators, wanted, strict=True)
    ]
    return torch.stack(drawn).to(like.device)


def _draw(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, dtype=torch.float32, device=generator.device, generator=generator)
