"""What this package ships: prompt sets, tiny models and recipes, each named `builtin:NAME` where a path can stand."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from .errors import TrainerError


def builtin(kind: str, name: str) -> Path:
    """Path of a shipped asset. `kind` is "prompts", "models" or "recipes"; an unknown name raises, with the known ones."""
    root = Path(str(files("ray_trainer") / "assets"))
    path, known = {
        "prompts": (root / "prompts" / f"{name}.jsonl", [p.stem for p in (root / "prompts").glob("*.jsonl")]),
        "models": (root / name, [p.parent.name for p in root.glob("*/model_index.json")]),
        "recipes": (root / "recipes" / f"{name}.yaml", [p.stem for p in (root / "recipes").glob("*.yaml")]),
    }[kind]
    if not path.exists():
        raise TrainerError(f"there is no built-in {name!r} among the {kind}: known are {sorted(known)}")
    return path


def resolve(kind: str, location: str) -> Path:
    """The path of "prompts" or "recipes": of a shipped one for `builtin:NAME`, else `location` itself. Models: `models.fetch`."""
    if location.startswith("builtin:"):
        return builtin(kind, location.removeprefix("builtin:"))
    return Path(location)
