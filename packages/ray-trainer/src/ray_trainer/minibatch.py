"""How a step's samples are split: over training processes, and into the mini-batches of its optimizer steps."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from tensordict import TensorDict


def split_rows(batch: TensorDict, parts: int) -> list[TensorDict]:
    """`parts` batches of equal size, in order; the caller has checked that the size divides."""
    return list(batch.split(batch.batch_size[0] // parts, dim=0)) if parts > 1 else [batch]


def mini_batches(rows: int, size: int, *, epochs: int, shuffle: bool, seed: int) -> Iterator[torch.Tensor]:
    """Row numbers of each mini-batch, epoch after epoch; the order depends on `seed` alone."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        order = torch.randperm(rows, generator=generator) if shuffle else torch.arange(rows)
        yield from order.split(size)
