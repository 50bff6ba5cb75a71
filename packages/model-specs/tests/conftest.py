"""Tiny pipelines, built once per session, and a recorder of what a stock pipeline computes at every step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from model_specs import get_spec_for, tiny
from torch import Tensor


@dataclass
class Step:
    """One call of the stock scheduler's `step`."""

    velocity: Tensor
    sigma: Tensor
    latents: Tensor
    next_latents: Tensor


@dataclass
class Loaded:
    """A tiny pipeline, through this package and through stock diffusers."""

    folder: Path
    spec: Any
    transformer: Any
    encoder: Any
    vae: Any
    scheduler: Any
    pipeline: Any
    steps: list[Step] = field(default_factory=list)

    @property
    def multistep(self) -> bool:
        """Whether the stock solver's step is another one than Euler's."""
        return "Multistep" in type(self.scheduler).__name__

    def velocity(
        self, network: Any, x: Tensor, sigma: Tensor, cond: Any, *, negative: Any = None, **options: Any
    ) -> Tensor:
        """The spec's, for settings of these values and else without guidance."""
        plain = {"num_frames": 1, "true_cfg_scale": 1.0, "guidance_scale": None}
        return self.spec.velocity(network, x, sigma, cond, SimpleNamespace(**plain | options), negative)

    def record(self, **call: Any) -> Any:
        """Run the stock pipeline; its steps go to `steps`, its output array is returned."""
        scheduler = self.pipeline.scheduler
        original = type(scheduler).step
        self.steps = []

        def step(velocity: Tensor, timestep: Tensor, latents: Tensor, **options: Any) -> Any:
            sigma = scheduler.sigmas[len(self.steps)]
            result = original(scheduler, velocity, timestep, latents, **options)
            self.steps.append(Step(velocity.clone(), sigma.clone(), latents.clone(), result[0].clone()))
            return result

        scheduler.step = step
        try:
            return self.pipeline(output_type="np", **call)[0]
        finally:
            del scheduler.step


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`tiny_folder("flux")` is the folder of that tiny pipeline."""
    built: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in built:
            built[name] = tiny.build(name, tmp_path_factory.mktemp("tiny") / name)
        return built[name]

    return get


@pytest.fixture(scope="session")
def load(tiny_folder: Callable[[str], Path]) -> Callable[[str | Path], Loaded]:
    """`load("flux")` or `load(folder)`: everything loaded in fp32, once per session."""
    from diffusers import DiffusionPipeline

    done: dict[str, Loaded] = {}

    def get(name: str | Path) -> Loaded:
        key = str(name)
        if key not in done:
            folder = name if isinstance(name, Path) else tiny_folder(name)
            spec = get_spec_for(folder)
            pipeline = DiffusionPipeline.from_pretrained(folder, dtype=torch.float32)
            pipeline.set_progress_bar_config(disable=True)
            # PyTorch's CPU kernels add in another order for weights that want gradients: freeze both sides alike.
            for part in pipeline.components.values():
                if isinstance(part, torch.nn.Module):
                    part.requires_grad_(False)
            done[key] = Loaded(
                folder,
                spec,
                spec.load_transformer(folder).requires_grad_(False),
                spec.load_encoder(folder),
                spec.load_vae(folder),
                spec.load_scheduler(folder),
                pipeline,
            )
        return done[key]

    return get
