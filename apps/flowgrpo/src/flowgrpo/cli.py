"""The command line of flowgrpo."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from ray_trainer.app import App
from ray_trainer.cli import run
from ray_trainer.config import RunConfig

if TYPE_CHECKING:
    from ray_trainer.trainer import RayDiffusionTrainer


def _trainer(config: RunConfig) -> type[RayDiffusionTrainer]:
    from flowgrpo.trainer import RayFlowGRPOTrainer

    return RayFlowGRPOTrainer


APP = App(
    name="flowgrpo",
    summary="policy-gradient RL for diffusion models (FlowGRPO and its family)",
    recipes=Path(str(files("flowgrpo") / "recipes")),
    default="tiny_grpo_guard",
    family="policy_gradient",
    trainer=_trainer,
)


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    return run(APP, argv)
