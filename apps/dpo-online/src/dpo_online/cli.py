"""The command line of dpo-online."""

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
    from dpo_online.offline import RayOfflineTrainer
    from dpo_online.trainer import RayForwardProcessTrainer, RayOnlineDPOTrainer

    if config.data.offline:
        return RayOfflineTrainer
    return RayOnlineDPOTrainer if config.actor.diffusion_loss.spec.paired else RayForwardProcessTrainer


APP = App(
    name="dpo-online",
    summary="training on clean pictures for diffusion models (online and offline Diffusion-DPO, DiffusionNFT, AWM, SFT)",
    recipes=Path(str(files("dpo_online") / "recipes")),
    default="tiny_dpo",
    family="forward_process",
    trainer=_trainer,
)


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    return run(APP, argv)
