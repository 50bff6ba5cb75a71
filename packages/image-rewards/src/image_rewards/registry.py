"""Rewards by name.

Three places are looked in, in this order: the rewards of this package, the entry-point group `image_rewards` of
installed packages, and an explicit "module:Class". Nothing is imported before it is asked for.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from importlib.metadata import entry_points
from typing import Any

from image_rewards.base import Reward
from image_rewards.errors import RewardConfigError, UnknownRewardError

ENTRY_POINT_GROUP = "image_rewards"

BUILTIN = {
    "shapes": "image_rewards.shapes:ShapesReward",
    "jpeg_compressibility": "image_rewards.jpeg:JpegCompressibility",
    "jpeg_incompressibility": "image_rewards.jpeg:JpegIncompressibility",
    "ocr": "image_rewards.ocr:OcrReward",
    "sharpness": "image_rewards.quality:SharpnessReward",
    "http": "image_rewards.http:HttpReward",
    "clip_score": "image_rewards.clip:ClipScoreReward",
    "pickscore": "image_rewards.clip:PickScoreReward",
    "hps": "image_rewards.clip:HpsReward",
    "siglip": "image_rewards.clip:SiglipReward",
    "aesthetic": "image_rewards.clip:AestheticReward",
    "image_reward": "image_rewards.blip:ImageRewardReward",
    "unified_reward": "image_rewards.vision_language:UnifiedReward",
    "hps_v3": "image_rewards.vision_language:HpsV3Reward",
    "geneval": "image_rewards.geneval:GenevalReward",
    "vlm": "image_rewards.vlm:VlmReward",
    "combine": "image_rewards.combine:CombinedReward",
}


def available() -> dict[str, str]:
    """Every known name and where its class lives ("module:Class")."""
    found = {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}
    return {**found, **BUILTIN}


def reward_class(name: str) -> type[Reward]:
    """The class behind `name`. Raises `UnknownRewardError` with the nearest name."""
    target = BUILTIN.get(name) or available().get(name, name)  # looking at what is installed takes a while
    module_name, _, attribute = target.partition(":")
    if not attribute:
        known = available()
        near = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise UnknownRewardError(
            f"no reward is named {name!r}.{hint} Known: {', '.join(sorted(known))}; or give 'module:Class'."
        )
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise UnknownRewardError(f"reward {name!r} points to {target!r}, which cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Reward)):
        raise UnknownRewardError(
            f"reward {name!r} points to {target!r}, which is not a subclass of image_rewards.Reward."
        )
    return found


def load(name: str, *, video: str | None = None, **options: Any) -> Reward:
    """Make a reward by name.

    video    how the frames' scores of a video become one: "mean", "min", "max", "median", "first", "last"
    options  the arguments of the reward's class; an unknown one is a `RewardConfigError` with the nearest name
    """
    cls = reward_class(name)
    known = [p.name for p in inspect.signature(cls).parameters.values() if p.kind is not p.VAR_KEYWORD]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(cls).parameters.values())
    for option in options:
        if option not in known and not takes_any:
            near = difflib.get_close_matches(option, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise RewardConfigError(
                f"reward {name!r} has no option {option!r}.{hint} Options: {', '.join(known) or 'none'}."
            )
    reward = cls(**options)
    if video is None:
        return reward
    from image_rewards.video import VideoReward

    return VideoReward(reward, aggregate=video)
