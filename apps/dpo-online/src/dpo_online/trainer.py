"""Online Diffusion-DPO (arXiv 2311.12908 in its flow form) as a hook on the shared loop.

Each step samples fresh pictures by the plain ODE, makes preference pairs within every prompt's group, and moves the policy's
denoising error on the better one below that on the worse one, both measured against the base policy (the adapter off) at the same
noise and the same noise level. No trajectory and no log-prob is needed.
"""

from __future__ import annotations

from diffusion_losses import make_pairs
from ray_trainer.trainer import Metrics, RayDiffusionTrainer
from tensordict import TensorDict


class RayOnlineDPOTrainer(RayDiffusionTrainer):
    """Rollout → rewards → pairs per `uid` → update."""

    def prepare_update(self, batch: TensorDict, step: int) -> tuple[TensorDict, Metrics]:
        """Rows winner, loser, winner, loser, …; ties and groups without a preference are skipped and counted."""
        algorithm = self.config.algorithm
        pairs = make_pairs(
            batch["rm_scores"][:, 0], list(batch["uid"]), margin=algorithm.pair_margin, mode=algorithm.pair_mode
        )
        metrics = {name: float(value) for name, value in pairs.metrics.items()}
        gaps = batch["rm_scores"][pairs.winner, 0] - batch["rm_scores"][pairs.loser, 0]
        metrics["pairs/reward_gap"] = float(gaps.mean()) if len(gaps) else 0.0
        return batch[pairs.interleaved()], metrics
