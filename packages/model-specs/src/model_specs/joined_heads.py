"""Norm of the heads, rotary embedding, and text and image joined, as one kernel: Qwen-Image's queries and keys; and Wan's, which
have no text beside them and are normed across all heads.

The compiler makes three kernels of it, which read and write a tensor of the image's size nine times in bf16's measure; this one
reads it once and writes it once; so does its gradient. Arithmetic is that of the compiled blocks: fp32 from the product's output to
the rotated number.
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
def _kernel(  # type: ignore[no-untyped-def]
    text, image, text_added, image_added, text_norm, image_norm, text_angle, image_angle, out, T, S, text_step, image_step, eps,
    ADDED: tl.constexpr, ACROSS: tl.constexpr, H: tl.constexpr, PAIRS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    token, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    of_text = token < T
    pair = tl.arange(0, PAIRS)[None, :]
    place = tl.arange(0, HEADS)[:, None] * PAIRS + pair
    inside = place < H * PAIRS
    # One of the two is masked away and costs nothing.
    a, b = _pairs(text + (row * T + token) * text_step + place, inside & of_text)
    c, d = _pairs(image + (row * S + token - T) * image_step + place, inside & (token >= T))
    a, b = a + c, b + d
    if ADDED:
        c, d = _pairs(text_added + (row * T + token) * H * PAIRS + place, inside & of_text)
        a, b = a + c, b + d
        c, d = _pairs(image_added + (row * S + token - T) * H * PAIRS + place, inside & (token >= T))
        a, b = (a + c).to(tl.bfloat16).to(tl.float32), (b + d).to(tl.bfloat16).to(tl.float32)
    square = tl.sum(a * a + b * b, axis=1)
    if ACROSS:
        scale = tl.rsqrt(tl.sum(square, axis=0) / (2 * PAIRS * H) + eps)
        e, f = _pairs(text_norm + place, inside & of_text)
        g, h = _pairs(image_norm + place, inside & (token >= T))
    else:
        scale = tl.rsqrt(square / (2 * PAIRS) + eps)[:, None]
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


@triton.jit
def _gradient(  # type: ignore[no-untyped-def]
    grad, text, image, text_norm, image_norm, text_angle, image_angle, grad_text, grad_image, T, S, eps,
    H: tl.constexpr, PAIRS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    token, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    of_text = token < T
    pair = tl.arange(0, PAIRS)[None, :]
    place = tl.arange(0, HEADS)[:, None] * PAIRS + pair
    inside = place < H * PAIRS
    here, there = (row * T + token) * H * PAIRS + place, (row * S + token - T) * H * PAIRS + place
    a, b = _pairs(text + here, inside & of_text)
    c, d = _pairs(image + there, inside & (token >= T))
    a, b = a + c, b + d
    scale = tl.rsqrt(tl.sum(a * a + b * b, axis=1) / (2 * PAIRS) + eps)[:, None]
    a, b = a * scale, b * scale
    angle = 2 * (token * PAIRS + pair)
    cos = tl.load(text_angle + angle, mask=of_text & (pair >= 0), other=0.0)
    sin = tl.load(text_angle + angle + 1, mask=of_text & (pair >= 0), other=0.0)
    angle -= 2 * T * PAIRS
    cos += tl.load(image_angle + angle, mask=(token >= T) & (pair >= 0), other=0.0)
    sin += tl.load(image_angle + angle + 1, mask=(token >= T) & (pair >= 0), other=0.0)
    e, f = _pairs(text_norm + pair, of_text & (pair >= 0))
    g, h = _pairs(image_norm + pair, (token >= T) & (pair >= 0))
    p, q = _pairs(grad + (row * (T + S) + token) * H * PAIRS + place, inside)
    p, q = (p * cos + q * sin) * (e + g), (q * cos - p * sin) * (f + h)  # of the normed numbers
    along = tl.sum(p * a + q * b, axis=1)[:, None] / (2 * PAIRS)
    low = ((p - a * along) * scale).to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 65535
    high = ((q - b * along) * scale).to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) << 16
    tl.store(grad_text + here, low | high, mask=inside & of_text)
    tl.store(grad_image + there, low | high, mask=inside & (token >= T))


def _words(*tensors: Tensor) -> list[Tensor]:
    return [each.contiguous().view(torch.int32) for each in tensors]


def _tokens(heads: Tensor) -> tuple[Tensor, int]:
    """32-bit words of [B, N, H · D], and how many lie between two tokens: more than one has, in a slice of a joint projection."""
    step = heads.stride(1)
    if heads.stride() != (heads.shape[1] * step, step, 1) or step % 2 or heads.storage_offset() % 2:
        heads, step = heads.contiguous(), heads.shape[2]
    return heads.view(torch.int32), step // 2


def _grid(heads: Tensor) -> tuple[int, int]:
    """A program for each token. CUDA takes up to 65,535 along the second axis, and a video has more tokens."""
    return heads.shape[1], heads.shape[0]


def _shape(image: Tensor, norm: Tensor) -> dict[str, int]:
    heads = image.shape[2] // len(norm)
    return {"H": heads, "PAIRS": len(norm) // 2, "HEADS": triton.next_power_of_2(heads)}


@torch.library.custom_op("model_specs::joined_heads", mutates_args=())
def joined_heads(
    text: Tensor,
    image: Tensor,
    text_norm: Tensor,
    image_norm: Tensor,
    text_angle: Tensor,
    image_angle: Tensor,
    eps: float,
) -> Tensor:
    """[B, T + S, H, D] bf16, text first. Gradients go to `text` and `image` alone.

    Args:
        text, image: [B, T, H · D] and [B, S, H · D] bf16, as the projections give them.
        text_norm, image_norm: weights of the heads' RMS norms, [D] bf16.
        text_angle, image_angle: cosine and sine of each pair of channels, [T, D/2, 2] and [S, D/2, 2] fp32.
        eps: of the norms.
    """
    rest = text_norm, image_norm, text_angle, image_angle, eps
    return _joined(text, image, text_norm, image_norm, *rest, added=False)  # of what is added nothing is read


@torch.library.custom_op("model_specs::joined_heads_of_sums", mutates_args=())
def joined_heads_of_sums(
    text: Tensor,
    image: Tensor,
    text_added: Tensor,
    image_added: Tensor,
    text_norm: Tensor,
    image_norm: Tensor,
    text_angle: Tensor,
    image_angle: Tensor,
    eps: float,
) -> Tensor:
    """`joined_heads` of `text + text_added` and `image + image_added`, each sum rounded to bf16; it has no gradient."""
    given = text, image, text_added, image_added, text_norm, image_norm, text_angle, image_angle
    return _joined(*given, eps, added=True)


def _joined(text: Tensor, image: Tensor, *others: Any, added: bool) -> Tensor:
    *parts, text_norm, image_norm, text_angle, image_angle, eps = others
    out = _empty(text, image, *others[2:])
    (text_words, text_step), (image_words, image_step) = _tokens(text), _tokens(image)
    given = (
        *_words(*parts, text_norm, image_norm),
        text_angle.contiguous(),
        image_angle.contiguous(),
        out.view(torch.int32),
    )
    sizes = text.shape[1], image.shape[1], text_step, image_step
    shape = _shape(image, image_norm)
    _kernel[_grid(out)](text_words, image_words, *given, *sizes, eps, ADDED=added, ACROSS=False, **shape, num_warps=4)
    return out


@torch.library.custom_op("model_specs::turned_heads", mutates_args=())
def turned_heads(tokens: Tensor, added: Tensor | None, norm: Tensor, angle: Tensor, eps: float) -> Tensor:
    """[B, S, H, D] bf16 of `tokens + added`, rounded to bf16, normed across all heads and turned; it has no gradient.

    Args:
        tokens, added: [B, S, H · D] bf16, what a projection gives and what an adapter adds.
        norm: weight of the RMS norm, [H · D] bf16.
        angle: cosine and sine of each pair of channels, [S, D/2, 2] fp32.
        eps: of the norm.
    """
    out, (words, step) = _turned(tokens, added, norm, angle, eps), _tokens(tokens)
    more, weight = _words(norm if added is None else added, norm)
    H, pairs = out.shape[2], angle.shape[1]
    shape = {"H": H, "PAIRS": pairs, "HEADS": triton.next_power_of_2(H)}
    given = words, words, more, more, weight, weight, angle.contiguous(), angle.contiguous(), out.view(torch.int32)
    _kernel[_grid(out)](
        *given, 0, out.shape[1], step, step, eps, ADDED=added is not None, ACROSS=True, **shape, num_warps=8
    )
    return out


@turned_heads.register_fake
def _turned(tokens: Tensor, added: Tensor | None, norm: Tensor, angle: Tensor, eps: float) -> Tensor:
    D = 2 * angle.shape[1]
    return tokens.new_empty(*tokens.shape[:2], tokens.shape[2] // D, D)


@joined_heads.register_fake
def _empty(text: Tensor, image: Tensor, text_norm: Tensor, *others: Any) -> Tensor:
    D = len(text_norm)
    return text.new_empty(text.shape[0], text.shape[1] + image.shape[1], text.shape[2] // D, D)


@joined_heads_of_sums.register_fake
def _(text: Tensor, image: Tensor, text_added: Tensor, image_added: Tensor, *others: Any) -> Tensor:
    return _empty(text, image, *others)


@torch.library.custom_op("model_specs::joined_heads_gradient", mutates_args=())
def joined_heads_gradient(
    grad: Tensor,
    text: Tensor,
    image: Tensor,
    text_norm: Tensor,
    image_norm: Tensor,
    text_angle: Tensor,
    image_angle: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Of `text` and `image`, from that of the output."""
    out = (
        torch.empty_like(text, memory_format=torch.contiguous_format),
        torch.empty_like(image, memory_format=torch.contiguous_format),
    )
    T, S = text.shape[1], image.shape[1]
    given = (
        *_words(grad, text, image, text_norm, image_norm),
        text_angle.contiguous(),
        image_angle.contiguous(),
        *(each.view(torch.int32) for each in out),
    )
    _gradient[_grid(grad)](*given, T, S, eps, **_shape(image, image_norm), num_warps=4)
    return out


@joined_heads_gradient.register_fake
def _(grad: Tensor, text: Tensor, image: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return text.new_empty(text.shape), image.new_empty(image.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:-1])
    ctx.eps = inputs[-1]


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return *joined_heads_gradient(grad, *ctx.saved_tensors, ctx.eps), None, None, None, None, None


joined_heads.register_autograd(_backward, setup_context=_keep)
