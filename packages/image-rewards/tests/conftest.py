"""Pictures for the tests: simple scenes with soft edges, drawn with numpy, and rendered words."""

from __future__ import annotations

import numpy as np
import pytest
from image_rewards import RewardSample
from image_rewards.pixels import BACKGROUNDS, COLORS, PALETTE, SHAPES

SIZE = 64
CELLS = [(16.0, 16.0), (48.0, 16.0), (16.0, 48.0), (48.0, 48.0)]


def coverage(shape: str, x: float, y: float, r: float, size: int = SIZE) -> np.ndarray:
    """Share of each pixel [size,size] inside the shape, from the signed distance to its edge."""
    axis = np.arange(size) + 0.5
    dx, dy = axis[None, :] - x, axis[:, None] - y
    if shape == "circle":
        inside = r - np.hypot(dx, dy)
    elif shape == "square":
        inside = 0.886 * r - np.maximum(np.abs(dx), np.abs(dy))
    else:
        k, slope = 1.15 * r, 1.75
        flank = (dy + 0.85 * k - slope * np.abs(dx)) / np.hypot(1, slope)
        inside = np.minimum(0.62 * k - dy, flank)
    return np.clip(inside + 0.5, 0, 1)


def paint(objects, background="black", size=SIZE):
    """uint8 [3,size,size] with objects (color, shape, x, y, r), later ones on top."""
    picture = np.ones((size, size, 1)) * np.array(PALETTE[background], float)
    for color, shape, x, y, r in objects:
        alpha = coverage(shape, x, y, r, size)[..., None]
        picture = picture * (1 - alpha) + np.array(COLORS[color], float) * alpha
    return picture.round().astype(np.uint8).transpose(2, 0, 1).copy()


def random_scene(rng: np.random.Generator):
    """A picture and its true metadata."""
    count = int(rng.integers(1, 5))
    color, shape, background = rng.choice(list(COLORS)), rng.choice(SHAPES), rng.choice(list(BACKGROUNDS))
    cells = [CELLS[i] for i in rng.permutation(4)[:count]]
    objects = [(color, shape, *(np.array(c) + rng.uniform(-3, 3, 2)), 8.5 + 2 * rng.random()) for c in cells]
    truth = {"count": count, "color": str(color), "shape": str(shape), "background": str(background)}
    return paint(objects, background), truth


@pytest.fixture(name="paint")
def paint_fixture():
    return paint


@pytest.fixture
def scenes():
    """scenes(n, seed) -> [(picture, truth)]"""

    def make(n, seed=0):
        rng = np.random.default_rng(seed)
        return [random_scene(rng) for _ in range(n)]

    return make


@pytest.fixture
def shape_samples(scenes):
    """shape_samples(n, seed) -> samples whose captions are sometimes wrong."""

    def make(n, seed=0):
        rng = np.random.default_rng(seed + 1)
        out = []
        for i, (picture, truth) in enumerate(scenes(n, seed)):
            asked = dict(truth)
            if rng.random() < 0.5:
                asked["color"] = str(rng.choice(list(COLORS)))
            if rng.random() < 0.5:
                asked["count"] = int(rng.integers(1, 5))
            out.append(RewardSample(picture, "", asked, uid=f"p{i // 4}", index=i % 4))
        return out

    return make
