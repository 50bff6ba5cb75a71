"""Which class runs the loop: the program's own, or the one that `trainer.algorithm` names."""

from __future__ import annotations

import difflib
import pkgutil
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any

from .config import RunConfig
from .errors import TrainerError
from .trainer import RayDiffusionTrainer

ENTRY_POINT_GROUP = "ray_trainer.algorithms"

Usual = Callable[[RunConfig], type[RayDiffusionTrainer]]
"""What a program runs a config with."""


def find_algorithm(config: RunConfig, usual: Usual) -> type[RayDiffusionTrainer]:
    """The trainer's class: `trainer.algorithm`, or the program's `usual` one; its options are checked.

    Raises:
        TrainerError: it cannot be imported, is no trainer, or lacks an option that `algorithm.options` gives.
    """
    name = config.trainer.algorithm
    found = _load(name) if name else usual(config)
    if not (isinstance(found, type) and issubclass(found, RayDiffusionTrainer)):
        raise TrainerError(f"trainer.algorithm={name!r} is no subclass of ray_trainer.trainer.RayDiffusionTrainer")
    check_options(f"algorithm.options of {found.__name__}", config.algorithm.options, found.OPTIONS)
    return found


def check_options(where: str, given: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Refuse an option that `known` lacks; the nearest one is named."""
    for option in given:
        if option not in known:
            near = difflib.get_close_matches(option, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TrainerError(f"{where}: there is no {option!r} (there is {', '.join(known) or 'none'}){hint}")


def _load(name: str) -> Any:
    point = next(iter(entry_points(group=ENTRY_POINT_GROUP, name=name)), None)
    if point is None and ":" not in name:
        known = ", ".join(sorted(p.name for p in entry_points(group=ENTRY_POINT_GROUP))) or "none is installed"
        raise TrainerError(f"trainer.algorithm={name!r} is unknown ({known}); give module:Class or ./file.py:Class")
    try:
        return pkgutil.resolve_name(name) if point is None else point.load()
    except (ImportError, AttributeError, ValueError) as error:
        raise TrainerError(f"trainer.algorithm={name!r} cannot be imported: {error}") from error
