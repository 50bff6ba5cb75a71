"""Losses that need no trajectory, only clean latents: DiffusionNFT, Advantage-Weighted Matching, and flow matching itself.

They noise x0 themselves, x_t = (1 - t) x0 + t e, and look at the velocity v(x_t, t), whose regression target is e - x0.

    model_output  velocity [B, D...] or [B, W, D...] (W noise levels per sample), with gradient
    data          x0 [B, D...]; sigma per step: [B] or [B, W], the t above; advantages per step
                  NFT: x_t or noise; old_velocity (the sampling policy's)
                  AWM: noise (or target = noise - x0); old_velocity or old_log_probs
                  SFT: noise (or target = noise - x0); neither advantages nor rollout_weights
                  ref_velocity when ref_kl_coef > 0; AWM: lag_velocity when lag_kl_coef > 0; mask; rollout_weights
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .config import ADVANTAGE_MODES, AWM_WEIGHTINGS, NFT_FORMS, DiffusionLossConfig, require_positive
from .elements import (
    Source,
    element_mean,
    latent_sized,
    lookup,
    per_step,
    read_mask,
    refuse_non_finite,
    require,
    spread_over,
    step_shape,
    upcast,
)
from .errors import LossError, unknown_name
from .kl import velocity_kl
from .preference import denoising_error, regression_target
from .reduction import element_loss
from .surrogates import clip_shares, clipped_surrogate, on_policy, trajectory_log_ratio
from .types import ElementLoss, Metrics

_AWM_FLOOR = 1e-10


def optimality_probability(advantages: Tensor, adv_clip_max: float = 5.0, mode: str = "all") -> Tensor:
    """DiffusionNFT's r in [0, 1] (arXiv 2509.16117): clip(A, +-m) / (2 m) + 1/2, elementwise.

    mode "positive_only" / "negative_only" clip A to one side; "one_only" replaces A by 1 where it is above zero and
    0 elsewhere, "binary" by its sign (both BEFORE the division by 2 m, so r only moves by 1 / (2 m), as in the
    public code).
    """
    require_positive("adv_clip_max", adv_clip_max)
    if mode not in ADVANTAGE_MODES:
        raise unknown_name("mode", mode, ADVANTAGE_MODES)
    clipped = advantages.clamp(-adv_clip_max, adv_clip_max)
    if mode == "positive_only":
        clipped = clipped.clamp(min=0)
    elif mode == "negative_only":
        clipped = clipped.clamp(max=0)
    elif mode == "one_only":
        clipped = (advantages > 0).to(advantages.dtype)
    elif mode == "binary":
        clipped = advantages.sign()
    return (clipped / adv_clip_max / 2.0 + 0.5).clamp(0.0, 1.0)


@dataclass(frozen=True)
class NFTTerms:
    """Per-element parts of the NFT loss: error of the implicit positive and negative policy, and their mixture over
    beta.
    """

    positive: Tensor
    negative: Tensor
    mixed: Tensor


def nft_terms(
    velocity: Tensor,
    old_velocity: Tensor,
    x0: Tensor,
    x_t: Tensor,
    sigma: Tensor,
    probability: Tensor,
    *,
    beta: float,
    weight_min: float = 1e-5,
    form: str = "adaptive",
    negative_branch: bool = True,
) -> NFTTerms:
    """DiffusionNFT's contrastive errors.

    v+ = beta v + (1 - beta) v_old and v- = (1 + beta) v_old - beta v are read out as clean latents x_t - t v+-;
    their squared errors are P and N, and mixed = r P + (1 - r) N. form="adaptive" divides P and N by the detached
    mean absolute error of their read-out (float64, floored at `weight_min`) and the mixture by beta, as both public
    codes do; "theorem" leaves all of that out. negative_branch=False drops (1 - r) N, as the paper's ablation does.

    Args:
        velocity, old_velocity: step shape + D...; mixed in the dtype in which they are given, as the public codes do: hand in
            float32 to have float32.
        x0, x_t: step shape + D...
        sigma, probability: the step shape.

    Raises:
        LossError: beta or weight_min that is not above zero, or an unknown form.
    """
    require_positive("beta", beta)
    require_positive("weight_min", weight_min)
    if form not in NFT_FORMS:
        raise unknown_name("form", form, NFT_FORMS)
    old, dims = old_velocity.detach(), sigma.ndim
    t = spread_over(sigma, velocity)
    errors = []
    for mixed_velocity in (beta * velocity + (1.0 - beta) * old, (1.0 + beta) * old - beta * velocity):
        gap = x_t - t * mixed_velocity - x0
        error = element_mean(gap.square(), dims)
        if form == "adaptive":
            size = element_mean(gap.detach().abs(), dims, dtype=torch.float64)
            error = error / size.clamp(min=weight_min).to(error.dtype)
        errors.append(error)
    positive, negative = errors
    mixed = probability * positive
    if negative_branch:
        mixed = mixed + (1.0 - probability) * negative
    return NFTTerms(positive, negative, mixed / beta if form == "adaptive" else mixed)


def matching_log_prob(
    velocity: Tensor, target: Tensor, sigma: Tensor, *, weighting: str = "uniform", power: float = 0.25
) -> Tensor:
    """AWM's log-likelihood proxy (arXiv 2509.25050): minus the weighted denoising error q = <(v - target)^2>, float64.

    "uniform" -q    "t" -q t    "t2" -q t^2    "huber" -(sqrt(q + 1e-10) - 1e-5) t
    "ghuber" -((q + 1e-10)^p - 1e-10^p) t / p    with t = sigma in [0, 1] and p = `power`

    Args:
        velocity, target: shape of sigma + D...

    Returns:
        The shape of sigma.
    """
    require_positive("power", power)
    error = element_mean((upcast(velocity) - upcast(target)).square(), sigma.ndim, dtype=torch.float64)
    t = sigma.double()
    if weighting == "uniform":
        return -error
    if weighting == "t":
        return -error * t
    if weighting == "t2":
        return -error * t * t
    if weighting == "huber":
        return -((error + _AWM_FLOOR).sqrt() - _AWM_FLOOR**0.5) * t
    if weighting == "ghuber":
        return -((error + _AWM_FLOOR) ** power - _AWM_FLOOR**power) * t / power
    raise unknown_name("weighting", weighting, AWM_WEIGHTINGS)


@dataclass(frozen=True)
class _Forward:
    """The checked inputs that NFT and AWM share."""

    velocity: Tensor
    sigma: Tensor
    advantages: Tensor
    mask: Tensor

    @classmethod
    def read(cls, config: DiffusionLossConfig, model_output: Source, data: Source) -> _Forward:
        mode = config.loss_mode
        velocity = require(model_output, "velocity", "model_output", mode)
        sigma = upcast(require(data, "sigma", "data", mode)).detach().to(velocity.device)
        shape = step_shape("data['sigma']", sigma)
        latent_sized("model_output['velocity']", velocity, shape)
        given = upcast(require(data, "advantages", "data", mode)).detach()
        advantages = per_step("data['advantages']", given, shape, sigma)
        return cls(velocity, sigma, advantages, read_mask(data, shape, sigma))

    def latents(self, data: Source, key: str, mode: str) -> Tensor:
        tensor = require(data, key, "data", mode)
        return latent_sized(f"data[{key!r}]", tensor, self.sigma.shape, self.velocity).detach()


def nft_loss(config: DiffusionLossConfig, model_output: Source, data: Source) -> ElementLoss:
    """DiffusionNFT (arXiv 2509.16117): (adv_clip_max / beta) [r P + (1 - r) N] + ref_kl_coef <(v - v_ref)^2>.

    The factor adv_clip_max / beta (the "5 / beta") and the adaptive weights are the public code's;
    `nft_form="theorem"` drops both.
    """
    batch, mode = _Forward.read(config, model_output, data), config.loss_mode
    x0, old = batch.latents(data, "x0", mode), batch.latents(data, "old_velocity", mode)
    if lookup(data, "x_t") is not None:
        x_t = batch.latents(data, "x_t", mode)
    else:
        t = spread_over(batch.sigma, batch.velocity)
        x_t = (1.0 - t) * x0 + t * batch.latents(data, "noise", mode)
    refuse_non_finite(batch.mask, advantages=batch.advantages)
    probability = optimality_probability(batch.advantages, config.adv_clip_max, config.adv_mode)
    terms = nft_terms(
        batch.velocity,
        old,
        x0,
        x_t,
        batch.sigma,
        probability,
        beta=config.mix_beta,
        weight_min=config.adaptive_weight_min,
        form=config.nft_form,
        negative_branch=config.nft_negative,
    )
    refuse_non_finite(batch.mask, velocity_error=terms.mixed)
    policy = terms.mixed * config.adv_clip_max if config.nft_form == "adaptive" else terms.mixed
    means = {
        "actor/nft_positive_loss": terms.positive,
        "actor/nft_negative_loss": terms.negative,
        "actor/nft_unscaled_loss": terms.mixed,
        "actor/nft_probability": probability,
        "actor/nft_old_deviation": element_mean(
            (upcast(batch.velocity) - upcast(old)).detach().square(), batch.sigma.ndim
        ),
    }
    return _finish(config, batch, data, policy, means)


def awm_loss(config: DiffusionLossConfig, model_output: Source, data: Source) -> ElementLoss:
    """AWM (arXiv 2509.25050): PPO's clipped surrogate on the ratio of matching likelihoods, same noise and level for
    both policies.

    The old policy enters as `data["old_velocity"]`, or as `data["old_log_probs"]` from `matching_log_prob` with the
    same noise. `lag_kl_coef` adds its code's pull to an average of the policy (`ema_beta` there).
    """
    batch, mode = _Forward.read(config, model_output, data), config.loss_mode
    target = regression_target(data, mode, batch.velocity, batch.sigma.shape)
    likelihood = partial(matching_log_prob, weighting=config.awm_weighting, power=config.awm_power)
    log_probs = likelihood(batch.velocity, target, batch.sigma)
    if lookup(data, "old_log_probs") is not None:
        old = (
            per_step("data['old_log_probs']", lookup(data, "old_log_probs"), batch.sigma.shape, log_probs)
            .detach()
            .double()
        )
    else:
        with torch.no_grad():
            old = likelihood(batch.latents(data, "old_velocity", mode), target, batch.sigma)
    refuse_non_finite(batch.mask, log_probs=log_probs, old_log_probs=old, advantages=batch.advantages)
    log_ratio = torch.where(batch.mask, log_probs - old, torch.zeros_like(log_probs)).to(batch.sigma.dtype)
    step_log_ratio = log_ratio
    if config.awm_ratio == "trajectory":
        log_ratio = trajectory_log_ratio(log_ratio, batch.mask).unsqueeze(1).expand(log_ratio.shape)
    advantages = torch.where(batch.mask, batch.advantages, torch.zeros_like(batch.advantages))
    advantages = advantages.clamp(-config.adv_clip_max, config.adv_clip_max)
    if config.awm_advantage == "unit":
        advantages = advantages / config.adv_clip_max
    policy = clipped_surrogate(log_ratio, advantages, config.clip_ratio)
    means = {
        "actor/pg_loss": policy,
        "actor/ppo_kl": -step_log_ratio,
        "actor/on_policy": on_policy(step_log_ratio),
        **clip_shares(log_ratio, config.clip_ratio),
        "actor/awm_log_prob": log_probs,
    }
    return _finish(config, batch, data, policy, means, log_ratio)


def sft_loss(config: DiffusionLossConfig, model_output: Source, data: Source) -> ElementLoss:
    """Supervised fine-tuning: <(v - (e - x0))^2>, the loss of flow matching (arXiv 2210.02747) on pictures that are right,
    + ref_kl_coef <(v - v_ref)^2>. All levels weigh the same; how they are drawn decides what counts."""
    mode = config.loss_mode
    velocity = require(model_output, "velocity", "model_output", mode)
    shape = step_shape("data['sigma']", require(data, "sigma", "data", mode))
    error = denoising_error(velocity, regression_target(data, mode, velocity, shape), len(shape))
    mask = read_mask(data, shape, error)
    refuse_non_finite(mask, velocity_error=error)
    if lookup(data, "rollout_weights") is not None:
        raise LossError("data['rollout_weights'] has no meaning for loss_mode='sft'; leave it out")
    kl = None
    if config.ref_kl_coef > 0:
        ref = latent_sized(
            "data['ref_velocity']", require(data, "ref_velocity", "data", mode), shape, velocity
        ).detach()
        kl = velocity_kl(velocity, ref, dims=len(shape))
    return element_loss(error, mask, {"actor/sft_loss": error}, kl=kl, kl_coef=config.ref_kl_coef)


def _finish(
    config: DiffusionLossConfig,
    batch: _Forward,
    data: Source,
    policy: Tensor,
    means: Metrics,
    log_ratio: Tensor | None = None,
) -> ElementLoss:
    weights = lookup(data, "rollout_weights")
    if weights is not None:
        policy = policy * per_step("data['rollout_weights']", weights, batch.sigma.shape, batch.sigma).detach()
    if config.lag_kl_coef > 0:
        lag = velocity_kl(batch.velocity, batch.latents(data, "lag_velocity", config.loss_mode), dims=batch.sigma.ndim)
        policy, means = policy + config.lag_kl_coef * lag, {**means, "actor/lag_kl": lag}
    kl = None
    if config.ref_kl_coef > 0:
        kl = velocity_kl(batch.velocity, batch.latents(data, "ref_velocity", config.loss_mode), dims=batch.sigma.ndim)
    return element_loss(policy, batch.mask, means, kl=kl, kl_coef=config.ref_kl_coef, log_ratio=log_ratio)
