"""Advantages and losses of diffusion reinforcement learning: policy-gradient and forward-process.

`DiffusionLossConfig`, `LossSpec` and `LossError` import without torch; every other name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .config import DiffusionLossConfig
from .errors import LossError
from .specs import LossSpec, find_loss, known_losses
from .statistics import Statistic, numbers, pool_statistics, statistic

if TYPE_CHECKING:
    from .advantages import group_advantages
    from .correction import rollout_correction
    from .decay import old_policy_decay
    from .forward_process import matching_log_prob, nft_terms, optimality_probability
    from .kl import mean_kl, velocity_kl
    from .multi_reward import combined_advantages
    from .pairs import make_pairs
    from .preference import denoising_error, preference_loss, preference_margin
    from .registry import diffusion_loss
    from .surrogates import (
        clipped_surrogate,
        divergence_keep,
        guard_log_ratio,
        noise_scale_weights,
        trajectory_log_ratio,
    )
    from .types import AdvantageOutput, CorrectionOutput, ElementLoss, LossOutput, PairOutput

_HOMES = "advantages correction decay forward_process kl multi_reward pairs preference registry surrogates types"

__all__ = [
    "AdvantageOutput",
    "CorrectionOutput",
    "DiffusionLossConfig",
    "ElementLoss",
    "LossError",
    "LossOutput",
    "LossSpec",
    "PairOutput",
    "Statistic",
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
    "pool_statistics",
    "preference_loss",
    "preference_margin",
    "rollout_correction",
    "statistic",
    "trajectory_log_ratio",
    "velocity_kl",
]


def __getattr__(name: str) -> Any:
    for home in _HOMES.split() if name in __all__ else ():
        module = importlib.import_module(f"{__name__}.{home}")
        if hasattr(module, name):
            globals()[name] = getattr(module, name)
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
