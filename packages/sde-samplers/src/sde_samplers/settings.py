"""How a sample is drawn: one frozen value that config, requests, samplers and trainers share. Imports without torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from .errors import SamplerError
from .kinds import Kind, find_kind

Solver = Literal["euler", "dpm1", "dpm2", "dpm3"]
SOLVERS: dict[str, int] = {"euler": 1, "dpm1": 1, "dpm2": 2, "dpm3": 3}
"""Integrators of the ODE steps, with their orders."""


@dataclass(frozen=True)
class SamplerSettings:
    """Everything about a denoising run but its prompt, its noise and its weights.

    Raises:
        SamplerError: a value that no sampler takes, or values that contradict each other.
    """

    height: int
    """Pixels."""
    width: int
    """Pixels."""
    num_inference_steps: int
    """Denoising steps K; the sigma grid has K + 1 entries."""
    num_frames: int = 1
    """Frames of a video; 1 for a picture."""
    true_cfg_scale: float | tuple[float, float] = 1.0
    """Classifier-free guidance: above 1 the transformer runs a second time, on the negative prompt. A pair is for models with two
    experts."""
    guidance_scale: float | None = None
    """Guidance that the model takes as an input (FLUX.1-dev); None for the others."""
    max_sequence_length: int = 512
    """Longest prompt, in tokens."""
    kind: Kind = "ode"
    """Transition of the window's steps; all other steps are ODE steps."""
    noise_level: float = 0.0
    """Scale of the noise that the window's steps inject."""
    window: tuple[int, ...] = ()
    """Steps in 0 … K-1 that inject noise and are trained, ascending."""
    solver: str = "euler"
    """Integrator of the ODE steps, one of `SOLVERS`."""
    tail_ratio: float = 1.0
    """Share of the steps after the window (of all steps without one) that is kept. Below 1 `solver` integrates them, and Euler
    the steps before. Window positions and `num_inference_steps` are those of the full grid."""
    shared_noise: bool = False
    """Start from the noise of sample 0 of the group; the noise of the steps stays each sample's own."""
    start_step: int = 0
    """First step that runs. Above 0 the run starts from given clean latents, noised to that step's sigma."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "window", tuple(int(step) for step in self.window))
        for name in ("height", "width", "num_inference_steps", "num_frames", "max_sequence_length"):
            if getattr(self, name) < 1:
                raise SamplerError(f"{name}={getattr(self, name)!r} must be at least 1")
        if self.solver not in SOLVERS:
            raise SamplerError(f"solver={self.solver!r} is unknown; use one of {', '.join(SOLVERS)}")
        kind = find_kind(self.kind)
        if not 0 < self.tail_ratio <= 1:
            raise SamplerError(f"tail_ratio={self.tail_ratio!r} must be above 0 and at most 1")
        window, steps = self.window, self.num_inference_steps
        if list(window) != sorted(set(window)) or not all(self.start_step <= step < steps for step in window):
            raise SamplerError(
                f"window={window!r} must be ascending, distinct step numbers in {self.start_step}..{steps - 1} for "
                f"num_inference_steps={steps}"
            )
        if window and (not kind.stochastic or self.noise_level <= 0):
            raise SamplerError(
                f"window={window!r} with kind={self.kind!r} and noise_level={self.noise_level!r} has no noise to train on; "
                "choose a stochastic kind and a positive noise_level, or an empty window"
            )

    def replace(self, **changes: Any) -> SamplerSettings:
        """A copy with some values changed, checked again."""
        return replace(self, **changes)

    @property
    def guided(self) -> bool:
        """Whether a step runs the transformer twice."""
        scale = self.true_cfg_scale
        return max(scale) > 1 if isinstance(scale, tuple) else scale > 1

    @property
    def window_end(self) -> int:
        """Where the tail begins: one past the last window step, or the first step that runs."""
        return self.window[-1] + 1 if self.window else self.start_step

    @property
    def batch_key(self) -> SamplerSettings:
        """Settings with equal keys can be denoised together.

        Windows of one length may lie apart, unless a multistep solver's history or a thinned tail hangs on where they end. Shared
        noise changes where a row starts, not how it moves.
        """
        bound = self.solver != "euler" or self.tail_ratio < 1
        window = self.window if bound else tuple(range(self.start_step, self.start_step + len(self.window)))
        return replace(self, window=window, shared_noise=False)
