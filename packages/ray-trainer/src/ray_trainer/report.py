"""The report of a run folder, with what its config has otherwise than its recipe."""

from __future__ import annotations

from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from run_report import write_report

from .compose import compose
from .config import to_tree
from .errors import TrainerError
from .resume import flat
from .values import free, read_yaml

_OF_THE_FOLDER = ("app", "recipe", "trainer.run_dir", "trainer.on_existing", "rollout.seed")
_FOLLOWS = ("actor.optim.total_training_steps",)


def rebuild(run: Path) -> Path:
    """Write `report.html` from the files that are there, at any moment of a run; returns its path."""
    return write_report(run, differences_to_recipe(run))


def differences_to_recipe(run: Path) -> list[tuple[str, Any, Any]]:
    """(key, the recipe's value, the run's); empty where the folder has no config, or its recipe is not among the program's."""
    file = run / "config.yaml"
    if not file.is_file():
        return []
    written = free(read_yaml(file, str(file)), "config.yaml", "the run folder")
    if not isinstance(written, dict):
        return []
    own = flat(written)
    app, recipe = str(own.get("app")), str(own.get("recipe"))
    package = app.replace("-", "_")
    if not package.isidentifier() or find_spec(package) is None:
        return []
    source = Path(str(files(package) / "recipes")) / f"{recipe}.yaml"
    if not source.is_file():
        return []
    try:
        base = flat(to_tree(compose(app, source, [])))
    except TrainerError:  # another version of the program
        return []
    # What follows from another value is not said twice.
    skipped = {*_OF_THE_FOLDER, *_FOLLOWS}
    keys = [key for key in dict.fromkeys([*base, *own]) if key not in skipped and base.get(key) != own.get(key)]
    return [(key, base.get(key), own.get(key)) for key in keys]
