"""Several LoRAs as one LoRA of a fused layer, and back.

Fusing n LoRAs of rank r stacks their A's to [n·r, in] and puts their B's on the block diagonal of [Σ out, n·r]; with alpha
n·alpha the scale stays alpha / r, so nothing is rounded. Splitting undoes that. A LoRA that was trained on the fused layer is
split otherwise: every slice gets the whole A and its own rows of B.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from .errors import ExportError, PayloadError


@dataclass(frozen=True)
class Piece:
    """A [r, in], B [out, r] and alpha of one layer."""

    down: Tensor
    up: Tensor
    alpha: float


def fuse(layer: str, widths: tuple[int, ...], pieces: Mapping[int, Piece]) -> Piece:
    """One layer from its slices (by index); a slice that was not adapted stays zero. Raises `ExportError`."""
    index, first = next(iter(pieces.items()))
    rank, count = first.down.shape[0], len(widths)
    if any(p.down.shape[0] != rank or p.alpha != first.alpha for p in pieces.values()):
        raise ExportError(
            f"{layer!r} is one weight there; its slices have ranks {[p.down.shape[0] for p in pieces.values()]} and alphas "
            f"{[p.alpha for p in pieces.values()]}. Use one rank and one alpha for them, or export another format."
        )
    unit = first.up.shape[0] // widths[index]
    rows = [unit * width for width in widths]
    down = first.down.new_zeros(count * rank, first.down.shape[1])
    up = first.up.new_zeros(sum(rows), count * rank)
    for i, piece in pieces.items():
        if piece.up.shape[0] != rows[i] or piece.down.shape[1] != down.shape[1]:
            raise ExportError(
                f"{layer!r}: slice {i} has {piece.up.shape[0]} rows, {rows[i]} expected from slice {index}."
            )
        start = sum(rows[:i])
        down[i * rank : (i + 1) * rank] = piece.down
        up[start : start + rows[i], i * rank : (i + 1) * rank] = piece.up
    return Piece(down, up, first.alpha * count)


def split(key: str, piece: Piece, widths: tuple[int, ...]) -> dict[int, Piece]:
    """Slices of one layer, by index; slices that are all zero are left out."""
    count, total = len(widths), sum(widths)
    if piece.up.shape[0] % total:
        raise PayloadError(f"{key!r} has {piece.up.shape[0]} rows, which do not divide as {widths!r}.")
    unit, rank = piece.up.shape[0] // total, piece.down.shape[0]
    blocks = piece.up.split([unit * width for width in widths])
    if rank % count or not _block_diagonal(blocks, rank // count):
        return {i: Piece(piece.down.clone(), block.clone(), piece.alpha) for i, block in enumerate(blocks)}
    own = rank // count
    slices = {
        i: Piece(
            piece.down[i * own : (i + 1) * own].clone(), block[:, i * own : (i + 1) * own].clone(), piece.alpha / count
        )
        for i, block in enumerate(blocks)
    }
    return {i: s for i, s in slices.items() if s.down.any() or s.up.any()}  # all zero: filler for an unadapted slice


def _block_diagonal(blocks: Sequence[Tensor], rank: int) -> bool:
    return all(
        not block[:, : i * rank].any() and not block[:, (i + 1) * rank :].any() for i, block in enumerate(blocks)
    )
