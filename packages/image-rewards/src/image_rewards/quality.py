"""Guards: numbers that show when a policy wins a reward by ruining the picture.

A reward that reads one thing (text, objects) says nothing about the rest of the picture. Put these cheap measures beside
it as components, or in a `combine` with weight 0 and a threshold.
"""

from __future__ import annotations

import numpy as np

from .base import PerSampleReward, RewardResult, RewardSample

BLANK_CONTRAST = 2.0  # grey levels; a picture with less spread than this shows nothing


def quality_components(image: np.ndarray) -> dict[str, float]:
    """sharpness, contrast, blank of `image`, uint8 [3,H,W].

    sharpness  standard deviation of the 4-neighbour Laplacian of the luma, in grey levels
    contrast   standard deviation of the luma, in grey levels
    blank      1.0 when contrast is below 2 grey levels, else 0.0
    """
    r, g, b = np.ascontiguousarray(image, dtype=np.float32)  # memory order would change the sums' last bits
    luma = 0.299 * r + 0.587 * g + 0.114 * b
    contrast = float(luma.std(dtype=np.float64))
    sharpness = 0.0
    if min(luma.shape) >= 3:
        centre = luma[1:-1, 1:-1]
        laplacian = luma[:-2, 1:-1] + luma[2:, 1:-1] + luma[1:-1, :-2] + luma[1:-1, 2:] - 4 * centre
        sharpness = float(laplacian.std(dtype=np.float64))
    return {"sharpness": sharpness, "contrast": contrast, "blank": float(contrast < BLANK_CONTRAST)}


class SharpnessReward(PerSampleReward):
    """score = sharpness; components sharpness, contrast, blank."""

    name = "sharpness"

    def score_one(self, sample: RewardSample) -> RewardResult:
        components = quality_components(sample.image)
        return RewardResult(components["sharpness"], components)
