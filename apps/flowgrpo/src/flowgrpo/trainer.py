"""FlowGRPO (arXiv 2505.05470) as hooks on the shared loop.

A few denoising steps become stochastic (an SDE with the ODE's marginals), so each has a Gaussian density; the group-relative
advantage of a finished picture then weighs the log-prob ratio of those steps. Deviation from the paper's code: the KL to the
base uses the transition's total std, ⟨(μ-μ_ref)²⟩/(2S²) with S = s√h, where the paper's code leaves √h out.
"""

from __future__ import annotations

import torch
from ray_trainer import schema
from ray_trainer.step_metrics import Metrics
from ray_trainer.trainer import RayDiffusionTrainer
from ray_trainer.workers import ActorRolloutRefWorker as Worker
from tensordict import TensorDict


class RayFlowGRPOTrainer(RayDiffusionTrainer):
    """generate_sequence → compute_rm_score → compute_advantage → compute_old_log_prob → compute_ref_log_prob → update_actor."""

    def prepare_update(self, batch: TensorDict, step: int) -> tuple[TensorDict, Metrics]:
        """Advantages, then old log-probs and, where a KL needs them, reference means of the rows that are left."""
        schema.check(batch, schema.TRAJECTORY, "rollout")
        batch = choose_steps(batch, self.config.algorithm.step_fraction, self.config.trainer.seed, step)
        batch, metrics = self.compute_advantage(batch)
        if len(batch) == 0:
            return batch, metrics
        batch = self.compute_old_log_prob(batch)
        batch = self.compute_ref_log_prob(batch)
        schema.check(batch, schema.UPDATE, "compute_advantage")
        return batch, metrics

    def compute_old_log_prob(self, batch: TensorDict) -> TensorDict:
        """`old_log_probs` [B, W], and `old_means` where the loss needs them.

        The rollout's own numbers serve when sampler and trainer are one function; their difference is logged at every step
        as `actor/rollout_log_prob_diff_max`. Otherwise the trainer scores the trajectory again.
        """
        if self.config.algorithm.old_log_probs == "rollout":
            batch["old_log_probs"] = batch["rollout_log_probs"]
            if self.config.rollout_means:
                batch["old_means"] = batch["means"]
            return batch
        scored = self.workers.run_batch(Worker.compute_log_prob, batch)
        batch["old_log_probs"], batch["old_means"] = scored["log_probs"], scored["means"]
        return batch

    def compute_ref_log_prob(self, batch: TensorDict) -> TensorDict:
        """`ref_means` [B, W, …] of the base policy, the same weights with the adapter off; only when the loss has a KL term."""
        if self.config.actor.diffusion_loss.reference_key == "ref_means":
            batch["ref_means"] = self.workers.run_batch(Worker.compute_ref_log_prob, batch)["means"]
        return batch

    def compute_advantage(self, batch: TensorDict) -> tuple[TensorDict, Metrics]:
        """`advantages` [B, W]: every trained step of a sample has the sample's."""
        batch, metrics = super().compute_advantage(batch)
        batch["advantages"] = batch["advantages"].expand(-1, batch["latents"].shape[1]).contiguous()
        return batch, metrics


def choose_steps(batch: TensorDict, fraction: float, seed: int, step: int) -> TensorDict:
    """Keep `fraction` of every sample's window, drawn for each sample on its own (DanceGRPO, arXiv 2505.07818).

    Args:
        batch: with the keys of a trajectory [B, W, …].
        fraction: share of W, rounded down, at least one step.
        seed, step: of the run and the training step; the choice depends on nothing else.
    """
    rows, window = batch["step_index"].shape
    kept = max(int(window * fraction), 1)
    if kept == window:
        return batch
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step) % 2**63)
    chosen = torch.rand(rows, window, generator=generator).argsort(dim=1)[:, :kept].sort(dim=1).values
    batch = batch.copy()
    for key in [*schema.TRAJECTORY, *(["means"] if "means" in batch.keys() else [])]:  # noqa: SIM118
        batch[key] = batch[key][torch.arange(rows)[:, None], chosen]
    return batch
