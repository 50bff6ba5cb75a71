"""The command line of flowgrpo."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from ray_trainer.cli import App, run
from ray_trainer.config import RunConfig


def _train(config: RunConfig) -> int:
    from ray_trainer.cluster import ray_session

    from flowgrpo.trainer import RayFlowGRPOTrainer

    with ray_session(config.ray):
        RayFlowGRPOTrainer(config).fit()
    return 0


APP = App(
    name="flowgrpo",
    summary="policy-gradient RL for diffusion models (FlowGRPO and its family)",
    recipes=Path(str(files("flowgrpo") / "recipes")),
    default="tiny_flow_grpo",
    losses=("flow_grpo", "dance_grpo", "mix_grpo", "grpo_guard", "flow_dppo", "gspo"),
    train=_train,
)


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    return run(APP, argv)
