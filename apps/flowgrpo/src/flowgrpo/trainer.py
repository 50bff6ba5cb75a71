"""FlowGRPO (arXiv 2505.05470) as hooks on the shared loop.

A few denoising steps become stochastic (an SDE with the ODE's marginals), so each has a Gaussian density; the group-relative
advantage of a finished picture then weighs the log-prob ratio of those steps. Deviation from the paper's code: the KL to the
base uses the transition's total std, ⟨(μ-μ_ref)²⟩/(2S²) with S = s√h, where the paper's code leaves √h out.
"""

from __future__ import annotations

import torch
from diffusion_losses import rollout_correction
from ray_trainer import schema
from ray_trainer.step_metrics import Metrics
from ray_trainer.trainer import RayDiffusionTrainer
from ray_trainer.workers import ActorRolloutRefWorker as Worker
from run_report import read_metrics
from sde_samplers import seed_of
from tensordict import TensorDict

FLOOR, SHARE = "rollout/log_prob_floor", 0.1
"""Largest difference of trainer's and rollout's log-probs at the first step; the share of the clip up to which it is no matter."""


class RayFlowGRPOTrainer(RayDiffusionTrainer):
    """generate_sequence → compute_rm_score → compute_advantage → compute_old_log_prob → compute_ref_log_prob → update_actor."""

    def prepare_update(self, batch: TensorDict, step: int) -> tuple[TensorDict, Metrics]:
        """Advantages, then old log-probs and, where a KL needs them, reference means of the rows that are left."""
        batch, metrics = self.compute_advantage(batch)
        schema.check(batch, ("advantages",), "compute_advantage")
        if len(batch):
            self.choose_steps(batch, step)
            metrics |= self.compute_old_log_prob(batch, step)
            self.compute_ref_log_prob(batch)
        return batch, metrics

    def compute_old_log_prob(self, batch: TensorDict, step: int) -> Metrics:
        """`old_log_probs` [W] of each row, and `old_means` where the loss needs them, in the workers that keep the rows.

        The rollout's own numbers serve when sampler and trainer are one function; their difference is logged at every step
        as `actor/rollout_log_prob_diff_max`. Otherwise the trainer scores the trajectory again, but for the rows of the first
        mini-batch where nothing else reads their scores: the update's own forward gives them. `algorithm.rollout_correction`
        then makes `rollout_weights` and `mask` [B, W] of the two.
        """
        metrics: Metrics = {}
        fix = self.config.algorithm.rollout_correction
        old: str = self.config.algorithm.old_log_probs
        if old == "auto":
            old, metrics = self._settled(batch)
        if old == "rollout" and fix.mode != "bypass":
            return metrics
        if fix.mode == "none" and self.config.update_scores_first:
            self.workers.score_after_first(batch, step)
            return metrics
        both = self.workers.each_row(Worker.compute_log_prob if old == "trainer" else Worker.measure_log_prob, batch)
        if fix.mode == "none":
            return metrics
        found = rollout_correction(
            both[:, 0], both[:, 1], mode=fix.mode, level=fix.level, cap=fix.cap, reject=fix.reject
        )
        batch["mask"] = found.mask
        if fix.mode == "decoupled":
            batch["rollout_weights"] = found.weights
        return metrics | {name: float(value) for name, value in found.metrics.items()}

    _floor: float | None = None

    def _settled(self, batch: TensorDict) -> tuple[str, Metrics]:
        """What `algorithm.old_log_probs=auto` comes to: the rollout's where they are within a tenth of the clip range of the
        trainer's at the first step of the run. A resumed run reads the difference of that step in metrics.jsonl."""
        clip, said = self.config.actor.diffusion_loss.clip_ratio, {}
        if self._floor is None:
            seen = [row[FLOOR] for row in read_metrics(self.run.path) if FLOOR in row]
            if not seen:
                both = self.workers.each_row(Worker.measure_log_prob, batch)
                seen = [float((both[:, 0] - both[:, 1]).abs().max())]
                said = {FLOOR: seen[0]}
            self._floor = seen[0]
            close = self._floor <= clip * SHARE
            decoupled = self.config.algorithm.rollout_correction.mode == "decoupled"
            self._note(
                f"algorithm.old_log_probs=auto: at the first step trainer and rollout differ by {self._floor:.2e} at most, "
                f"{'within' if close else 'more than'} {SHARE:g} of clip_ratio={clip:g}: "
                + ("the rollout's own log-probs serve" if close else "the trainer scores the samples again")
                + (", so rollout_correction does nothing" if close and decoupled else "")
            )
        return ("rollout" if self._floor <= clip * SHARE else "trainer"), said

    def compute_ref_log_prob(self, batch: TensorDict) -> None:
        """`ref_means` [W, …] of the base policy, the same weights with the adapter off; only when the loss has a KL term."""
        if self.config.actor.diffusion_loss.reference_key == "ref_means":
            self.workers.each(Worker.compute_ref_log_prob, batch)

    def choose_steps(self, batch: TensorDict, step: int) -> None:
        """Train `algorithm.step_fraction` of every sample's window, drawn for each sample on its own (DanceGRPO,
        arXiv 2505.07818)."""
        window = len(batch["settings"][0].window)
        chosen = chosen_steps(len(batch), window, self.config.algorithm.step_fraction, self.config.trainer.seed, step)
        if chosen is not None:
            self.workers.each(Worker.choose_steps, batch, chosen)


def chosen_steps(rows: int, window: int, fraction: float, seed: int, step: int) -> torch.Tensor | None:
    """Steps [rows, W'] of a window of W that are trained, in order; None where that is all of them.

    Args:
        rows: samples, each of which gets a choice of its own.
        window: W.
        fraction: share of W, rounded down, at least one step.
        seed, step: of the run and the training step; the choice depends on nothing else.
    """
    kept = max(int(window * fraction), 1)
    if kept == window:
        return None
    generator = torch.Generator().manual_seed(seed_of(seed, "steps", step))
    return torch.rand(rows, window, generator=generator).argsort(dim=1)[:, :kept].sort(dim=1).values
