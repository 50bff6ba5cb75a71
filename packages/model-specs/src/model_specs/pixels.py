"""From a decoder's output to uint8 pixels, with the rounding of diffusers' `output_type="pil"`."""

from __future__ import annotations

import torch
from torch import Tensor


def to_uint8(image: Tensor) -> Tensor:
    """Map [-1, 1] to 0..255: clamp in the given dtype, then scale and round half-to-even in fp32. Any shape."""
    return image.mul(0.5).add_(0.5).clamp_(0, 1).float().mul_(255).round_().to(torch.uint8)
