"""Reference vectors: numbers computed by public trainers at the commits named in data/index.json."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

DATA = Path(__file__).parent / "data"
# Of windows and of the solver's SDE form that no program here uses, and that this package does not have.
LEFT_OUT = {"mix.exp_decay", "ff.random_subset", "mix.dpmsolverpp.o1.sde.s3", "mix.dpmsolverpp.o1.sde.s6"}
VECTORS: list[dict[str, Any]] = [
    entry for entry in json.loads((DATA / "index.json").read_text())["vectors"] if entry["case"] not in LEFT_OUT
]


@cache
def _tensors(file: str) -> dict[str, torch.Tensor]:
    return load_file(DATA / f"{file}.safetensors")


class Vector:
    """`vector["out.mean"]` is a tensor, `vector.params` what the peer was called with."""

    def __init__(self, entry: dict[str, Any]) -> None:
        self.file, self.case, self.params = entry["file"], entry["case"], entry["params"]

    def __getitem__(self, name: str) -> torch.Tensor:
        return _tensors(self.file)[f"{self.case}.{name}"]

    def __contains__(self, name: str) -> bool:
        return f"{self.case}.{name}" in _tensors(self.file)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `<file>_vector` runs once per vector of that file."""
    for name in metafunc.fixturenames:
        if name.endswith("_vector"):
            entries = [v for v in VECTORS if v["file"] == name.removesuffix("_vector")]
            metafunc.parametrize(name, [Vector(v) for v in entries], ids=[v["case"] for v in entries])
