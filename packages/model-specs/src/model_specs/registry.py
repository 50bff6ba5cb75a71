"""Finds the spec of an architecture by any of its names, or of a pipeline folder.

Third parties add one through the entry-point group `model_specs`: the entry's value is a `ModelSpec` subclass.
"""

from __future__ import annotations

import difflib
from importlib.metadata import entry_points
from pathlib import Path

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
    if not (isinstance(spec, type) and issubclass(spec, ModelSpec)):
        raise SpecError(f"{spec!r} is not a subclass of model_specs.ModelSpec: register the class itself.")
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


def get_spec_for(path: str | Path) -> ModelSpec:
    """The spec of a pipeline folder, configured from the folder's own configs.

    Raises:
        SpecError: no such folder, no model_index.json, or an index that names no pipeline class.
        UnknownArchitectureError: a pipeline class without a spec.
    """
    folder = component(path, ".", "model_index.json")
    file = folder / "model_index.json"
    name = read_json(file).get("_class_name")
    if not isinstance(name, str):
        raise SpecError(f"{str(file)!r} names no pipeline class: its `_class_name` is {name!r}.")
    return find(name)(folder)


def find(name: str) -> type[ModelSpec]:
    """The spec class behind a name; entry points are read only when no built-in one matches."""
    if name not in _BY_NAME:
        _read_entry_points()
    if name not in _BY_NAME:
        near = difflib.get_close_matches(str(name), list(_BY_NAME), n=1, cutoff=0.4)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise UnknownArchitectureError(
            f"No spec for the architecture {name!r}. Known: {', '.join(available())}.{hint} A package can add one "
            f"through the entry-point group {ENTRY_POINT_GROUP!r}."
        )
    return _BY_NAME[name]


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
