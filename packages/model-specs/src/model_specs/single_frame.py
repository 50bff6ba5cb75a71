"""Causal 3-D convolutions on one frame, as 2-D convolutions.

The Qwen-Image and Wan autoencoders pad time with zeros in front only. With one frame, all but the last temporal slice
of a kernel meet zeros, so a 2-D convolution with that slice gives the same sum at a third of the work: a decode on a
CPU takes less than a third of the time. The change is made on the modules of one loaded autoencoder, never on a class.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

_MARK = "_single_frame_ready"


def single_frame_convolutions(vae: nn.Module) -> nn.Module:
    """Let every causal convolution of this autoencoder take the short way when its input is one frame. Idempotent."""
    if not getattr(vae, _MARK, False):
        for module in vae.modules():
            if _is_causal(module):
                module.forward = MethodType(_forward, module)  # type: ignore[method-assign]
        setattr(vae, _MARK, True)
    return vae


def _is_causal(module: nn.Module) -> bool:
    """A stride-1-in-time Conv3d that pads exactly its kernel's reach in front and nothing behind."""
    padding = getattr(module, "_padding", None)
    return (
        isinstance(module, nn.Conv3d)
        and isinstance(padding, tuple)
        and len(padding) == 6
        and padding[4] == module.kernel_size[0] - 1
        and padding[5] == 0
        and module.stride[0] == 1
        and module.padding == (0, 0, 0)
    )


def _forward(self: Any, x: Tensor, cache_x: Tensor | None = None) -> Tensor:
    if x.shape[2] != 1 or cache_x is not None:
        return type(self).forward(self, x, cache_x)
    left, right, top, bottom = self._padding[:4]
    frame, padding = x[:, :, 0], (top, left)
    if (left, top) != (right, bottom):
        frame, padding = F.pad(frame, (left, right, top, bottom)), (0, 0)
    weight = self.weight[:, :, -1]
    return F.conv2d(frame, weight, self.bias, self.stride[1:], padding, self.dilation[1:], self.groups).unsqueeze(2)
