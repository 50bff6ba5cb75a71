"""What a program is (`App`), and its arguments made a config."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .compose import compose
from .config import RunConfig
from .errors import TrainerError
from .values import expand

if TYPE_CHECKING:
    from .trainer import RayDiffusionTrainer


@dataclass(frozen=True)
class App:
    """What a program adds to the shared command line.

    `recipes` is its folder of YAML files, `default` the recipe that runs without arguments, `family` that of the losses it trains
    with, `trainer` the class that runs a config unless `trainer.algorithm` names one.
    """

    name: str
    summary: str
    recipes: Path
    default: str
    family: str
    trainer: Callable[[RunConfig], type[RayDiffusionTrainer]]


def parse(app: App, argv: list[str]) -> tuple[RunConfig | None, bool]:
    """(config, dry run); the config is None when help was asked for.

    Raises:
        TrainerError: an argument that is neither `key=value` nor a known flag, or a config that does not compose.
    """
    if any(a in ("-h", "--help") for a in argv):
        return None, False
    dry_run = "--dry-run" in argv
    pairs = [a for a in argv if a != "--dry-run"]
    for argument in pairs:
        if argument.startswith(("-", "=")) or "=" not in argument:
            raise TrainerError(f"{argument!r} is not understood; give key=value, --dry-run or --help")
    recipe = next((a.split("=", 1)[1] for a in reversed(pairs) if a.startswith("recipe=")), app.default)
    file = Path(expand(recipe)) if recipe.endswith((".yaml", ".yml")) else app.recipes / f"{recipe}.yaml"
    if not file.is_file():
        known = sorted(p.stem for p in app.recipes.glob("*.yaml"))
        near = difflib.get_close_matches(recipe.lower().replace("-", "_"), known, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise TrainerError(
            f"there is no recipe {recipe!r}; {hint}known are {', '.join(known)}, or give the path of a .yaml file"
        )
    return compose(app.name, file, [a for a in pairs if not a.startswith("recipe=")]), dry_run
