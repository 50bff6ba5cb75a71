"""Many small pictures in one embedded image: a sheet of tiles as a data URI, shown tile by tile with CSS positions."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence

from PIL import Image, features

_LONGEST = 16_000  # WebP stores no side longer than 16383 pixels
_LARGEST = 6_000_000  # pixels of a sheet: about 108 a side for 512 tiles, which is what a page shows
_LOSSLESS = 3_000_000  # larger sheets are photographs in practice; trying them without loss costs seconds for nothing


def sheet(pictures: Sequence[Image.Image], columns: int) -> Image.Image:
    """Tiles of equal size in reading order, `columns` to a row."""
    width, height = pictures[0].size
    rows = -(-len(pictures) // columns)
    image = Image.new("RGB", (columns * width, rows * height), (127, 127, 127))
    for number, picture in enumerate(pictures):
        image.paste(picture, (number % columns * width, number // columns * height))
    return image


def data_uri(image: Image.Image, budget: int) -> str:
    """The image as a data URI of at most `budget` encoded bytes: lossless if it fits, else lossy, else smaller too."""
    image = _within(image, _LARGEST)
    kind = "WEBP" if features.check("webp") else "JPEG"
    if kind == "WEBP" and image.width * image.height <= _LOSSLESS:
        content = _encode(image, kind, lossless=True, method=4)
        if len(content) <= budget:
            return _uri(content, kind)
    content = _encode(image, kind, quality=88)
    while len(content) > budget and min(image.size) > 1:
        image = _within(image, int(0.9 * image.width * image.height * budget / len(content)))
        content = _encode(image, kind, quality=80)
    return _uri(content, kind)


def position(number: int, columns: int, rows: int) -> str:
    """The `background-position` that shows tile `number` of a sheet."""
    x = 100 * (number % columns) / max(1, columns - 1)
    y = 100 * (number // columns) / max(1, rows - 1)
    return f"{x:.4g}% {y:.4g}%"


def _within(image: Image.Image, pixels: int) -> Image.Image:
    """The image, scaled down to at most so many pixels and to sides that the format can store."""
    scale = min(1.0, (pixels / (image.width * image.height)) ** 0.5, _LONGEST / max(image.size))
    if scale == 1.0:
        return image
    return image.resize((max(1, int(image.width * scale)), max(1, int(image.height * scale))), Image.Resampling.LANCZOS)


def _encode(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def _uri(content: bytes, kind: str) -> str:
    return f"data:image/{kind.lower()};base64,{base64.b64encode(content).decode('ascii')}"
