"""Advantages and losses of diffusion reinforcement learning: policy-gradient and forward-process.

`DiffusionLossConfig`, `LossSpec` and `LossError` import without torch; every other name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from diffusion_losses.config import DiffusionLossConfig
from diffusion_losses.errors import LossError
from diffusion_losses.specs import LossSpec, find_loss, known_losses
from diffusion_losses.statistics import Statistic, numbers, pool_statistics, statistic

if TYPE_CHECKING:
    from diffusion_losses.advantages import group_advantages, pair_advantages
    from diffusion_losses.correction import rollout_correction
    from diffusion_losses.decay import old_policy_decay
    from diffusion_losses.forward_process import matching_log_prob, nft_terms, optimality_probability
    from diffusion_losses.kl import mean_kl, velocity_kl
    from diffusion_losses.multi_reward import combined_advantages
    from diffusion_losses.pairs import make_pairs
    from diffusion_losses.preference import denoising_error, preference_loss, preference_margin
    from diffusion_losses.registry import diffusion_loss
    from diffusion_losses.running import RunningStatistics
    from diffusion_losses.selection import best_of_n
    from diffusion_losses.surrogates import (
        clipped_surrogate,
        divergence_keep,
        guard_log_ratio,
        noise_scale_weights,
        trajectory_log_ratio,
    )
    from diffusion_losses.types import AdvantageOutput, CorrectionOutput, ElementLoss, LossOutput, PairOutput

_HOMES = {
    "advantages": ("group_advantages", "pair_advantages"),
    "correction": ("rollout_correction",),
    "decay": ("old_policy_decay",),
    "forward_process": ("matching_log_prob", "nft_terms", "optimality_probability"),
    "kl": ("mean_kl", "velocity_kl"),
    "multi_reward": ("combined_advantages",),
    "pairs": ("make_pairs",),
    "preference": ("denoising_error", "preference_loss", "preference_margin"),
    "registry": ("diffusion_loss",),
    "running": ("RunningStatistics",),
    "selection": ("best_of_n",),
    "surrogates": (
        "clipped_surrogate",
        "divergence_keep",
        "guard_log_ratio",
        "noise_scale_weights",
        "trajectory_log_ratio",
    ),
    "types": ("AdvantageOutput", "CorrectionOutput", "ElementLoss", "LossOutput", "PairOutput"),
}
_LAZY = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "AdvantageOutput",
    "CorrectionOutput",
    "DiffusionLossConfig",
    "ElementLoss",
    "LossError",
    "LossOutput",
    "LossSpec",
    "PairOutput",
    "RunningStatistics",
    "Statistic",
    "best_of_n",
    "clipped_surrogate",
    "combined_advantages",
    "denoising_error",
    "diffusion_loss",
    "divergence_keep",
    "find_loss",
    "group_advantages",
    "guard_log_ratio",
    "known_losses",
    "make_pairs",
    "matching_log_prob",
    "mean_kl",
    "nft_terms",
    "noise_scale_weights",
    "numbers",
    "old_policy_decay",
    "optimality_probability",
    "pair_advantages",
    "pool_statistics",
    "preference_loss",
    "preference_margin",
    "rollout_correction",
    "statistic",
    "trajectory_log_ratio",
    "velocity_kl",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
