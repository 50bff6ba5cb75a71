"""The command line of dpo-online."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from ray_trainer.cli import App, run
from ray_trainer.config import RunConfig


def _train(config: RunConfig) -> int:
    from ray_trainer.cluster import ray_session

    from dpo_online.trainer import make_trainer

    with ray_session(config.ray):
        make_trainer(config).fit()
    return 0


APP = App(
    name="dpo-online",
    summary="forward-process RL for diffusion models (online Diffusion-DPO, DiffusionNFT, AWM)",
    recipes=Path(str(files("dpo_online") / "recipes")),
    default="tiny_dpo",
    losses=("dpo", "diffusion_nft", "awm"),
    train=_train,
)


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    return run(APP, argv)
