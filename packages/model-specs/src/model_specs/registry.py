"""Finds the spec of an architecture: by any of its names, of a pipeline folder, or in a person's own module. Imports without torch.

Third parties add one through the entry-point group `model_specs`: the entry's value is a `ModelSpec` subclass.
"""

from __future__ import annotations

import difflib
import pkgutil
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from model_specs.base import ModelSpec
from model_specs.errors import SpecError, UnknownArchitectureError
from model_specs.folders import component, read_json

ENTRY_POINT_GROUP = "model_specs"
_BY_NAME: dict[str, type[ModelSpec]] = {}
_entry_points_read = False


def register(spec: type[ModelSpec]) -> type[ModelSpec]:
    """Make a spec findable by its name, transformer class and pipeline class. Usable as a decorator.

    Raises:
        SpecError: not a ModelSpec subclass, or one of its names belongs to another spec already.
    """
    spec = _checked(spec, "register")
    names = {spec.name, spec.transformer_class, spec.pipeline_class}
    for name in names:
        other = _BY_NAME.get(name, spec)
        if (other.__module__, other.__qualname__) != (spec.__module__, spec.__qualname__):
            raise SpecError(f"{name!r} is taken by {other.__qualname__}: give {spec.__qualname__} names of its own.")
    _BY_NAME.update(dict.fromkeys(names, spec))
    return spec


def available() -> list[str]:
    """Short names of all known architectures, third parties' included."""
    _read_entry_points()
    return sorted({spec.name for spec in _BY_NAME.values()})


def get_spec(name: str) -> ModelSpec:
    """The spec with that short name, transformer class name or pipeline class name.

    Raises:
        UnknownArchitectureError: no such name; the message lists the known ones and the nearest.
    """
    return find(name)()


def get_spec_for(path: str | Path, architecture: str | None = None) -> ModelSpec:
    """The spec of a pipeline folder, configured from the folder's own configs.

    Args:
        path: of the folder.
        architecture: any name that `find` takes; None reads it from the folder's index.

    Raises:
        SpecError: no such folder, no model_index.json, or an index that names no pipeline class.
        UnknownArchitectureError: a pipeline class without a spec.
    """
    folder = component(path, ".", "model_index.json")
    file = folder / "model_index.json"
    name = architecture or read_json(file).get("_class_name")
    if not isinstance(name, str):
        raise SpecError(f"{str(file)!r} names no pipeline class: its `_class_name` is {name!r}.")
    return find(name)(folder)


def find(name: str) -> type[ModelSpec]:
    """The spec class behind a name or "module:Class"; entry points are read only when no built-in one matches."""
    if ":" in name:
        try:
            return _checked(pkgutil.resolve_name(name), name)
        except (ImportError, AttributeError, ValueError) as error:
            if isinstance(error, SpecError):
                raise
            raise SpecError(f"The architecture {name!r} cannot be imported: {error}") from error
    if name not in _BY_NAME:
        _read_entry_points()
    if name not in _BY_NAME:
        near = difflib.get_close_matches(str(name), list(_BY_NAME), n=1, cutoff=0.4)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise UnknownArchitectureError(
            f"No spec for the architecture {name!r}. Known: {', '.join(available())}.{hint} Name a class of your own as "
            f"'module:Class', or add it by an entry point of the group {ENTRY_POINT_GROUP!r}."
        )
    return _BY_NAME[name]


def _checked(found: Any, name: str) -> type[ModelSpec]:
    if not (isinstance(found, type) and issubclass(found, ModelSpec)):
        raise SpecError(f"{name}: {found!r} is not a subclass of model_specs.ModelSpec; give the class itself.")
    return found


def _read_entry_points() -> None:
    global _entry_points_read
    if _entry_points_read:
        return
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        try:
            register(entry.load())
        except Exception as error:
            raise SpecError(f"The entry point {entry.name!r} = {entry.value!r} cannot be loaded: {error}") from error
    _entry_points_read = True
