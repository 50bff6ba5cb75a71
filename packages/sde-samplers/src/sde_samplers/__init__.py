"""Samplers of diffusion reinforcement learning: sigma grids, SDE and ODE steps, log-probs, windows and replay.

`SamplerSettings`, the names of kinds and solvers, and the errors import without torch; every other name is loaded when it is
first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .errors import NonFiniteError, ReplayMismatchError, SamplerError
from .kinds import KINDS, LOG_PROB_FORMS, Kind, LogProbForm, SamplerKind, find_kind
from .settings import SOLVERS, SamplerSettings

if TYPE_CHECKING:
    from .coefficients import StepCoefficients, step_coefficients
    from .denoise import rollout
    from .flash import thin_tail
    from .logprob import HALF_LOG_TWO_PI, gaussian_log_prob
    from .noise import draw_noise, initial_noise, sample_generator, seed_of
    from .rescore import replay
    from .schedule import (
        FLUX_SHIFT,
        QWEN_IMAGE_SHIFT,
        QWEN_IMAGE_SHIFT_TERMINAL,
        SigmaSchedule,
        flow_match,
        from_diffusers,
        mu_from_tokens,
    )
    from .scheduler import FlowMatchSDEScheduler
    from .solvers import PastOutput, dpm_coefficients, dpm_step, effective_order, read_out
    from .steps import sde_step
    from .types import SdeStep, Trajectory, VelocityFn
    from .windows import Fixed, Progressive, Random, Window

_HOMES = "coefficients denoise flash logprob noise rescore schedule scheduler solvers steps types windows"

__all__ = [
    "FLUX_SHIFT",
    "HALF_LOG_TWO_PI",
    "KINDS",
    "LOG_PROB_FORMS",
    "QWEN_IMAGE_SHIFT",
    "QWEN_IMAGE_SHIFT_TERMINAL",
    "SOLVERS",
    "Fixed",
    "FlowMatchSDEScheduler",
    "Kind",
    "LogProbForm",
    "NonFiniteError",
    "PastOutput",
    "Progressive",
    "Random",
    "ReplayMismatchError",
    "SamplerError",
    "SamplerKind",
    "SamplerSettings",
    "SdeStep",
    "SigmaSchedule",
    "StepCoefficients",
    "Trajectory",
    "VelocityFn",
    "Window",
    "dpm_coefficients",
    "dpm_step",
    "draw_noise",
    "effective_order",
    "find_kind",
    "flow_match",
    "from_diffusers",
    "gaussian_log_prob",
    "initial_noise",
    "mu_from_tokens",
    "read_out",
    "replay",
    "rollout",
    "sample_generator",
    "sde_step",
    "seed_of",
    "step_coefficients",
    "thin_tail",
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
