"""Between an engine and a loss: one callable that knows its config, and what the engine must prepare for it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from diffusion_losses.config import DiffusionLossConfig

if TYPE_CHECKING:
    from torch import Tensor


class DiffusionLoss:
    """`diffusion_losses.diffusion_loss` bound to a config: the loss function to hand to an engine.

    Any callable `f(model_output=…, data=…, dp_group=…)` that returns an object with `loss` and `metrics` will do in
    its place; only losses that need a reference pass have to be of this class or carry their config as `.config`.
    """

    def __init__(self, config: DiffusionLossConfig | str) -> None:
        self.config = DiffusionLossConfig(loss_mode=config) if isinstance(config, str) else config

    def __call__(
        self, model_output: Mapping[str, Any], data: Mapping[str, Any], dp_group: dist.ProcessGroup | None = None
    ) -> Any:
        """The loss of one micro-batch; see `diffusion_losses.diffusion_loss`."""
        from diffusion_losses import diffusion_loss

        return diffusion_loss(self.config, model_output, data, dp_group=dp_group)


class FirstUpdateLoss(DiffusionLoss):
    """The same loss on the first update after a rollout; it also measures how far sampler and trainer are apart.

    While the weights are those that sampled, every difference is noise of the two code paths and not policy.
    `actor/noise_max` is that noise in the units of the loss's own clip (`LossSpec.limit`), which means nothing below it;
    `actor/rollout_log_prob_diff_max` is the difference of sampler's and trainer's log-probs.
    """

    def __call__(
        self, model_output: Mapping[str, Any], data: Mapping[str, Any], dp_group: dist.ProcessGroup | None = None
    ) -> Any:
        """The loss of one micro-batch."""
        from diffusion_losses import Statistic

        result = super().__call__(model_output, data, dp_group)
        if "rollout_log_probs" not in data:
            return result
        if "actor/distance_max" in result.statistics:
            result.statistics["actor/noise_max"] = result.statistics["actor/distance_max"]
        gap = (model_output["log_probs"].detach() - data["rollout_log_probs"]).abs().double()
        counted = data.get("mask")
        counted = torch.ones_like(gap, dtype=torch.bool) if counted is None else counted.expand_as(gap)
        largest = torch.where(counted, gap, torch.zeros_like(gap)).max()
        result.statistics["actor/rollout_log_prob_diff_max"] = Statistic(
            "max", torch.stack([counted.double().sum(), largest])
        )
        return result


def config_of(loss_function: Any) -> DiffusionLossConfig | None:
    """The loss's config, where it can be found: `.config`, or an argument of a `functools.partial`."""
    config = getattr(loss_function, "config", None)
    if isinstance(loss_function, functools.partial):
        arguments = [*loss_function.args, *loss_function.keywords.values()]
        config = next((a for a in arguments if hasattr(a, "loss_mode")), config)
    return config if hasattr(config, "loss_mode") else None


def own_tensors(config: DiffusionLossConfig | None, data: Any = None) -> tuple[str, ...]:
    """Names of the batch's tensors that only this loss reads; `data`, when given, must have them."""
    names = () if config is None else config.own_tensors
    if data is not None:
        from . import batch

        for name in names:
            batch.tensor(data, name, "the loss reads it: the agent loop or the algorithm's prepare_update writes it")
    return names


def add_noise_scale_weights(tensors: dict[str, Tensor], data: Mapping[str, Any], device: torch.device) -> None:
    """Put `step_weights` [B, W] for `step_weighting="noise_scale"` into a batch: they are normalised over the whole
    window, which a loss that sees one step at a time cannot do. Reads the transitions' `std` [B, W]."""
    from diffusion_losses import noise_scale_weights

    from . import batch

    if "step_weights" not in tensors:
        std = batch.tensor(data, "std", "the rollout writes it, and step_weighting='noise_scale' reads it").to(device)
        mask = tensors.get("mask", torch.ones_like(std, dtype=torch.bool))
        tensors["step_weights"] = noise_scale_weights(std, mask)
