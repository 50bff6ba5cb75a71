"""`shapes`: does the picture show what the caption says, read from pixels?

For captions like "three red circles on a black background". The rules are in `pixels.py`. There is no model, so the
reward is exact, fast and the same everywhere; a laptop can train a small policy with it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .base import PerSampleReward, RewardResult, RewardSample, check_weights
from .errors import RewardTargetError, require
from .pixels import BACKGROUNDS, COLORS, SHAPES, Scene, read_scene
from .scene_rules import Found, judge, parse_questions

NUMBERS = {"a": 1, "an": 1, "one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8}
_CAPTION = re.compile(
    rf"\b({'|'.join(NUMBERS)}|\d+)\s+({'|'.join(COLORS)})\s+({'|'.join(SHAPES)})s?\s+on\s+an?\s+({'|'.join(BACKGROUNDS)})"
    r"\s+background\b",
    re.IGNORECASE,
)
NATURAL_AREA = (110, 420)  # pixels of an object in a clean 64 x 64 picture
CLEAN_SPECKS = 6
CLEAN_OFF_PALETTE = 0.06


@dataclass(frozen=True)
class ShapesTarget:
    """What a caption asks for."""

    count: int
    color: str
    shape: str
    background: str


def parse_target(prompt: str, metadata: Mapping[str, Any]) -> ShapesTarget:
    """The target from metadata keys count, color, shape, background; absent keys come from the caption.

    Raises `RewardTargetError` where neither has a value or a value is not one that can be read from pixels.
    """
    found = _CAPTION.search(prompt)
    spoken: dict[str, Any] = {}
    if found:
        number = found[1].lower()
        spoken = {
            "count": NUMBERS[number] if number in NUMBERS else int(number),
            "color": found[2].lower(),
            "shape": found[3].lower(),
            "background": found[4].lower(),
        }
    values: dict[str, Any] = {}
    for key, allowed in (("count", None), ("color", COLORS), ("shape", SHAPES), ("background", BACKGROUNDS)):
        value = metadata.get(key, spoken.get(key))
        require(
            value is not None,
            f"shapes: no {key!r} in metadata {dict(metadata)!r}, and the prompt {prompt!r} does not read like "
            "'three red circles on a black background'. Give metadata count, color, shape and background.",
            RewardTargetError,
        )
        if allowed is None:
            whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            require(whole, f"shapes: count={value!r} must be a whole number of at least 1.", RewardTargetError)
        else:
            wrong = f"shapes: {key}={value!r} is unknown. Choose one of {', '.join(allowed)}."
            require(value in allowed, wrong, RewardTargetError)
        values[key] = value
    return ShapesTarget(**values)


def score_scene(scene: Scene, target: ShapesTarget) -> dict[str, float]:
    """Components, each in [0, 1].

    count, background   1 when right
    color, shape        share of the objects that have it
    parts               mean of the four
    strict              1 when all four are right
    clean               1 for a tidy picture whatever the caption: one colour, one known shape, natural sizes, no specks
    off                 share of pixels far from every palette colour
    """
    objects = scene.objects
    count = float(len(objects) == target.count)
    color = sum(o.color == target.color for o in objects) / len(objects) if objects else 0.0
    shape = sum(o.shape == target.shape for o in objects) / len(objects) if objects else 0.0
    background = float(scene.background == target.background)
    return {
        "strict": float(count == color == shape == background == 1),
        "count": count,
        "color": color,
        "shape": shape,
        "background": background,
        "parts": (background + color + shape + count) / 4,
        "clean": float(is_clean(scene)),
        "off": scene.off_palette,
    }


def is_clean(scene: Scene) -> bool:
    """Whether the picture is tidy. Watch it beside the score: it says nothing about the caption and is not
    optimised."""
    objects = scene.objects
    low, high = (bound * scene.scale for bound in NATURAL_AREA)
    return (
        1 <= len(objects) <= 4
        and len({o.color for o in objects}) == 1
        and len({o.shape for o in objects}) == 1
        and objects[0].shape is not None
        and all(low <= o.area <= high for o in objects)
        and scene.specks <= CLEAN_SPECKS * scene.scale
        and scene.off_palette < CLEAN_OFF_PALETTE
    )


@dataclass(eq=False)
class ShapesReward(PerSampleReward):
    """score = strict_weight * strict + parts_weight * parts; components as in `score_scene`.

    Metadata with "include" asks GenEval's questions instead (`scene_rules`: several kinds of objects, colours, relative
    positions; classes are the shapes), with the picture's "background" as an optional further part.
    With strict alone few samples get a reward; with parts alone a policy may stay at three of four right.
    """

    name = "shapes"

    strict_weight: float = 0.5
    parts_weight: float = 0.5

    def __post_init__(self) -> None:
        check_weights(strict_weight=self.strict_weight, parts_weight=self.parts_weight)

    def check_target(self, prompt: str, metadata: Mapping[str, Any]) -> None:
        if "include" in metadata:
            parse_questions(metadata, SHAPES, COLORS)
            background = metadata.get("background", "black")
            wrong = f"shapes: background={background!r} is unknown. Choose one of {', '.join(BACKGROUNDS)}."
            require(background in BACKGROUNDS, wrong, RewardTargetError)
        else:
            parse_target(prompt, metadata)

    def target_of(self, prompt: str, metadata: Mapping[str, Any]) -> Any:
        if "include" not in metadata:
            return parse_target(prompt, metadata)
        return {key: metadata[key] for key in ("include", "exclude", "background") if key in metadata}

    def score_one(self, sample: RewardSample) -> RewardResult:
        scene = read_scene(sample.image)
        if "include" in sample.metadata:
            components = answer_questions(scene, sample.metadata)
        else:
            components = score_scene(scene, parse_target(sample.prompt, sample.metadata))
        score = self.strict_weight * components["strict"] + self.parts_weight * components["parts"]
        return RewardResult(score, components)


def answer_questions(scene: Scene, metadata: Mapping[str, Any]) -> dict[str, float]:
    """Components of `scene_rules.judge` for the objects of a scene; with "background" in the metadata, that too."""
    found = [Found(o.shape, o.box, 1.0, o.color) for o in scene.objects if o.shape is not None]
    components = judge(found, parse_questions(metadata, SHAPES, COLORS))
    if "background" in metadata:
        parts = [components[k] for k in ("count", "color", "position") if k in components]
        right = float(scene.background == metadata["background"])
        components["background"] = right
        components["strict"] = min(components["strict"], right)
        components["parts"] = (sum(parts) + right) / (len(parts) + 1)
    components["off"] = scene.off_palette
    return components
