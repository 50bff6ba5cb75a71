"""A drop-in for the scheduler of a diffusers flow-matching pipeline that samples stochastically and records log-probs.

    pipe.scheduler = FlowMatchSDEScheduler(pipe.scheduler, kind="flow_sde", noise_level=0.7, window=(0, 1, 2))
    image = pipe(prompt).images[0]
    trajectory = pipe.scheduler.trajectory()

It wraps the pipeline's own scheduler, so config, shift and grid stay what they were. diffusers is never imported here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .coefficients import step_coefficients
from .errors import SamplerError
from .kinds import Kind, find_kind
from .logprob import check_form
from .noise import Generators, draw_noise
from .schedule import SigmaSchedule
from .steps import check_tensors, take_step
from .types import SdeStep, Trajectory

_IGNORED = (None, 0.0, 1.0, float("inf"))
"""Defaults of s_churn, s_tmin, s_tmax, s_noise and per_token_timesteps, which pipelines may pass on."""


class SchedulerOutput(NamedTuple):
    """`prev_sample` [B, ...] in the dtype the pipeline computes in; `log_prob` [B] fp32 or None (an ODE step)."""

    prev_sample: Tensor
    log_prob: Tensor | None


class FlowMatchSDEScheduler:
    """`set_timesteps` and `step` as diffusers pipelines call them.

    A pipeline in bf16 holds its latents in bf16. A drawn sample is then rounded to that dtype before it is scored, so the recorded
    fp32 latents are the ones that the transformer saw, and a replay finds the same values.

    Args:
        base: the pipeline's FlowMatchEulerDiscreteScheduler.
        kind, noise_level: of the stochastic steps, as in `sde_step`.
        window: step positions that are stochastic and recorded; None means every step but the last.
        generators: one per sample, used instead of the generator that the pipeline passes to `step`.
    """

    order = 1

    def __init__(
        self,
        base: Any,
        *,
        kind: Kind = "flow_sde",
        noise_level: float = 0.7,
        window: Sequence[int] | None = None,
        generators: Generators = None,
    ) -> None:
        if not hasattr(base, "set_timesteps") or not hasattr(base, "sigmas"):
            raise SamplerError(
                f"FlowMatchSDEScheduler got {type(base).__name__}; pass the FlowMatchEulerDiscreteScheduler of a "
                "flow-matching pipeline"
            )
        self.base, self.kind, self.noise_level, self.generators = base, kind, noise_level, generators
        self.window = None if window is None else tuple(sorted(window))
        self._form = check_form(None, kind)
        self._schedule: SigmaSchedule | None = None

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
        """Build the wrapped scheduler's grid, and forget the steps recorded so far."""
        self.base.set_timesteps(num_inference_steps, device=device, sigmas=sigmas, mu=mu, timesteps=timesteps)
        self._schedule = SigmaSchedule(self.base.sigmas.detach().to(device="cpu", dtype=torch.float32))
        self._records: list[tuple[int, Tensor, SdeStep]] = []
        self._final: Tensor | None = None
        self._position: int | None = None
        outside = [p for p in self.window or () if not 0 <= p < self._schedule.num_steps]
        if outside:
            raise SamplerError(f"window positions {outside} leave the schedule of {self._schedule.num_steps} steps")

    @property
    def schedule(self) -> SigmaSchedule:
        """The grid of the last `set_timesteps`."""
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
        unknown = [name for name, value in ignored.items() if isinstance(value, Tensor) or value not in _IGNORED]
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
        kind, level = (self.kind, self.noise_level) if trained else ("ode", 0.0)
        ends = (float(schedule.sigmas[k]), float(schedule.sigmas[k + 1]))
        facts: dict[str, Any] = {"where": "FlowMatchSDEScheduler.step", "step_index": k}
        coefficients = step_coefficients(kind, *ends, level, schedule.sigma_cap)
        drawn = find_kind(kind).draws(level)
        form = self._form if drawn else None
        noise = draw_noise(sample, self.generators or generator) if drawn and prev_sample is None else None
        rounded = model_output.dtype != torch.float32 and prev_sample is None
        step = take_step(
            sample,
            model_output,
            coefficients,
            noise=noise,
            prev_sample=prev_sample,
            form=None if rounded else form,
            **facts,
        )
        if rounded:
            held = step.prev_sample.to(model_output.dtype).float()
            step = take_step(sample, model_output, coefficients, noise=None, prev_sample=held, form=form, **facts)
        if trained:
            self._records.append((k, sample.detach().float(), step))
        self._final, self._position = step.prev_sample, k + 1
        self.base._step_index = k + 1  # pipelines read scheduler.step_index
        output = step.prev_sample.to(model_output.dtype)
        return SchedulerOutput(output, step.log_prob) if return_dict else (output,)

    def trajectory(self) -> Trajectory:
        """What was recorded since `set_timesteps`, ready for `replay`.

        Raises:
            SamplerError: no step was recorded (empty window, or the pipeline has not run).
        """
        schedule = self.schedule
        if not self._records or self._final is None:
            raise SamplerError(
                f"no step was recorded with window={self.window!r}; run the pipeline with a non-empty window"
            )
        positions, before, steps = zip(*self._records, strict=True)
        scored = [step.log_prob.detach() for step in steps if step.log_prob is not None]
        index = torch.tensor(positions, dtype=torch.int64, device=self._final.device)
        return Trajectory(
            latents=torch.stack(before, dim=1),
            next_latents=torch.stack([step.prev_sample for step in steps], dim=1),
            step_index=index.expand(len(self._final), -1).contiguous(),
            sigmas=schedule.sigmas.to(self._final.device),
            log_probs=torch.stack(scored, dim=1) if len(scored) == len(steps) else None,
            std=torch.stack([step.std for step in steps], dim=1),
            final=self._final,
            schedule_hash=schedule.hash,
            kind=self.kind,
            noise_level=float(self.noise_level),
            log_prob_form=self._form,
        )

    def _first_position(self, timestep: float | Tensor) -> int:
        if self.base.begin_index is not None:
            return int(self.base.begin_index)
        value = float(timestep.flatten()[0]) if isinstance(timestep, Tensor) else float(timestep)
        table = self.base.timesteps.detach().to("cpu", torch.float32)
        return int((table - value).abs().argmin())
