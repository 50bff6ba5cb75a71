"""Refuse settings of an algorithm that contradict each other, before anything is started. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sde_samplers.kinds import find_kind

from ray_trainer.config import RunConfig, updates_per_step
from ray_trainer.errors import TrainerError


def require(holds: bool, message: str) -> None:
    """Raise `TrainerError` with the message unless it holds."""
    if not holds:
        raise TrainerError(message)


def check_algorithm(config: RunConfig) -> None:
    """Everything below, for the family of the config's loss."""
    _check_policy_states(config)
    _check_guidance(config)
    spec = config.actor.diffusion_loss.spec
    if spec.replays:
        _check_window(config)
    if spec.paired:
        _check_pairs(config)


def _check_policy_states(config: RunConfig) -> None:
    """The old policy: kept where somebody reads it, following as it should, and the one that drew the samples."""
    states, old = config.model.policy_state_adapters, config.algorithm.old_policy
    sampler, loss = config.rollout.rollout_adapter, config.actor.diffusion_loss
    for key, name in (
        ("rollout.rollout_adapter", sampler),
        ("actor.forward_process.reference_state", config.actor.forward_process.reference_state),
    ):
        require(
            name == "reference" or name in states,
            f"{key}={name!r} is no policy state of this run ({', '.join(states)}); add it to model.policy_state_adapters",
        )
    if loss.spec.replays:
        require(
            sampler == "default",
            f"rollout.rollout_adapter={sampler!r} with loss_mode={loss.loss_mode}: its ratios need samples of the trained policy, "
            "so use default",
        )
    if not loss.needs_old_velocity:
        return
    if "old" in states:
        lags = old.update_every > 1 or (old.decay_rate > 0 and old.decay_max > 0)
        require(
            sampler == "old" or (sampler == "default" and not lags),
            f"loss_mode={loss.loss_mode} compares with the policy state old, and rollout.rollout_adapter={sampler!r} draws the "
            "samples: set it to old, or let old be a copy after every step (algorithm.old_policy at its defaults)",
        )
    else:
        updates = updates_per_step(config)
        require(
            sampler == "default" and updates == 1,
            f"loss_mode={loss.loss_mode} with {updates} updates per step and samples of {sampler!r} needs the policy that sampled: "
            "set model.policy_state_adapters=[default,old]",
        )


def _check_guidance(config: RunConfig) -> None:
    """A loss that compares with the velocity that sampled needs samples drawn by that velocity.

    Both DiffusionNFT and AWM are published without guidance. Guidance that is an input of the model (FLUX) is part of its
    velocity and may have any value; preference pairs may come from any sampler.
    """
    loss, scale = config.actor.diffusion_loss, config.rollout.pipeline.true_cfg_scale
    require(
        loss.spec.guided_samples or scale <= 1,
        f"rollout.pipeline.true_cfg_scale={scale} with loss_mode={loss.loss_mode}: it compares the conditional velocity with the "
        "one that drew the samples, and guidance draws with another; set rollout.pipeline.true_cfg_scale=1 (as published; "
        "rollout.val_kwargs.pipeline may have guidance)",
    )


def check_experts(config: RunConfig, index: Mapping[str, Any]) -> None:
    """Two experts behind one module (Wan2.2 A14B): processes that share its weights must enter the same one together.

    Args:
        index: content of the model's `model_index.json`.
    """
    loss, share = config.actor.diffusion_loss, config.algorithm.step_fraction
    # Whole copies need nothing of each other. A worker asks again once it is known whether they are whole.
    shared = config.trainer.num_workers > 1 and config.actor.fsdp_config.sharding == "shard"
    if index.get("boundary_ratio") is None or not shared:
        return
    causes = {
        f"loss_mode={loss.loss_mode} draws a noise level for each sample": not loss.spec.replays,
        f"algorithm.step_fraction={share} draws steps for each sample": share < 1,
    }
    for cause, holds in causes.items():
        require(
            not holds,
            f"model.path={config.model.path!r} has two experts (boundary_ratio={index['boundary_ratio']}), and {cause}: with "
            f"trainer.num_workers={config.trainer.num_workers} processes that share weights would wait for each other in different "
            "experts; set actor.fsdp_config.sharding=replicate or trainer.num_workers=1, or take "
            "a loss that trains the same steps of all samples (algorithm.step_fraction=1)",
        )


def _check_window(config: RunConfig) -> None:
    """There must be noisy steps, and they must lie within the run."""
    algo, steps = config.rollout.algo, config.rollout.pipeline.num_inference_steps
    require(
        find_kind(algo.kind).stochastic and algo.noise_level > 0,
        f"rollout.algo.sde_type={algo.sde_type} with noise_level={algo.noise_level} draws no noise, and a policy gradient needs "
        "some: take flow_sde, flow_cps or dance_sde and a noise_level above 0",
    )
    first, end = algo.sde_window_range or (0, max(steps - 1, 1))
    require(
        end <= steps,
        f"rollout.algo.sde_window_range={[first, end]} leaves rollout.pipeline.num_inference_steps={steps}; end it at {steps}",
    )
    size = end - first if algo.sde_window_size is None else algo.sde_window_size
    require(
        1 <= size <= end - first,
        f"rollout.algo.sde_window_size={size} must be 1 to {end - first}, the steps of the window's range",
    )


def _check_pairs(config: RunConfig) -> None:
    """Two rows that belong together must stay together."""
    actor, workers = config.actor, config.trainer.num_workers
    require(
        actor.ppo_micro_batch_size_per_gpu % 2 == 0,
        f"actor.ppo_micro_batch_size_per_gpu={actor.ppo_micro_batch_size_per_gpu} must be even: dpo takes pairs of rows",
    )
    require(
        actor.ppo_mini_batch_size % (2 * workers) == 0,
        f"actor.ppo_mini_batch_size={actor.ppo_mini_batch_size} must divide by {2 * workers}: pairs of rows for each worker",
    )
