"""`shapes` against drawn scenes, and against a slow plain reading of the same rules."""

from __future__ import annotations

import time

import numpy as np
import pytest
from image_rewards import RewardConfigError, RewardSample, RewardTargetError, load
from image_rewards.pixels import NAMES, PALETTE, read_scene, shape_of
from image_rewards.shapes import parse_target, score_scene


def flood_fill(mask):
    """8-connected components, the obvious way."""
    todo, parts = {tuple(p) for p in np.argwhere(mask)}, []
    while todo:
        stack, part = [todo.pop()], []
        while stack:
            y, x = stack.pop()
            part.append((y, x))
            for near in [(y + v, x + w) for v in (-1, 0, 1) for w in (-1, 0, 1)]:
                if near in todo:
                    todo.remove(near)
                    stack.append(near)
        parts.append(sorted(part))
    return parts


def slow_reading(image):
    """(background, [(color, shape, area)], specks, off) by loops over pixels, straight from the rules."""
    height, width = image.shape[1:]
    palette = np.array([PALETTE[n] for n in NAMES], np.float32) / np.float32(127.5) - 1
    x = image.transpose(1, 2, 0).astype(np.float32) / np.float32(127.5) - 1
    d = ((x[:, :, None, :] - palette) ** 2).sum(-1)
    label = d.argmin(-1)
    votes = np.zeros(len(NAMES), int)
    for edge in (label[0], label[-1], label[:, 0], label[:, -1]):
        for value in edge:
            votes[value] += 1
    back = int(votes.argmax())
    mask = (label != back) & (np.sqrt(d[..., back]) > 0.5)
    objects, specks = [], 0
    for part in flood_fill(mask):
        if len(part) < 25 * height * width / 4096:
            specks += len(part)
            continue
        ys, xs = [p[0] for p in part], [p[1] for p in part]
        third = max(1, (max(ys) - min(ys) + 1) // 3)
        upper = sum(y < min(ys) + third for y in ys)
        lower = sum(y > max(ys) - third for y in ys)
        colors = np.bincount([label[p] for p in part], minlength=len(NAMES))
        shape = shape_of((min(xs), min(ys), max(xs), max(ys)), len(part), upper, lower)
        objects.append((NAMES[colors.argmax()], shape, len(part)))
    return NAMES[back], sorted(objects, key=str), specks, float((np.sqrt(d.min(-1)) > 0.35).mean())


def as_tuple(scene):
    objects = sorted(((o.color, o.shape, o.area) for o in scene.objects), key=str)
    return scene.background, objects, scene.specks, scene.off_palette


def test_every_drawn_scene_is_read_right(scenes):
    clean = []
    for picture, truth in scenes(300):
        result = load("shapes")(RewardSample(picture, "", truth))
        assert result.error is None
        assert result.score == 1.0, (truth, result)
        assert result.components["strict"] == result.components["parts"] == 1.0
        clean.append(result.components["clean"])
    assert np.mean(clean) > 0.95  # soft edges of four large objects can pass the off-palette bound


@pytest.mark.parametrize("noise", [0, 20, 90])
def test_agrees_with_the_slow_reading(scenes, noise):
    rng = np.random.default_rng(noise)
    for picture, _ in scenes(25, seed=noise):
        noised = np.clip(picture + rng.normal(0, noise, picture.shape), 0, 255).astype(np.uint8)
        assert as_tuple(read_scene(noised)) == slow_reading(noised)


@pytest.mark.parametrize("shape", [(3, 1, 1), (3, 1, 50), (3, 50, 1), (3, 7, 200), (3, 65, 33)])
def test_odd_sizes_agree_too(shape):
    rng = np.random.default_rng(3)
    for _ in range(3):
        picture = rng.integers(0, 256, shape, dtype=np.uint8)
        assert as_tuple(read_scene(picture)) == slow_reading(picture)


def test_objects_touching_only_at_a_corner_are_one(paint):
    picture = paint([])
    picture[:, 10:20, 10:20] = np.array(PALETTE["red"])[:, None, None]
    picture[:, 20:30, 20:30] = np.array(PALETTE["red"])[:, None, None]
    assert len(read_scene(picture).objects) == 1
    picture[:, 20:30, 20:30] = picture[:, :1, :1]
    picture[:, 21:31, 21:31] = np.array(PALETTE["red"])[:, None, None]
    assert len(read_scene(picture).objects) == 2


def test_wrong_captions_lose_their_part_only(scenes):
    picture, truth = scenes(1, seed=5)[0]
    for key, other in (("count", truth["count"] + 1), ("color", "red" if truth["color"] != "red" else "blue")):
        result = load("shapes")(RewardSample(picture, "", {**truth, key: other}))
        assert result.components["strict"] == 0.0
        assert result.components["parts"] == 0.75
        assert result.components[key] == 0.0
        assert result.score == 0.375


def test_an_empty_picture_has_no_objects_and_keeps_its_background(paint):
    components = score_scene(read_scene(paint([], "white")), parse_target("one red circle on a white background", {}))
    assert components["parts"] == 0.25
    assert components["strict"] == components["clean"] == 0.0


def test_specks_do_not_count_as_objects_but_spoil_clean(paint):
    picture = paint([("red", "circle", 16, 16, 9)])
    picture[:, 40:43, 40:43] = np.array(PALETTE["red"])[:, None, None]
    scene = read_scene(picture)
    assert len(scene.objects) == 1
    assert scene.specks == 9
    components = score_scene(scene, parse_target("one red circle on a black background", {}))
    assert components["strict"] == 1.0
    assert components["clean"] == 0.0


def test_larger_pictures_scale(paint):
    picture = paint([("green", "triangle", 64, 64, 40), ("green", "triangle", 180, 180, 40)], "white", size=256)
    result = load("shapes")(RewardSample(picture, "two green triangles on a white background"))
    assert result.components["strict"] == result.components["clean"] == 1.0


def test_the_caption_is_read_where_metadata_says_nothing():
    target = parse_target("Four Purple Squares on a White background", {})
    assert (target.count, target.color, target.shape, target.background) == (4, "purple", "square", "white")
    assert parse_target("4 purple squares on a white background", {"count": 2}).count == 2


@pytest.mark.parametrize(
    ("metadata", "word"),
    [
        ({}, "count"),
        ({"count": 0, "color": "red", "shape": "circle", "background": "black"}, "count=0"),
        ({"count": True, "color": "red", "shape": "circle", "background": "black"}, "count=True"),
        ({"count": 2, "color": "pink", "shape": "circle", "background": "black"}, "color='pink'"),
        ({"count": 2, "color": "red", "shape": "star", "background": "black"}, "shape='star'"),
        ({"count": 2, "color": "red", "shape": "circle"}, "background"),
    ],
)
def test_bad_targets_are_named_and_never_scored(paint, metadata, word):
    with pytest.raises(RewardTargetError, match=word):
        load("shapes").check_target("", metadata)
    result = load("shapes")(RewardSample(paint([]), "a cat", metadata))
    assert result.error is not None
    assert result.error.startswith("RewardTargetError")
    assert np.isnan(result.score)


def test_weights():
    with pytest.raises(RewardConfigError, match="strict_weight=0"):
        load("shapes", strict_weight=0, parts_weight=0)


def test_speed(scenes):
    samples = [RewardSample(p, "", t) for p, t in scenes(100)]
    reward = load("shapes")
    reward.score(samples[:5])
    best = min(_timed(lambda: reward.score(samples)) for _ in range(3))
    assert best / len(samples) < 1.5e-3


def _timed(call):
    """Processor time of this thread, which other processes on the machine do not lengthen."""
    start = time.thread_time()
    call()
    return time.thread_time() - start
