"""Diffusion-DPO in its flow form, with the sigmoid, IPO and hinge losses.

Diffusion-DPO (arXiv 2311.12908) compares denoising errors E = <(v - (e - x0))^2> of a better and a worse sample at
the SAME noise e and the same noise level, each against the reference's error:

    margin = -1/2 [(E_w - E_w_ref) - (E_l - E_l_ref)]
    sigmoid: -log sigmoid(beta margin)    ipo: (margin - 1 / (2 beta))^2    hinge: max(0, 1 - beta margin)

    model_output  velocity [2M, D...] or [2M, W, D...], with gradient
    data          x0, noise (or target = noise - x0), ref_velocity   same rows
                  groups (optional)   ids of the rows; both rows of a pair must agree
                  mask (optional)     a pair counts when both of its rows do; the counted elements are PAIRS, also in
                  global_count

Rows are interleaved (w0, l0, w1, l1, ...), so that micro-batches of an even size hold whole pairs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .config import PREFERENCE_LOSSES, DiffusionLossConfig, require_positive
from .elements import (
    Source,
    element_mean,
    latent_sized,
    lookup,
    read_mask,
    refuse_non_finite,
    require,
    upcast,
)
from .errors import LossError, unknown_name
from .kl import velocity_kl
from .reduction import element_loss
from .types import ElementLoss


def denoising_error(velocity: Tensor, target: Tensor, dims: int = 1) -> Tensor:
    """<(v - target)^2> over all but the first `dims` dims, in at least float32."""
    return element_mean((upcast(velocity) - upcast(target)).square(), dims)


def split_pairs(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of the winners and of the losers: [2M, ...] -> two [M, ...]."""
    if tensor.shape[0] % 2 or tensor.shape[0] == 0:
        raise LossError(f"{tensor.shape[0]} rows do not make pairs; give 2M rows, each winner with its loser")
    return tensor[0::2], tensor[1::2]


def preference_margin(error: Tensor, ref_error: Tensor) -> Tensor:
    """-1/2 [(E_w - E_w_ref) - (E_l - E_l_ref)]: above zero where the policy prefers the winner more than the
    reference does.
    """
    winner, loser = split_pairs(error - ref_error.detach())
    return -0.5 * (winner - loser)


def preference_loss(margin: Tensor, beta: float, kind: str = "sigmoid") -> Tensor:
    """The loss of each pair. Raises `LossError` for beta <= 0 or an unknown kind."""
    require_positive("beta", beta)
    if kind == "sigmoid":
        return -F.logsigmoid(beta * margin)
    if kind == "ipo":
        return (margin - 1.0 / (2.0 * beta)).square()
    if kind == "hinge":
        return F.relu(1.0 - beta * margin)
    raise unknown_name("kind", kind, PREFERENCE_LOSSES)


def dpo_loss(config: DiffusionLossConfig, model_output: Source, data: Source) -> ElementLoss:
    """The registered `dpo` mode; the module docstring gives formula and keys."""
    mode = config.loss_mode
    velocity = require(model_output, "velocity", "model_output", mode)
    sigma = lookup(data, "sigma")
    dims = 2 if isinstance(sigma, Tensor) and sigma.ndim == 2 else 1
    shape = velocity.shape[:dims]
    target = regression_target(data, mode, velocity, shape)
    ref = latent_sized("data['ref_velocity']", require(data, "ref_velocity", "data", mode), shape, velocity).detach()
    if lookup(data, "rollout_weights") is not None:
        raise LossError("data['rollout_weights'] has no meaning for loss_mode='dpo'; leave it out")
    error, ref_error = denoising_error(velocity, target, dims), denoising_error(ref, target, dims)
    mask = read_mask(data, shape, error)
    refuse_non_finite(mask, velocity_error=error, ref_velocity_error=ref_error)
    margin = preference_margin(error, ref_error)
    _check_groups(lookup(data, "groups"), shape[0])
    both = torch.logical_and(*split_pairs(mask))
    policy = preference_loss(torch.where(both, margin, torch.zeros_like(margin)), config.dpo_beta, config.dpo_loss)
    gain_w, gain_l = split_pairs(ref_error - error)
    means = {
        "actor/dpo_loss": policy,
        "actor/dpo_margin": config.dpo_beta * margin,
        "actor/dpo_accuracy": (margin > 0).float(),
        "actor/dpo_winner_gain": gain_w,
        "actor/dpo_loser_gain": gain_l,
    }
    kl = None
    if config.ref_kl_coef > 0:
        kl_w, kl_l = split_pairs(velocity_kl(velocity, ref, dims=dims))
        kl = (kl_w + kl_l) / 2.0
    return element_loss(policy, both, means, kl=kl, kl_coef=config.ref_kl_coef)


def regression_target(data: Source, loss_mode: str, velocity: Tensor, shape: torch.Size) -> Tensor:
    """`data["target"]`, or noise - x0: the velocity that flow matching regresses on, shaped like `velocity`."""
    target = lookup(data, "target")
    if target is None:
        x0 = latent_sized("data['x0']", require(data, "x0", "data", loss_mode), shape, velocity)
        noise = latent_sized("data['noise']", require(data, "noise", "data", loss_mode), shape, velocity)
        target = noise - x0
    return latent_sized("data['target']", target, shape, velocity).detach()


def _check_groups(groups: Any, rows: int) -> None:
    if groups is None:
        return
    ids = list(groups.tolist() if hasattr(groups, "tolist") else groups)
    if len(ids) != rows:
        raise LossError(f"data['groups'] has {len(ids)} ids for {rows} rows; give one id per row")
    for row in range(0, rows, 2):
        if ids[row] != ids[row + 1]:
            raise LossError(
                f"data['groups'] is not sorted in pairs: rows {row} and {row + 1} make a pair but belong to "
                f"{ids[row]!r} and {ids[row + 1]!r}; index the batch with PairOutput.interleaved()"
            )
