"""Norm of the heads, rotary embedding, and text and image joined, as one kernel: Qwen-Image's queries and keys without gradient.

The compiler makes three kernels of it, which read and write a tensor of the image's size nine times in bf16's measure; this one
reads it once and writes it once. Arithmetic is that of the compiled blocks: fp32 from the product's output to the rotated number.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _pairs(pointer, mask):  # type: ignore[no-untyped-def]
    """Two neighbouring bf16 numbers from each 32 bits, as fp32."""
    both = tl.load(pointer, mask=mask, other=0)
    return (both << 16).to(tl.float32, bitcast=True), (both & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _kernel(
    text, image, text_norm, image_norm, text_angle, image_angle, out, T, S, eps,
    H: tl.constexpr, PAIRS: tl.constexpr, HEADS: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    row, token = tl.program_id(0).to(tl.int64), tl.program_id(1)
    of_text = token < T
    pair = tl.arange(0, PAIRS)[None, :]
    place = tl.arange(0, HEADS)[:, None] * PAIRS + pair
    inside = place < H * PAIRS
    # One of the two is masked away and costs nothing.
    a, b = _pairs(text + (row * T + token) * H * PAIRS + place, inside & of_text)
    c, d = _pairs(image + (row * S + token - T) * H * PAIRS + place, inside & (token >= T))
    a, b = a + c, b + d
    scale = tl.rsqrt(tl.sum(a * a + b * b, axis=1) / (2 * PAIRS) + eps)[:, None]
    e, f = _pairs(text_norm + pair, of_text & (pair >= 0))
    g, h = _pairs(image_norm + pair, (token >= T) & (pair >= 0))
    a, b = a * scale * (e + g), b * scale * (f + h)
    angle = 2 * (token * PAIRS + pair)
    cos = tl.load(text_angle + angle, mask=of_text & (pair >= 0), other=0.0)
    sin = tl.load(text_angle + angle + 1, mask=of_text & (pair >= 0), other=0.0)
    angle -= 2 * T * PAIRS
    cos += tl.load(image_angle + angle, mask=(token >= T) & (pair >= 0), other=0.0)
    sin += tl.load(image_angle + angle + 1, mask=(token >= T) & (pair >= 0), other=0.0)
    low = (a * cos - b * sin).to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 65535
    high = (a * sin + b * cos).to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) << 16
    tl.store(out + (row * (T + S) + token) * H * PAIRS + place, low | high, mask=inside)


@torch.library.custom_op("fsdp_diffusers_engine::joined_heads", mutates_args=())
def joined_heads(
    text: Tensor,
    image: Tensor,
    text_norm: Tensor,
    image_norm: Tensor,
    text_angle: Tensor,
    image_angle: Tensor,
    eps: float,
) -> Tensor:
    """[B, T + S, H, D] bf16, text first.

    Args:
        text, image: [B, T, H · D] and [B, S, H · D] bf16, as the projections give them.
        text_norm, image_norm: weights of the heads' RMS norms, [D] bf16.
        text_angle, image_angle: cosine and sine of each pair of channels, [T, D/2, 2] and [S, D/2, 2] fp32.
        eps: of the norms.
    """
    B, T, _ = text.shape
    S, D = image.shape[1], len(text_norm)
    heads = image.shape[2] // D
    out = torch.empty(B, T + S, heads, D, dtype=text.dtype, device=text.device)
    words = [each.contiguous().view(torch.int32) for each in (text, image, text_norm, image_norm)]
    angles = [each.contiguous() for each in (text_angle, image_angle)]
    shape = {"H": heads, "PAIRS": D // 2, "HEADS": triton.next_power_of_2(heads)}
    _kernel[(B, T + S)](*words, *angles, out.view(torch.int32), T, S, eps, **shape, num_warps=4)
    return out


@joined_heads.register_fake
def _(text: Tensor, image: Tensor, text_norm: Tensor, *others: Any) -> Tensor:
    D = len(text_norm)
    return text.new_empty(len(text), text.shape[1] + image.shape[1], text.shape[2] // D, D)
