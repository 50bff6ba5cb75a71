"""Finds the spec of an architecture: by any of its names, of a pipeline folder, or in a person's own module. Imports without torch.

Third parties add one through the entry-point group `model_specs`: the entry's value is a `ModelSpec` subclass.
"""

from __future__ import annotations

import difflib
import pkgutil
from collections.abc import Iterable
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from .base import ModelSpec
from .errors import SpecError, UnknownArchitectureError
from .flux import FluxSpec
from .folders import component, read_json
from .qwen_image import QwenImageSpec
from .sd3 import SD3Spec
from .wan import WanSpec
from .z_image import ZImageSpec

ENTRY_POINT_GROUP = "model_specs"
BUILTIN: tuple[type[ModelSpec], ...] = (FluxSpec, QwenImageSpec, SD3Spec, WanSpec, ZImageSpec)


def available() -> list[str]:
    """Short names of all known architectures, third parties' included."""
    return sorted({spec.name for spec in _by_name(_installed()).values()})


def get_spec(name: str) -> ModelSpec:
    """The spec that `find` finds, with the sizes of the published model."""
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
    """The class behind a short name, a transformer or pipeline class name, or "module:Class".

    Raises:
        UnknownArchitectureError: no such name; the message lists the known ones and the nearest.
        SpecError: what the name stands for cannot be imported, or is no spec.
    """
    if ":" in name:
        try:
            return _checked(pkgutil.resolve_name(name), name)
        except (ImportError, AttributeError, ValueError) as error:
            if isinstance(error, SpecError):
                raise
            raise SpecError(f"The architecture {name!r} cannot be imported: {error}") from error
    known = _by_name(BUILTIN)
    if name not in known:  # looking at what is installed takes a while
        known = _by_name(_installed())
    if name not in known:
        near = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.4)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise UnknownArchitectureError(
            f"No spec for the architecture {name!r}. Known: {', '.join(available())}.{hint} Name a class of your own as "
            f"'module:Class', or add it by an entry point of the group {ENTRY_POINT_GROUP!r}."
        )
    return known[name]


def _by_name(specs: Iterable[type[ModelSpec]]) -> dict[str, type[ModelSpec]]:
    found: dict[str, type[ModelSpec]] = {}
    for spec in specs:
        for name in (spec.name, spec.transformer_class, spec.pipeline_class):
            if found.setdefault(name, spec) is not spec:
                raise SpecError(
                    f"{name!r} is taken by {found[name].__qualname__}: give {spec.__qualname__} names of its own."
                )
    return found


@cache
def _installed() -> tuple[type[ModelSpec], ...]:
    """The built-in specs, and those of entry points."""
    others = []
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        try:
            others.append(_checked(entry.load(), entry.value))
        except Exception as error:
            raise SpecError(f"The entry point {entry.name!r} = {entry.value!r} cannot be loaded: {error}") from error
    return (*BUILTIN, *others)


def _checked(found: Any, name: str) -> type[ModelSpec]:
    if not (isinstance(found, type) and issubclass(found, ModelSpec)):
        raise SpecError(f"{name}: {found!r} is not a subclass of model_specs.ModelSpec; give the class itself.")
    return found
