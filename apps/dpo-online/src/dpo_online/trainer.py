"""Forward-process RL as hooks on the shared loop: online Diffusion-DPO, DiffusionNFT and AWM.

Each step samples fresh pictures by a plain ODE solver and scores them; no trajectory and no log-prob of the sampler is needed.
The update noises the clean latents again and looks at the velocity there:

* DPO (arXiv 2311.12908, flow form): of each pair of one prompt, the policy's denoising error on the better picture shall fall
  below that on the worse one, both measured against the reference at the same noise and noise level.
* DiffusionNFT (arXiv 2509.16117): the better a picture, the more an implicit positive policy is pulled to it, and the worse,
  the more a negative one; samples come from a slowly following `old` policy.
* AWM (arXiv 2509.25050): the clipped surrogate of policy gradients, on the ratio of denoising errors in place of log-probs.
"""

from __future__ import annotations

from diffusion_losses import make_pairs
from ray_trainer import schema
from ray_trainer.step_metrics import Metrics
from ray_trainer.trainer import RayDiffusionTrainer
from tensordict import TensorDict


class RayOnlineDPOTrainer(RayDiffusionTrainer):
    """Rollout → rewards → pairs per `uid` → update."""

    def prepare_update(self, batch: TensorDict, step: int) -> tuple[TensorDict, Metrics]:
        """Rows winner, loser, winner, loser, …; ties and groups without a preference are skipped and counted."""
        algorithm = self.config.algorithm
        pairs = make_pairs(
            batch["rm_scores"][:, 0],
            list(batch["uid"]),
            margin=algorithm.pair_margin,
            mode=algorithm.pair_mode,
            ties=algorithm.pair_ties,
        )
        metrics = {name: float(value) for name, value in pairs.metrics.items()}
        gaps = batch["rm_scores"][pairs.winner, 0] - batch["rm_scores"][pairs.loser, 0]
        metrics["pairs/reward_gap"] = float(gaps.mean()) if len(gaps) else 0.0
        return batch[pairs.interleaved()], metrics


class RayForwardProcessTrainer(RayDiffusionTrainer):
    """Rollout → rewards → advantages → update: DiffusionNFT and AWM."""

    def prepare_update(self, batch: TensorDict, step: int) -> tuple[TensorDict, Metrics]:
        """`advantages` [B, 1] within each prompt; equal rewards mean r = 1/2 to DiffusionNFT, a pull to the old policy."""
        batch, metrics = self.compute_advantage(batch)
        schema.check(batch, ("advantages",), "compute_advantage")
        return batch, metrics
