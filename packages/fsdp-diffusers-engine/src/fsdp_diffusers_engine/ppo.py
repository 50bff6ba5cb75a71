"""Policy gradients: replay trained steps of a rollout and score them (FlowGRPO, MixGRPO, GRPO-Guard, …).

B samples, W trained steps, K sampler steps, S prompt tokens, C channels, `…` the latent's own shape.

A rollout stored, for each trained step, the latent before and after it. The policy's log-probability of that
transition is the density of the stored next latent under the transition that the present weights give: one forward of
the transformer and `sde_samplers.sde_step`, the same two calls that the rollout made, so that with unchanged weights
the log-ratio is zero up to the rounding of one forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from sde_samplers import sde_step
from torch import Tensor

from . import batch, losses, objective
from .adapters import REFERENCE
from .engine import DiffusersFSDPEngine
from .errors import EngineError
from .objective import Objective, Policy

if TYPE_CHECKING:
    from diffusion_losses.config import DiffusionLossConfig
    from sde_samplers.settings import SamplerSettings
    from tensordict import TensorDict


_TRAJECTORY = ("latents", "next_latents", "step_index", "sigmas")
_PER_STEP = (
    "old_log_probs",
    "old_means",
    "ref_means",
    "ref_velocity",
    "rollout_log_probs",
    "rollout_weights",
    "step_weights",
)
_PER_SAMPLE_OR_STEP = ("advantages", "mask")


class Replay(Objective):
    """Objective of losses on the log-probability of sampled transitions.

    Batch: `latents`, `next_latents` [B, W, …] fp32, `step_index` [B, W], `sigmas` [B, K+1] or [K+1] fp32,
    `prompt_embeds` [B, S, C] with `prompt_embeds_mask` [B, S] (or jagged), `negative_prompt_embeds` with mask
    when `true_cfg_scale` asks for them, `pooled_prompt_embeds` where the model takes them. For training:
    `advantages` [B] or [B, W], `old_log_probs` [B, W] (the rollout's own when absent; `batch.OWN` for rows whose own forward shall
    give them), and what the loss needs of
    `old_means`, `ref_means` [B, W, …], `step_weights` [B, W], `mask` [B] or [B, W] (which elements count), and the
    tensors that the loss's `LossSpec.reads` names beside these, [B] or [B, W, …].
    Non-tensor data: `micro_batch_size`, and `settings`, the `sde_samplers.SamplerSettings` that drew it; optionally
    `global_count`, the number of counted (sample, step) elements of the whole mini-batch over all ranks.

    A forward-only pass returns `log_probs`, `std` [b, W] and `means` [b, W, …] per micro-batch.
    """

    steps_of = (*_PER_STEP, *_PER_SAMPLE_OR_STEP)

    def reads(self, config: DiffusionLossConfig) -> tuple[str, ...]:
        """See `objective.Objective`."""
        std = ("std",) if config.resolved_step_weighting == "noise_scale" else ()
        return (*_TRAJECTORY, "rollout_log_probs", *std)

    def prepare(
        self, policy: Policy, data: TensorDict, config: DiffusionLossConfig | None, training: bool
    ) -> tuple[list[dict[str, Any]], int]:
        """Check the batch, take what is needed of it, and cut it: (micro-batches, number of trained steps)."""
        settings = batch.settings_of(data)
        for key in _TRAJECTORY:
            batch.tensor(data, key, "the rollout writes it; ask it for trajectories (return_trajectory=True)")
        for key in ("latents", "next_latents", "sigmas"):
            batch.require_fp32(data[key], key)
        if training:
            batch.tensor(data, "advantages", "compute advantages before the update")
        of_samples = (*_PER_SAMPLE_OR_STEP, *losses.own_tensors(config, data))
        keys = (*_TRAJECTORY, *batch.PROMPTS, *((*_PER_STEP, *of_samples) if training else ()))
        tensors = batch.select(data, keys, policy.device)
        # The schedule stays on the CPU: its numbers are read there, and reading them from a GPU would wait for it.
        tensors |= {key: data[key].cpu() for key in ("step_index", "sigmas")}
        count, steps = tensors["latents"].shape[:2]
        if tensors["sigmas"].ndim == 1:
            tensors["sigmas"] = tensors["sigmas"].expand(count, -1)
        for key, value in tensors.items():
            per_step = key in ("next_latents", "step_index", *_PER_STEP, *of_samples)
            if key in of_samples and value.shape in ((count,), (count, 1)):
                tensors[key] = value.reshape(count, 1).expand(count, steps)
            elif per_step and value.shape[:2] != (count, steps):
                raise EngineError(
                    f"{key!r} is {list(value.shape)}; with latents {list(tensors['latents'].shape)} it must begin "
                    f"with [{count}, {steps}]"
                )
        if training and "old_log_probs" not in tensors:
            remedy = "give old_log_probs, or the rollout's own under that name"
            tensors["old_log_probs"] = batch.tensor(tensors, "rollout_log_probs", remedy)
        if config is not None and config.resolved_step_weighting == "noise_scale" and not config.needs_trajectory:
            losses.add_noise_scale_weights(tensors, data, policy.device)
        counted = float(tensors["mask"].sum()) if "mask" in tensors else float(count * steps)
        return objective.cut(policy.layout, data, tensors, settings, counted), steps

    def inputs(self, policy: Policy, micro_batch: Mapping[str, Any], step: int) -> dict[str, Any]:
        """Inputs of trained step `step`: latents [b, …], sigma [b], and the transition's three sigmas,
        which are plain numbers where all samples share them (then the arithmetic is the rollout's own, to the bit)."""
        rows = torch.arange(len(micro_batch["step_index"]))
        index = micro_batch["step_index"][:, step]
        sigmas = micro_batch["sigmas"]
        # The schedule's second entry stands in for sigma = 1 in Flow-SDE's std, at every step, as in the rollout.
        sigma, sigma_next, sigma_cap = sigmas[rows, index], sigmas[rows, index + 1], sigmas[:, 1]
        shared = all(bool((value == value[0]).all()) for value in (sigma, sigma_next, sigma_cap))
        transition = {"sigma": sigma, "sigma_next": sigma_next, "sigma_cap": sigma_cap}
        return {
            "latents": micro_batch["latents"][:, step],
            "next_latents": micro_batch["next_latents"][:, step],
            "sigma": sigma.to(policy.device),
            "sigma_next": sigma_next.to(policy.device),
            "transition": {k: float(v[0]) for k, v in transition.items()} if shared else transition,
            "old_log_probs": micro_batch["old_log_probs"][:, step] if "old_log_probs" in micro_batch else None,
        }

    def score(self, inputs: Mapping[str, Any], velocity: Tensor, settings: SamplerSettings) -> dict[str, Tensor]:
        """Score the stored transition: `log_probs`, `std` [b], `means`, `velocity` [b, …]."""
        step = sde_step(
            inputs["latents"],
            velocity,
            **inputs["transition"],
            kind=settings.kind,
            noise_level=settings.noise_level,
            prev_sample=inputs["next_latents"],
        )
        if step.log_prob is None:
            raise EngineError(
                f"kind={settings.kind!r} with noise_level={settings.noise_level!r} has no log-probability; train on SDE steps "
                f"(kind 'flow_sde', 'flow_cps', … and noise_level > 0)"
            )
        return {"log_probs": step.log_prob, "means": step.mean, "std": step.std, "velocity": velocity}

    def scores(self, inputs: Mapping[str, Any], output: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See the class."""
        return {key: output[key] for key in ("log_probs", "means", "std")}

    def row(
        self, inputs: Mapping[str, Any], output: Mapping[str, Tensor], config: DiffusionLossConfig | None
    ) -> dict[str, Tensor]:
        """Where the transition begins and ends, and its old log-prob."""
        old, own = inputs["old_log_probs"], output["log_probs"].detach()
        known = {} if old is None else {"old_log_probs": torch.where(old.isnan(), own, old)}
        return {key: inputs[key] for key in ("sigma", "sigma_next", "next_latents")} | known

    def others(
        self, policy: Policy, micro_batch: Mapping[str, Any], step: int, config: DiffusionLossConfig
    ) -> dict[str, Tensor]:
        """The reference policy's transition, when the loss wants it and the batch has none: with a LoRA one more forward with
        adapters off, and no second model."""
        if not config.needs_reference or config.reference_key in micro_batch:
            return {}
        inputs = self.inputs(policy, micro_batch, step)
        with torch.no_grad(), policy.use_adapter(REFERENCE):
            base = self.score(inputs, self.velocity(policy, micro_batch, inputs), micro_batch["settings"])
        return {"ref_means": base["means"], "ref_velocity": base["velocity"]}


class PPODiffusersFSDPEngine(DiffusersFSDPEngine):
    """An engine that replays; see `Replay` for its batches, `DiffusersFSDPEngine` for its arguments."""

    objective = Replay()
