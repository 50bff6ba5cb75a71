"""A drop-in for the scheduler of a diffusers flow-matching pipeline that samples stochastically and records log-probs.

    pipe.scheduler = FlowMatchSDEScheduler(pipe.scheduler, kind="flow_sde", noise_level=0.7, window=(0, 1, 2))
    image = pipe(prompt).images[0]
    trajectory = pipe.scheduler.trajectory()

It wraps the pipeline's own scheduler, so config, shift and grid stay what they were. diffusers is imported only to
build one when none is handed in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .coefficients import step_coefficients
from .errors import MissingDependencyError, SamplerError
from .kinds import Kind, LogProbForm, find_kind
from .logprob import check_form
from .noise import Generators, draw_noise
from .schedule import SigmaSchedule
from .steps import check_tensors, take_step
from .types import SdeStep, Trajectory


class SchedulerOutput(NamedTuple):
    """`prev_sample` [B, ...] in the dtype the pipeline computes in; `log_prob` [B] fp32 or None (an ODE step)."""

    prev_sample: Tensor
    log_prob: Tensor | None


class FlowMatchSDEScheduler:
    """`set_timesteps` and `step` as diffusers pipelines call them.

    Args:
        base: a FlowMatchEulerDiscreteScheduler, or None for a new one with shift 3 (needs diffusers).
        kind, noise_level, log_prob_form: of the stochastic steps, as in `sde_step`.
        window: step positions that are stochastic and recorded; None means every step but the last.
        generators: one per sample, used instead of the generator that the pipeline passes to `step`.

    A pipeline in bf16 holds its latents in bf16. A drawn sample is then rounded to that dtype BEFORE it is scored, so
    the recorded fp32 latents are the ones the transformer saw and a replay finds the same values.
    """

    order = 1

    def __init__(
        self,
        base: Any = None,
        *,
        kind: Kind = "flow_sde",
        noise_level: float = 0.7,
        window: Sequence[int] | None = None,
        log_prob_form: LogProbForm | None = None,
        generators: Generators = None,
    ) -> None:
        self.base = _new_base() if base is None else base
        if not hasattr(self.base, "set_timesteps") or not hasattr(self.base, "sigmas"):
            raise SamplerError(
                f"FlowMatchSDEScheduler got {type(self.base).__name__}; pass the FlowMatchEulerDiscreteScheduler of a "
                "flow-matching pipeline"
            )
        self.kind: Kind = kind
        self.noise_level = noise_level
        self.window = None if window is None else tuple(sorted(window))
        self.log_prob_form: LogProbForm = check_form(log_prob_form, kind)
        self.generators = generators
        self._records: list[tuple[int, Tensor, SdeStep]] = []
        self._final: Tensor | None = None
        self._schedule: SigmaSchedule | None = None
        self._position: int | None = None

    def __getattr__(self, name: str) -> Any:
        # Config, timesteps, sigmas, begin_index and the rest come from the wrapped scheduler.
        if name.startswith("__") or "base" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.base, name)

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: torch.device | str | None = None,
        sigmas: Sequence[float] | None = None,
        mu: float | None = None,
        timesteps: Sequence[float] | None = None,
    ) -> None:
        """Builds the wrapped scheduler's grid and forgets the steps recorded so far."""
        self.base.set_timesteps(num_inference_steps, device=device, sigmas=sigmas, mu=mu, timesteps=timesteps)
        self._schedule = SigmaSchedule(self.base.sigmas.detach().to(device="cpu", dtype=torch.float32))
        self._records, self._final, self._position = [], None, None
        outside = [p for p in self.window or () if not 0 <= p < self._schedule.num_steps]
        if outside:
            raise SamplerError(f"window positions {outside} leave the schedule of {self._schedule.num_steps} steps")

    @property
    def schedule(self) -> SigmaSchedule:
        if self._schedule is None:
            raise SamplerError("the scheduler has no grid yet; call set_timesteps() first")
        return self._schedule

    def step(
        self,
        model_output: Tensor,
        timestep: float | Tensor,
        sample: Tensor,
        generator: Generators = None,
        return_dict: bool = True,
        prev_sample: Tensor | None = None,
        **ignored: Any,
    ) -> SchedulerOutput | tuple[Tensor]:
        """One step; the position comes from a counter, so a timestep rounded to bf16 does no harm.

        Args:
            model_output, sample: velocity and latents [B, ...].
            timestep: used once, to find the first position of a run that starts in the middle of the grid.
            generator: one, one per sample, or None.
            prev_sample: score this one instead of drawing.
        """
        defaults = (None, 0.0, 1.0, float("inf"))  # of s_churn, s_tmin, s_tmax, s_noise and per_token_timesteps
        unknown = [name for name, value in ignored.items() if isinstance(value, Tensor) or value not in defaults]
        if unknown:
            raise SamplerError(f"FlowMatchSDEScheduler.step does not know {unknown}; leave them at their defaults")
        schedule = self.schedule
        k = self._first_position(timestep) if self._position is None else self._position
        if k >= schedule.num_steps:
            raise SamplerError(
                f"step() was called after the last of {schedule.num_steps} steps; call set_timesteps() again"
            )
        check_tensors(sample, model_output, None, prev_sample)
        trained = k in self.window if self.window is not None else k < schedule.num_steps - 1
        stochastic = trained and find_kind(self.kind).draws(self.noise_level)
        step = take_step(
            sample,
            model_output,
            step_coefficients(
                self.kind if trained else "ode",
                float(schedule.sigmas[k]),
                float(schedule.sigmas[k + 1]),
                self.noise_level if trained else 0.0,
                schedule.sigma_cap,
            ),
            noise=self._noise(sample, generator) if stochastic and prev_sample is None else None,
            prev_sample=prev_sample,
            form=self.log_prob_form if stochastic else None,
            storage_dtype=None if model_output.dtype == torch.float32 else model_output.dtype,
            where="FlowMatchSDEScheduler.step",
            step_index=k,
        )
        if trained:
            self._records.append((k, sample.detach().float(), step))
        self._final = step.prev_sample
        self._position = k + 1
        self.base._step_index = k + 1  # pipelines read scheduler.step_index
        output = step.prev_sample.to(model_output.dtype)
        return SchedulerOutput(output, step.log_prob) if return_dict else (output,)

    def trajectory(self) -> Trajectory:
        """What was recorded since `set_timesteps`, ready for `replay`.

        Raises:
            SamplerError: no step was recorded (empty window, or the pipeline has not run).
        """
        if not self._records or self._final is None:
            raise SamplerError(
                f"no step was recorded with window={self.window!r}; run the pipeline with a non-empty window"
            )
        steps = [step for _, _, step in self._records]
        batch, device = self._final.shape[0], self._final.device
        scored = [step.log_prob for step in steps]
        index = torch.tensor([k for k, _, _ in self._records], dtype=torch.int64, device=device)
        return Trajectory(
            latents=torch.stack([before for _, before, _ in self._records], dim=1),
            next_latents=torch.stack([step.prev_sample for step in steps], dim=1),
            step_index=index[None].expand(batch, -1).contiguous(),
            sigmas=self.schedule.sigmas.to(device),
            log_probs=torch.stack([s.detach() for s in scored if s is not None], dim=1) if None not in scored else None,
            std=torch.stack([step.std for step in steps], dim=1),
            final=self._final,
            schedule_hash=self.schedule.hash,
            kind=self.kind,
            noise_level=float(self.noise_level),
            log_prob_form=self.log_prob_form,
        )

    def _noise(self, sample: Tensor, generator: Generators) -> Tensor:
        return draw_noise(sample, generator if self.generators is None else self.generators)

    def _first_position(self, timestep: float | Tensor) -> int:
        if self.base.begin_index is not None:
            return int(self.base.begin_index)
        value = float(timestep.flatten()[0]) if isinstance(timestep, Tensor) else float(timestep)
        table = self.base.timesteps.detach().to("cpu", torch.float32)
        return int((table - value).abs().argmin())


def _new_base() -> Any:
    try:
        from diffusers import FlowMatchEulerDiscreteScheduler
    except ImportError as error:
        raise MissingDependencyError(
            "FlowMatchSDEScheduler() without a base scheduler needs diffusers: pip install 'sde-samplers[diffusers]', "
            "or pass the scheduler of a pipeline"
        ) from error
    return FlowMatchEulerDiscreteScheduler(shift=3.0)
