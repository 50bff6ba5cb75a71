"""Read a simple scene from pixels: the colour of the background, and the objects on it with colour and shape.

    picture uint8 [3,H,W]  ->  palette label of each pixel  ->  foreground  ->  8-connected objects  ->  colour, shape

Only numpy, and no loop over pixels: distances to the palette come from tables (a uint8 channel has 256 values),
objects from runs of foreground in each row, joined by union-find.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

COLORS: dict[str, tuple[int, int, int]] = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (40, 80, 220),
    "yellow": (235, 210, 40),
    "purple": (150, 50, 190),
    "orange": (245, 135, 25),
}
BACKGROUNDS: dict[str, tuple[int, int, int]] = {"white": (240, 240, 240), "black": (20, 20, 20)}
SHAPES = ("circle", "square", "triangle")
PALETTE = {**COLORS, **BACKGROUNDS}
NAMES = tuple(PALETTE)

# Distances are Euclidean in RGB scaled to [-1, 1], so black to white is 2 * sqrt(3) = 3.46.
FOREGROUND_DISTANCE = 0.5  # a pixel this far from the background's colour belongs to an object
OFF_PALETTE_DISTANCE = 0.35  # a pixel this far from every palette colour is off the palette (soft edges count too)
REFERENCE_AREA = 64 * 64  # areas below are for 64 x 64 pictures and grow with the picture
SPECK_AREA = 25  # smaller patches are specks, not objects


@dataclass(frozen=True)
class SceneObject:
    """One object. area in pixels; center (x, y) and box (left, top, right, bottom) in pixels, box ends inclusive."""

    color: str
    shape: str | None
    area: int
    center: tuple[float, float]
    box: tuple[int, int, int, int]


@dataclass(frozen=True)
class Scene:
    """What was read. `background` is a palette name; `specks` counts pixels in patches too small for an object."""

    background: str
    objects: tuple[SceneObject, ...]
    specks: int
    off_palette: float
    scale: float  # pixels of the picture / pixels of the reference


@cache
def _tables() -> np.ndarray:
    """fp32 [3,256,P]: squared distance of channel value v to palette colour p along each channel."""
    values = np.arange(256, dtype=np.float32) / np.float32(127.5) - np.float32(1)
    palette = np.array([PALETTE[name] for name in NAMES], dtype=np.float32) / np.float32(127.5) - np.float32(1)
    return np.stack([(values[:, None] - palette[None, :, c]) ** 2 for c in range(3)])


def read_scene(image: np.ndarray) -> Scene:
    """Read `image`, uint8 [3,H,W]."""
    height, width = image.shape[1:]
    red, green, blue = _tables()
    r, g, b = image.reshape(3, -1)
    distance_DP = red.take(r, axis=0)
    distance_DP += green.take(g, axis=0)
    distance_DP += blue.take(b, axis=0)
    label_D = distance_DP.argmin(axis=1)
    nearest_D = np.take_along_axis(distance_DP, label_D[:, None], axis=1)[:, 0]
    off_palette = float((np.sqrt(nearest_D) > OFF_PALETTE_DISTANCE).mean())

    label_HW = label_D.reshape(height, width)
    border = np.concatenate([label_HW[0], label_HW[-1], label_HW[:, 0], label_HW[:, -1]])
    background = int(np.bincount(border, minlength=len(NAMES)).argmax())
    foreground_D = (label_D != background) & (np.sqrt(distance_DP[:, background]) > FOREGROUND_DISTANCE)
    scale = height * width / REFERENCE_AREA
    objects, specks = _objects(foreground_D.reshape(height, width), label_D[foreground_D], SPECK_AREA * scale)
    return Scene(NAMES[background], objects, specks, off_palette, scale)


def _objects(mask_HW: np.ndarray, labels: np.ndarray, speck_area: float) -> tuple[tuple[SceneObject, ...], int]:
    """Objects of `mask_HW` and the number of pixels in specks. `labels` are the foreground's palette labels, row by
    row."""
    row, start, end = runs_of(mask_HW)
    if len(row) == 0:
        return (), 0
    part = join_runs(row, start, end, mask_HW.shape[1])
    count = int(part.max()) + 1
    length = end - start  # end is exclusive
    area = _sum(part, length, count)
    top = np.full(count, mask_HW.shape[0])
    bottom, left, right = np.zeros(count, int), np.full(count, mask_HW.shape[1]), np.zeros(count, int)
    np.minimum.at(top, part, row)
    np.maximum.at(bottom, part, row)
    np.minimum.at(left, part, start)
    np.maximum.at(right, part, end - 1)
    third = np.maximum(1, (bottom - top + 1) // 3)
    upper = _sum(part, length * (row < (top + third)[part]), count)
    lower = _sum(part, length * (row > (bottom - third)[part]), count)
    center_x = _sum(part, length * (start + end - 1) / 2, count) / area
    center_y = _sum(part, length * row, count) / area
    votes = np.bincount(np.repeat(part, length) * len(NAMES) + labels, minlength=count * len(NAMES))
    color = votes.reshape(count, len(NAMES)).argmax(axis=1)

    objects = []
    for i in np.flatnonzero(area >= speck_area):
        box = (int(left[i]), int(top[i]), int(right[i]), int(bottom[i]))
        shape = shape_of(box, int(area[i]), int(upper[i]), int(lower[i]))
        objects.append(SceneObject(NAMES[color[i]], shape, int(area[i]), (float(center_x[i]), float(center_y[i])), box))
    return tuple(objects), int(area[area < speck_area].sum())


def _sum(part: np.ndarray, weights: np.ndarray, count: int) -> np.ndarray:
    return np.bincount(part, weights=weights, minlength=count)


def shape_of(box: tuple[int, int, int, int], area: int, upper: int, lower: int) -> str | None:
    """Name a filled shape from its box, its area and the pixels in the upper and the lower third of its rows.

    A square fills its box, a circle fills pi/4 of it evenly, a triangle half of it with most at the bottom.
    """
    width, height = box[2] - box[0] + 1, box[3] - box[1] + 1
    if not 0.7 < height / width < 1.45:
        return None
    fill, balance = area / (height * width), upper / max(1, lower)
    if balance < 0.6 and 0.38 < fill < 0.70:
        return "triangle"
    if fill > 0.885:
        return "square"
    if 0.70 <= fill <= 0.885 and 0.7 < balance < 1.4:
        return "circle"
    return None


def runs_of(mask_HW: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Row, first column and end column (exclusive) of every run of True, in reading order."""
    height, width = mask_HW.shape
    padded = np.zeros((height, width + 2), dtype=np.int8)
    padded[:, 1:-1] = mask_HW
    edges = np.flatnonzero(np.diff(padded.ravel()))  # a padded row starts and ends with 0, so edges alternate
    opening, closing = edges[0::2], edges[1::2]
    row = opening // (width + 2)
    return row, opening - row * (width + 2), closing - row * (width + 2)


def join_runs(row: np.ndarray, start: np.ndarray, end: np.ndarray, width: int) -> np.ndarray:
    """Component number [runs] of every run; runs of neighbouring rows that touch, also at corners, are one
    component."""
    pitch = width + 4
    # A run reaches the runs of the next row whose end is past its first column and whose start is not past its end.
    first = np.searchsorted(row * pitch + end, (row + 1) * pitch + start, side="left")
    last = np.searchsorted(row * pitch + start, (row + 1) * pitch + end, side="right")
    parent = list(range(len(row)))
    for run, (low, high) in enumerate(zip(first.tolist(), last.tolist(), strict=True)):
        for below in range(low, high):
            a, b = run, below
            while parent[a] != a:
                parent[a] = parent[parent[a]]
                a = parent[a]
            while parent[b] != b:
                parent[b] = parent[parent[b]]
                b = parent[b]
            if a < b:
                parent[b] = a
            elif b < a:
                parent[a] = b
    for run, up in enumerate(parent):  # parents come first, so one pass flattens
        parent[run] = parent[up]
    return np.unique(np.array(parent), return_inverse=True)[1]
