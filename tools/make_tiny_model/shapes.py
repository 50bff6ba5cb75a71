"""The world of the tiny policy: 144 captions and pictures of them, 64 × 64 pixels, drawn on whatever device is there.

A caption has four attributes; its id counts them in mixed radix (4 counts, 6 colours, 3 shapes, 2 backgrounds). Colours are
those of the `shapes` reward, so that what is drawn and what is judged cannot drift apart.

Shapes: B pictures, 4 places in a picture, C H W picture.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from image_rewards.pixels import BACKGROUNDS, COLORS, SHAPES
from torch import Tensor

SIZE = 64
COUNT_WORDS = ("one", "two", "three", "four")
COLOR_WORDS, SHAPE_WORDS, BACKGROUND_WORDS = tuple(COLORS), tuple(SHAPES), tuple(BACKGROUNDS)
RADIX = (len(COUNT_WORDS), len(COLOR_WORDS), len(SHAPE_WORDS), len(BACKGROUND_WORDS))
CAPTIONS = math.prod(RADIX)
# How often each attribute of a training caption is drawn anew. A redrawn attribute can come out right, so
# (1 - 0.25 · 3/4)(1 - 0.25 · 5/6)(1 - 0.25 · 2/3)(1 - 0.1 · 1/2) = 51 % of captions are right in all four.
CAPTION_NOISE = (0.25, 0.25, 0.25, 0.10)


def attributes(caption_id: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Count - 1, colour, shape and background numbers of caption ids."""
    _, colors, shapes, backgrounds = RADIX
    return (
        caption_id // (colors * shapes * backgrounds),
        caption_id // (shapes * backgrounds) % colors,
        caption_id // backgrounds % shapes,
        caption_id % backgrounds,
    )


def caption_id(count: Tensor, color: Tensor, shape: Tensor, background: Tensor) -> Tensor:
    """The inverse of `attributes`."""
    return ((count * RADIX[1] + color) * RADIX[2] + shape) * RADIX[3] + background


def metadata(number: int) -> dict[str, int | str]:
    """What the `shapes` reward judges a picture of this caption by."""
    count, color, shape, background = (int(value) for value in attributes(torch.tensor(number)))
    return {
        "count": count + 1,
        "color": COLOR_WORDS[color],
        "shape": SHAPE_WORDS[shape],
        "background": BACKGROUND_WORDS[background],
    }


def caption(number: int) -> str:
    """ "three red circles on a black background"."""
    target = metadata(number)
    word = COUNT_WORDS[int(target["count"]) - 1]
    plural = "s" if int(target["count"]) > 1 else ""
    return f"{word} {target['color']} {target['shape']}{plural} on a {target['background']} background"


def add_caption_noise(ids: Tensor, noise: Sequence[float] = CAPTION_NOISE) -> Tensor:
    """Caption ids in which each attribute was drawn anew, uniformly, with its probability."""
    noisy = []
    for value, choices, probability in zip(attributes(ids), RADIX, noise, strict=True):
        redrawn = torch.randint(0, choices, ids.shape, device=ids.device)
        noisy.append(torch.where(torch.rand(ids.shape, device=ids.device) < probability, redrawn, value))
    return caption_id(*noisy)


def draw(ids: Tensor) -> Tensor:
    """Pictures [B, 3, 64, 64] in [-1, 1] of caption ids [B], on their device.

    Each object takes one of four places (the quarters of the picture) and moves a little in it; edges are one pixel soft.
    """
    device, batch = ids.device, len(ids)
    count, color, shape, background = attributes(ids)
    place = torch.rand(batch, 4, device=device).argsort(1)
    used = torch.arange(4, device=device) < (count + 1)[:, None]
    jitter = torch.rand(2, batch, 4, device=device) * 6 - 3
    center_x = torch.where(place % 2 == 0, 16.0, 48.0) + jitter[0]
    center_y = torch.where(place // 2 == 0, 16.0, 48.0) + jitter[1]
    radius = (8.5 + 2 * torch.rand(batch, 4, device=device))[..., None, None]

    pixel = torch.arange(SIZE, device=device) + 0.5
    dx = pixel[None, None, None, :] - center_x[..., None, None]
    dy = pixel[None, None, :, None] - center_y[..., None, None]
    # Signed distance to the outline of each shape, positive inside. Squares and triangles cover about a circle's area.
    half = radius * math.sqrt(math.pi) / 2
    circle = radius - torch.sqrt(dx * dx + dy * dy)
    square = torch.minimum(half - dx.abs(), half - dy.abs())
    tall, slope = 1.15 * radius, 1.75
    base, sides = 0.62 * tall - dy, (dy + 0.85 * tall - slope * dx.abs()) / math.sqrt(1 + slope**2)
    triangle = torch.minimum(base, sides)
    kind = shape[:, None, None, None]
    distance = torch.where(kind == 0, circle, torch.where(kind == 1, square, triangle))
    distance = torch.where(used[..., None, None], distance, -9.0)
    cover = (distance + 0.5).clamp(0, 1).amax(1)[:, None]  # [B, 1, H, W]
    front, back = _rgb(COLORS, color), _rgb(BACKGROUNDS, background)
    return back * (1 - cover) + front * cover


def _rgb(palette: dict[str, tuple[int, int, int]], index: Tensor) -> Tensor:
    table = torch.tensor(list(palette.values()), dtype=torch.float32, device=index.device) / 127.5 - 1
    return table[index][:, :, None, None]
