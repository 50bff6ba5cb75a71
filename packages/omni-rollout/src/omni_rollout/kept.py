"""Clean latents that lie in another process until a request that begins from them is drawn.

Whoever asks for an edit says where its latents are and never holds them: they go from the process that keeps the picture's row
to the one that draws the edit. A call takes the arrays as arguments of their own, since Ray fetches arguments alone, and only
where the call runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .types import GenerationRequest, Kept

if TYPE_CHECKING:
    import numpy as np


def by_number(requests: Sequence[GenerationRequest]) -> tuple[list[GenerationRequest], list[Any]]:
    """The requests, whose `Kept` latents name their array by number, and the references to these arrays."""
    starts = [request.init_latents for request in requests]
    known = {start.reference: None for start in starts if isinstance(start, Kept)}
    number = {reference: place for place, reference in enumerate(known)}
    bare = [
        request.replace(init_latents=Kept(number[start.reference], start.row)) if isinstance(start, Kept) else request
        for request, start in zip(requests, starts, strict=True)
    ]
    return bare, list(known)


def with_latents(requests: Sequence[GenerationRequest], arrays: Sequence[np.ndarray]) -> list[GenerationRequest]:
    """The requests of `by_number` with their latents."""
    import torch

    return [
        request.replace(init_latents=torch.from_numpy(arrays[start.reference][start.row].copy()))
        if isinstance(start := request.init_latents, Kept)
        else request
        for request in requests
    ]
