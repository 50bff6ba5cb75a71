"""Reference vectors: a reader for the safetensors files in tests/data, and one test case per vector."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

DATA = Path(__file__).parent / "data"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "I64": torch.int64}


@dataclass
class Vector:
    """One reference case: parameters, `given` inputs and `want` outputs by tensor name."""

    file: str
    case: str
    params: dict[str, Any]
    given: dict[str, torch.Tensor] = field(default_factory=dict)
    want: dict[str, torch.Tensor] = field(default_factory=dict)


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """The format by hand, so that the tests need nothing but torch."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header, body = json.loads(raw[8 : 8 + size]), bytearray(raw[8 + size :])
    out = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        start, end = entry["data_offsets"]
        flat = torch.frombuffer(body[start:end], dtype=DTYPES[entry["dtype"]])
        out[name] = flat.reshape(entry["shape"]).clone()
    return out


def load_vectors() -> list[Vector]:
    entries = json.loads((DATA / "index.json").read_text())["vectors"]
    files = {name: read_safetensors(DATA / f"{name}.safetensors") for name in {e["file"] for e in entries}}
    vectors = []
    for entry in entries:
        vector = Vector(entry["file"], entry["case"], entry["params"])
        for name, tensor in files[entry["file"]].items():
            if name.startswith(f"{vector.case}.in."):
                vector.given[name.removeprefix(f"{vector.case}.in.")] = tensor
            elif name.startswith(f"{vector.case}.out."):
                vector.want[name.removeprefix(f"{vector.case}.out.")] = tensor
        vectors.append(vector)
    return vectors


# DanceGRPO's best-of-n selection is not in this package: no program here uses it.
VECTORS = [vector for vector in load_vectors() if not vector.case.startswith("dance.bestofn")]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "golden(file, prefix): run once per reference vector; the fixture `vector` is it"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("golden")
    if marker is None:
        return
    file, prefix = marker.args
    chosen = [v for v in VECTORS if v.file == file and v.case.startswith(prefix)]
    assert chosen, f"no vector in {file} starts with {prefix!r}"
    metafunc.parametrize("vector", chosen, ids=[v.case for v in chosen])


@pytest.fixture(scope="session")
def vectors() -> dict[tuple[str, str], Vector]:
    return {(v.file, v.case): v for v in VECTORS}


@pytest.fixture(scope="session")
def sd3_sigmas() -> list[float]:
    """The 10-step SD3 grid of the vectors, in float64: shifted by 3, spaced linearly, shifted by 3 again, then 0."""

    def shift(t: float) -> float:
        return 3.0 * t / (1.0 + 2.0 * t)

    low = shift(1.0 / 1000.0)
    return [shift(1.0 + (low - 1.0) * i / 9.0) for i in range(10)] + [0.0]


@dataclass(frozen=True)
class FlowStep:
    """One Flow-SDE transition in float64: x_next ~ N(mean(v), S^2), mean = x - h [v + s^2 / (2 t) (x + (1 - t) v)]."""

    t: float
    h: float
    s: float

    @property
    def total_std(self) -> float:
        return self.s * math.sqrt(self.h)

    @property
    def dmean_dv(self) -> float:
        return -self.h * (1.0 + self.s**2 * (1.0 - self.t) / (2.0 * self.t))

    def mean(self, x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return x - self.h * (v + self.s**2 / (2.0 * self.t) * (x + (1.0 - self.t) * v))

    def log_prob(self, x_next: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        z = (x_next - mean) / self.total_std
        constant = math.log(self.total_std) + 0.5 * math.log(2.0 * math.pi)
        return (-0.5 * z * z - constant).flatten(1).mean(1)


@pytest.fixture(scope="session")
def flow_step(sd3_sigmas: list[float]) -> Any:
    def make(index: int, noise_level: float) -> FlowStep:
        t, u = sd3_sigmas[index], sd3_sigmas[index + 1]
        guarded = sd3_sigmas[1] if index == 0 else t
        return FlowStep(t, t - u, noise_level * math.sqrt(t / (1.0 - guarded)))

    return make
