"""Samplers of diffusion reinforcement learning: sigma grids, SDE and ODE steps, log-probs, windows and replay."""

from .coefficients import StepCoefficients, step_coefficients
from .errors import MissingDependencyError, NonFiniteError, ReplayMismatchError, SamplerError
from .flash import flash_schedule, thin_tail
from .logprob import HALF_LOG_TWO_PI, default_form, gaussian_log_prob
from .noise import draw_noise, initial_noise, sample_generator
from .replay import replay
from .rollout import rollout
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
from .solvers import DpmStep, PastOutput, Solver, dpm_coefficients, dpm_step, effective_order
from .steps import sde_step
from .types import KINDS, LOG_PROB_FORMS, Kind, LogProbForm, SdeStep, Trajectory, VelocityFn
from .windows import Decay, ExponentialDecay, Fixed, Progressive, Random, RandomSubset, Window, per_sample

__all__ = [
    "FLUX_SHIFT",
    "HALF_LOG_TWO_PI",
    "KINDS",
    "LOG_PROB_FORMS",
    "QWEN_IMAGE_SHIFT",
    "QWEN_IMAGE_SHIFT_TERMINAL",
    "Decay",
    "DpmStep",
    "ExponentialDecay",
    "Fixed",
    "FlowMatchSDEScheduler",
    "Kind",
    "LogProbForm",
    "MissingDependencyError",
    "NonFiniteError",
    "PastOutput",
    "Progressive",
    "Random",
    "RandomSubset",
    "ReplayMismatchError",
    "SamplerError",
    "SdeStep",
    "SigmaSchedule",
    "Solver",
    "StepCoefficients",
    "Trajectory",
    "VelocityFn",
    "Window",
    "default_form",
    "dpm_coefficients",
    "dpm_step",
    "draw_noise",
    "effective_order",
    "flash_schedule",
    "flow_match",
    "from_diffusers",
    "gaussian_log_prob",
    "initial_noise",
    "mu_from_tokens",
    "per_sample",
    "replay",
    "rollout",
    "sample_generator",
    "sde_step",
    "step_coefficients",
    "thin_tail",
]
