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


CELLS = 4
"""Of each side in the coarse colours of `look_of`."""


def look_of(image: np.ndarray) -> tuple[float, ...]:
    """Numbers that show a collapse of pictures, cheap at any size: saturation, sharpness, and coarse colours, all of 0 to 1.

    Args:
        image: uint8 [3,H,W]; of a video [T,3,H,W] the frame in the middle.

    Returns:
        Mean of (largest - smallest) colour channel; mean step of the luma between neighbours; and the mean colour of
        CELLS x CELLS parts of the picture.
    """
    frame = image[len(image) // 2] if image.ndim == 4 else image
    thin = frame[:, :: max(frame.shape[1] // 256, 1), :: max(frame.shape[2] // 256, 1)].astype(np.float32) / 255
    saturation = float((thin.max(0) - thin.min(0)).mean())
    # Of pixels as they are: thinned ones are no neighbours.
    luma = frame[:, :256, :256].astype(np.float32).mean(0) / 255
    steps = [np.abs(np.diff(luma, axis=axis)).mean() for axis in (0, 1) if luma.shape[axis] > 1]
    rows, columns = (np.array_split(np.arange(size), CELLS) for size in thin.shape[1:])
    cells = [
        thin[:, r[0] : r[-1] + 1, c[0] : c[-1] + 1].mean((1, 2)) for r in rows for c in columns if len(r) and len(c)
    ]
    return saturation, float(np.mean(steps)) if steps else 0.0, *np.concatenate(cells).tolist()
