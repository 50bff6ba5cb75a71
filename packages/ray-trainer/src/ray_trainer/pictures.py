"""Pictures on the driver: mostly references to arrays in Ray's store, which only reward workers fetch."""

from __future__ import annotations

from typing import Any

import torch
from image_rewards.loop import Stored


def fetched(pictures: Any) -> torch.Tensor:
    """uint8 [B, …] of a batch's `responses`, brought here where they are references; the latents where nothing was decoded."""
    if isinstance(pictures, torch.Tensor):
        return pictures
    import ray

    rows: list[Stored] = list(pictures)
    references = list(dict.fromkeys(row.reference for row in rows))
    stores = dict(zip(references, ray.get(references), strict=True))
    shown = {reference: arrays.get("pixels", arrays.get("latents")) for reference, arrays in stores.items()}
    return torch.stack([torch.from_numpy(shown[row.reference][row.row].copy()) for row in rows])
