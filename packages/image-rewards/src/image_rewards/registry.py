"""Rewards by name.

A name is looked up in this order: the rewards of this package, the entry-point group `image_rewards` of installed packages,
then "module:attribute" or "./file.py:attribute". Nothing is imported before it is asked for.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from .base import Reward
from .errors import RewardError, UnknownRewardError, nearest, require
from .functions import as_reward

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


def absolute(name: str) -> str:
    """`name` with the path of a "./file.py:attribute" made absolute, for processes that work elsewhere."""
    file, colon, attribute = name.rpartition(":")
    return f"{Path(file).resolve()}:{attribute}" if colon and file.endswith(".py") else name


def use_folder(folder: str) -> None:
    """Let modules in `folder` be found, after all that is installed."""
    if folder not in sys.path:
        sys.path.append(folder)


def find(name: str) -> Any:
    """What `name` names: a class, an instance or a function, not checked further.

    Raises:
        UnknownRewardError: there is none (with the nearest name), or it cannot be imported.
    """
    target = BUILTIN.get(name) or available().get(name, name)  # looking at what is installed takes a while
    module_name, _, attribute = target.rpartition(":")
    if not module_name or not attribute:
        known = available()
        raise UnknownRewardError(
            f"no reward is named {name!r}.{nearest(name, known)} Known: {', '.join(sorted(known))}; or give "
            "'module:attribute' or './file.py:attribute'."
        )
    neither = f"reward {name!r}: {module_name!r} is no module and no .py file; give './file.py:attribute'."
    require(
        module_name.endswith(".py") or not ("/" in module_name or os.sep in module_name), neither, UnknownRewardError
    )
    use_folder(os.getcwd())
    try:
        module = _imported(module_name)
    except RewardError:
        raise
    except (Exception, SystemExit) as error:
        raise UnknownRewardError(
            f"reward {name!r} points to {target!r}, which cannot be imported on {socket.gethostname()} from {os.getcwd()}: "
            f"{type(error).__name__}: {error}"
        ) from error
    missing = f"reward {name!r}: {module_name!r} has no {attribute!r}.{nearest(attribute, vars(module))}"
    require(hasattr(module, attribute), missing, UnknownRewardError)
    return getattr(module, attribute)


def _imported(name: str) -> Any:
    """The module of that name, or of a .py file; the file's own folder is then searched by its imports."""
    if not name.endswith(".py"):
        return importlib.import_module(name)
    file = Path(name).resolve()
    require(
        file.is_file(),
        f"there is no file {str(file)!r} on {socket.gethostname()}. A reward's file must be on every machine that scores: put "
        "it on a shared file system, or install it as a module.",
        UnknownRewardError,
    )
    use_folder(str(file.parent))
    importlib.invalidate_caches()  # it may have been written just now
    module = importlib.import_module(file.stem)
    other = f"{file.stem!r} is the name of another module ({module.__file__}); rename {str(file)!r}"
    require(Path(module.__file__ or "").resolve() == file, other, UnknownRewardError)
    return module


def load(name: str, *, video: str | None = None, **options: Any) -> Reward:
    """Make a reward by name.

    Args:
        name: a known one, "module:attribute" or "./file.py:attribute"; the attribute is a class, an instance or a function
            (`functions.FunctionReward` says what it gets). The working folder is searched after what is installed
        video: how the frames' scores of a video become one: "mean", "min", "max", "median", "first", "last"
        options: the arguments of the class or function; an unknown one is a `RewardConfigError` with the nearest name
    """
    reward = as_reward(find(name), options, name)
    if video is None:
        return reward
    from .video import VideoReward

    return VideoReward(reward, aggregate=video)
