"""Many small pictures in one embedded image: a sheet of tiles as a data URI, shown tile by tile with CSS positions."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence

from PIL import Image, features

_LONGEST = 16_000  # WebP stores no side longer than 16383 pixels


def sheet(pictures: Sequence[Image.Image], columns: int) -> Image.Image:
    """Tiles of equal size in reading order, `columns` to a row."""
    width, height = pictures[0].size
    rows = -(-len(pictures) // columns)
    image = Image.new("RGB", (columns * width, rows * height), (127, 127, 127))
    for number, picture in enumerate(pictures):
        image.paste(picture, (number % columns * width, number // columns * height))
    return image


def data_uri(image: Image.Image, budget: int) -> str:
    """The image as a data URI of about `budget` encoded bytes at most: lossless if it fits, else lossy, else smaller."""
    if max(image.size) > _LONGEST:
        image = image.copy()
        image.thumbnail((_LONGEST, _LONGEST), Image.Resampling.LANCZOS)
    if features.check("webp"):
        content = _encode(image, "WEBP", lossless=True, method=4)
        if len(content) <= budget:
            return _uri(content, "webp")
    lossy = "WEBP" if features.check("webp") else "JPEG"
    for scale in (1.0, 0.75, 0.5, 0.35, 0.25):
        size = (max(1, int(image.width * scale)), max(1, int(image.height * scale)))
        scaled = image if scale == 1 else image.resize(size, Image.Resampling.LANCZOS)
        for quality in (92, 82, 70):
            content = _encode(scaled, lossy, quality=quality)
            if len(content) <= budget:
                return _uri(content, lossy.lower())
    return _uri(content, lossy.lower())


def position(number: int, columns: int, rows: int) -> str:
    """The `background-position` that shows tile `number` of a sheet."""
    x = 100 * (number % columns) / max(1, columns - 1)
    y = 100 * (number // columns) / max(1, rows - 1)
    return f"{x:.4g}% {y:.4g}%"


def _encode(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def _uri(content: bytes, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode('ascii')}"
