"""Policy-gradient losses over the steps of a stochastic trajectory.

Shapes: the step shape is [B] (one window step of a micro-batch) or [B, W]; latent-sized tensors add D... behind it.

    model_output  log_probs  [B] or [B, W]      with gradient
                  means      log_probs + D...   with gradient; GRPO-Guard, Flow-DPPO and a KL on means read it
                  velocity   log_probs + D...   with gradient; only a KL on velocities reads it
                  std        total std S of the transition, per step (may also be in data)
    data          old_log_probs, advantages     per step ([B] advantages are repeated over the window)
                  old_means, next_latents or noise    GRPO-Guard; old_means    Flow-DPPO
                  ref_means or ref_velocity     when ref_kl_coef > 0
                  sigma, sigma_next             GRPO-Guard's 1/h, and the KL kinds that read h
                  step_weights                  per step, or [W] in a [B, W] call; replaces config.step_weighting
                  rollout_weights               importance weights of `rollout_correction`
                  mask                          bool, which elements count
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .config import VELOCITY_KL_KINDS, DiffusionLossConfig
from .elements import (
    Source,
    element_mean,
    latent_sized,
    lookup,
    per_step,
    read_mask,
    refuse_non_finite,
    require,
    require_above_zero,
    require_full_precision,
    step_shape,
)
from .errors import LossError
from .kl import mean_kl, old_policy_kl, velocity_kl
from .reduction import element_loss
from .surrogates import (
    clip_shares,
    clipped_surrogate,
    divergence_keep,
    guard_log_ratio,
    noise_scale_weights,
    on_policy,
    safe_exp,
    trajectory_log_ratio,
)
from .types import ElementLoss, Metrics


@dataclass(frozen=True)
class Steps:
    """The checked inputs that every policy-gradient loss shares; all have the step shape."""

    config: DiffusionLossConfig
    model_output: Source
    data: Source
    log_ratio: Tensor  # with gradient; zero where masked
    advantages: Tensor
    mask: Tensor

    @classmethod
    def read(cls, config: DiffusionLossConfig, model_output: Source, data: Source, *, clamp: bool = True) -> Steps:
        mode = config.loss_mode
        name = "model_output['log_probs']"
        log_probs = require_full_precision(name, require(model_output, "log_probs", "model_output", mode))
        shape = step_shape(name, log_probs)
        old = require_full_precision("data['old_log_probs']", require(data, "old_log_probs", "data", mode)).detach()
        old = old.to(log_probs.device)
        if old.shape != shape:
            raise LossError(
                f"data['old_log_probs'] has shape {tuple(old.shape)} but log_probs has {tuple(shape)}; "
                "give both for the same steps"
            )
        given = require(data, "advantages", "data", mode).detach()
        advantages = per_step("data['advantages']", given, shape, log_probs).to(log_probs.dtype)
        mask = read_mask(data, shape, log_probs)
        refuse_non_finite(mask, log_probs=log_probs, old_log_probs=old, advantages=advantages)
        zero = torch.zeros_like(log_probs)
        log_ratio = torch.where(mask, log_probs - old, zero)
        advantages = torch.where(mask, advantages, zero)
        if clamp:
            advantages = advantages.clamp(-config.adv_clip_max, config.adv_clip_max)
        return cls(config, model_output, data, log_ratio, advantages, mask)

    @property
    def dims(self) -> int:
        return self.log_ratio.ndim

    def latents(self, source: Source, key: str, why: str, like: Tensor | None = None) -> Tensor:
        """A latent-sized tensor of the trajectory, in full precision; those of `data` come back detached."""
        where = "model_output" if source is self.model_output else "data"
        tensor = require(source, key, where, self.config.loss_mode, why)
        tensor = latent_sized(f"{where}[{key!r}]", tensor, self.log_ratio.shape, like)
        return require_full_precision(f"{where}[{key!r}]", tensor if where == "model_output" else tensor.detach())

    def means(self, why: str) -> Tensor:
        """The policy's transition means. Means cut off from the graph would give a silent zero gradient, so they are
        refused.
        """
        means = self.latents(self.model_output, "means", why)
        if self.log_ratio.requires_grad and not means.requires_grad:
            raise LossError("model_output['means'] carries no gradient while log_probs does; do not detach the means")
        return means

    def std(self, why: str) -> Tensor:
        """The total std per step, from model_output or data, above zero where counted."""
        value = lookup(self.model_output, "std")
        source = self.data if value is None else self.model_output
        value = require(source, "std", "model_output", self.config.loss_mode, why)
        return require_above_zero("std", self.step_value("std", value), self.mask)

    def step_value(self, key: str, value: Tensor | float | None = None, why: str = "") -> Tensor:
        """A per-step tensor of `data` (or `value`), detached."""
        found = require(self.data, key, "data", self.config.loss_mode, why) if value is None else value
        return per_step(key, found, self.log_ratio.shape, self.log_ratio).detach().to(self.log_ratio.dtype)

    def step_size(self, why: str) -> Tensor:
        """h = sigma - sigma_next per step, above zero where counted."""
        h = self.step_value("sigma", why=why) - self.step_value("sigma_next", why=why)
        return require_above_zero("sigma - sigma_next", h, self.mask, "noise levels must decrease along a trajectory")

    def step_weights(self) -> Tensor | None:
        """`data["step_weights"]` when given, else the weights that the config names; None means all ones."""
        given, shape = lookup(self.data, "step_weights"), self.log_ratio.shape
        if given is not None:
            if isinstance(given, Tensor) and len(shape) == 2 and given.ndim == 1 and given.shape[0] == shape[1]:
                given = given.to(self.log_ratio).expand(shape)
            return self.step_value("step_weights", given)
        name = self.config.resolved_step_weighting
        if name == "inverse_step":
            return 1.0 / self.step_size("step_weighting='inverse_step' weighs a step by 1 / (sigma - sigma_next)")
        if name == "noise_scale":
            if self.dims != 2:
                raise LossError(
                    f"step_weighting='noise_scale' cannot be normalised over one step (log_probs is {tuple(shape)}); "
                    "compute noise_scale_weights(std of the whole window) once and pass it as data['step_weights']"
                )
            return noise_scale_weights(self.std("noise-scale weights"), self.mask)
        return None

    def rollout_weights(self) -> Tensor | None:
        given = lookup(self.data, "rollout_weights")
        return None if given is None else self.step_value("rollout_weights", given)


def clipped_loss(config: DiffusionLossConfig, model_output: Source, data: Source) -> ElementLoss:
    """FlowGRPO (arXiv 2505.05470), DanceGRPO (2505.07818) and MixGRPO (2507.21802): PPO's clipped surrogate per step.

    The three differ outside the surrogate (sampler, which steps are trained, KL). Their division by accumulation
    steps and window length is `data["global_count"]` here.
    """
    steps = Steps.read(config, model_output, data)
    policy = clipped_surrogate(steps.log_ratio, steps.advantages, config.clip_ratio)
    return _finish(steps, policy, steps.log_ratio)


def trajectory_loss(config: DiffusionLossConfig, model_output: Source, data: Source) -> ElementLoss:
    """GSPO for diffusion: one clipped ratio per trajectory, exp of the mean log-ratio over its steps.

    Every counted step of a trajectory carries the trajectory's loss, so on-policy the gradient is that of the
    per-step mean, also with uneven masks. Needs [B, W].
    """
    steps = Steps.read(config, model_output, data)
    pooled = trajectory_log_ratio(steps.log_ratio, steps.mask, steps.step_weights())
    shared = pooled.unsqueeze(1).expand(steps.log_ratio.shape)
    policy = clipped_surrogate(shared, steps.advantages, config.clip_ratio)
    return _finish(steps, policy, shared, weighted=True)


def guard_loss(config: DiffusionLossConfig, model_output: Source, data: Source) -> ElementLoss:
    """GRPO-Guard (arXiv 2510.22319): the clipped surrogate on the normalised ratio, weighted by 1/h unless told
    otherwise.

    Reads `data["next_latents"]` (or `data["noise"]`) for the exact identity; without them falls back on the
    log-probs, which must then be Gaussian (not Flow-CPS's). The clip is applied to the log-ratio: see
    `config.guard_clip`.
    """
    steps = Steps.read(config, model_output, data)
    why = "GRPO-Guard's ratio is built from the transition means"
    means = steps.means(why)
    latents = {
        key: steps.latents(data, key, why, means) for key in ("next_latents", "noise") if lookup(data, key) is not None
    }
    log_ratio = guard_log_ratio(
        means,
        steps.latents(data, "old_means", why, means),
        steps.std(why),
        log_ratio=steps.log_ratio,
        dims=steps.dims,
        mask=steps.mask,
        **latents,
    )
    log_ratio = torch.where(steps.mask, log_ratio, torch.zeros_like(log_ratio))
    policy = clipped_surrogate(log_ratio, steps.advantages, config.clip_ratio, space=config.guard_clip)
    return _finish(steps, policy, log_ratio)


def divergence_loss(config: DiffusionLossConfig, model_output: Source, data: Source) -> ElementLoss:
    """Flow-DPPO (arXiv 2606.11025): -A r, dropped where the step has diverged and would diverge further. No ratio clip.

    Dropped elements stay in the denominator. `add_kl_coefficient=False` leaves out the 1 / S^2 of the divergence.
    """
    steps = Steps.read(config, model_output, data, clamp=config.dppo_clamp_advantages)
    why = "Flow-DPPO's mask is a divergence between transition means"
    means = steps.means(why).detach()
    old = steps.latents(data, "old_means", why, means)
    divergence = 0.5 * element_mean((means - old).square(), steps.dims)
    if config.add_kl_coefficient:
        divergence = divergence / steps.std(why).square()
    keep = divergence_keep(
        divergence, steps.log_ratio, steps.advantages, config.kl_mask_threshold, boundary=config.kl_mask_boundary
    )
    policy = torch.where(keep, -steps.advantages * safe_exp(steps.log_ratio), torch.zeros_like(steps.log_ratio))
    extra = {"actor/dppo_divergence": divergence, "actor/dppo_masked_fraction": (~keep).float()}
    return _finish(steps, policy, steps.log_ratio, clip=False, extra=extra, distance=divergence)


def _finish(
    steps: Steps,
    policy: Tensor,
    log_ratio: Tensor,
    *,
    clip: bool = True,
    weighted: bool = False,
    extra: Metrics | None = None,
    distance: Tensor | None = None,
) -> ElementLoss:
    """Weights, the KL term and the metrics that all policy-gradient losses report."""
    config = steps.config
    for weights in (None if weighted else steps.step_weights(), steps.rollout_weights()):
        policy = policy if weights is None else policy * weights
    means: Metrics = {
        "actor/pg_loss": policy,
        "actor/ppo_kl": -steps.log_ratio,
        "actor/on_policy": on_policy(steps.log_ratio),
        **(clip_shares(log_ratio, config.clip_ratio) if clip else {}),
        **(extra or {}),
    }
    kl = reference_kl(steps) if config.ref_kl_coef > 0 else None
    return element_loss(
        policy, steps.mask, means, kl=kl, kl_coef=config.ref_kl_coef, log_ratio=log_ratio, distance=distance
    )


def reference_kl(steps: Steps) -> Tensor:
    """The KL that `config.kl_kind` names, per step and unweighted."""
    kind = steps.config.resolved_kl_kind
    why = f"kl_kind={kind!r} with ref_kl_coef={steps.config.ref_kl_coef!r}"
    if kind == "old_policy":
        return old_policy_kl(steps.log_ratio)
    if kind in VELOCITY_KL_KINDS:
        return _velocity_kl(steps, kind, why)
    means = steps.means(why)
    ref = steps.latents(steps.data, "ref_means", why, means)
    std = None if kind == "unscaled" else steps.std(why)
    step = steps.step_size(why) if kind == "flow_grpo" else None
    return mean_kl(means, ref, kind=kind, std=std, step=step, dims=steps.dims, mask=steps.mask)


def _velocity_kl(steps: Steps, kind: str, why: str) -> Tensor:
    mode, shape = steps.config.loss_mode, steps.log_ratio.shape
    velocity = require(steps.model_output, "velocity", "model_output", mode, why)
    velocity = latent_sized("model_output['velocity']", velocity, shape)
    ref = latent_sized("data['ref_velocity']", require(steps.data, "ref_velocity", "data", mode, why), shape, velocity)
    if kind == "velocity":
        return velocity_kl(velocity, ref, dims=steps.dims)
    sigma, sigma_next = steps.step_value("sigma", why=why), steps.step_value("sigma_next", why=why)
    return velocity_kl(
        velocity,
        ref,
        kind=kind,
        std=steps.std(why),
        sigma=sigma,
        sigma_next=sigma_next,
        dims=steps.dims,
        mask=steps.mask,
    )
