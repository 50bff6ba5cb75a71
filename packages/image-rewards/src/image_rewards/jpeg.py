"""How many kilobytes a picture takes as a JPEG, as in DDPO (Black et al., 2023, arXiv:2305.13301).

They need no target and no model. `jpeg_compressibility` rewards small files (flat, smooth pictures),
`jpeg_incompressibility` large ones (noise, texture).
"""

from __future__ import annotations

import io
from typing import ClassVar

import numpy as np
from PIL import Image

from .base import PerSampleReward, RewardResult, RewardSample
from .errors import require


def jpeg_kilobytes(image: np.ndarray, quality: int = 95) -> float:
    """Size in kB (1000 bytes) of `image`, uint8 [3,H,W], as a baseline JPEG."""
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0))).save(buffer, format="JPEG", quality=quality)
    return buffer.tell() / 1000


class JpegIncompressibility(PerSampleReward):
    """score = kilobytes of the JPEG."""

    name = "jpeg_incompressibility"
    sign: ClassVar[float] = 1.0

    def __init__(self, quality: int = 95) -> None:
        require(1 <= quality <= 95, f"quality={quality!r} is out of range. JPEG quality goes from 1 to 95.")
        self.quality = quality

    def score_one(self, sample: RewardSample) -> RewardResult:
        size = jpeg_kilobytes(sample.image, self.quality)
        return RewardResult(self.sign * size, {"jpeg_kb": size})


class JpegCompressibility(JpegIncompressibility):
    """score = minus kilobytes of the JPEG."""

    name = "jpeg_compressibility"
    sign = -1.0
