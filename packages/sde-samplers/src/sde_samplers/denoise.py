"""Sampling: noise to clean latents through any `velocity_fn(x, sigma)`, keeping the steps that will be trained.

Steps of the window are stochastic (`kind`, `noise_level`); all others follow the ODE. The window is shared by the batch
or differs per sample. Mixed windows as in MixGRPO, arXiv 2507.21802; its Flash tail is `flash.thin_tail` with
`solver="dpm2"` and `solver_steps="post"`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor

from .coefficients import StepCoefficients, step_coefficients
from .errors import NonFiniteError, SamplerError
from .kinds import Kind, LogProbForm, find_kind
from .logprob import check_form
from .noise import Generators, draw_noise
from .schedule import SigmaSchedule
from .settings import SOLVERS
from .solvers import PastOutput, SolverType, dpm_step, effective_order, read_out
from .steps import check_tensors, non_finite, take_step
from .types import SdeStep, Trajectory, VelocityFn

WindowSteps = Sequence[int] | Tensor | None


@torch.no_grad()
def rollout(
    velocity_fn: VelocityFn,
    noise: Tensor,
    schedule: SigmaSchedule,
    *,
    kind: Kind = "flow_sde",
    noise_level: float = 0.7,
    window: WindowSteps = None,
    generators: Generators = None,
    step_noise: Tensor | None = None,
    return_means: bool = False,
    solver: str = "euler",
    solver_type: SolverType = "midpoint",
    solver_steps: Literal["all", "post"] = "all",
    log_prob_form: LogProbForm | None = None,
    fused: bool | None = None,
    check_finite: bool = True,
) -> Trajectory:
    """Sample a batch and keep what training needs.

    Args:
        velocity_fn: `(x [B, ...] fp32, sigma [B] fp32) -> v [B, ...]`; called once per step, without gradient.
        noise: x at the first sigma [B, ...]; see `initial_noise`.
        schedule: K steps.
        kind, noise_level: of the window's steps, as in `sde_step`.
        window: trained step positions 0 … K-1, a sequence shared by the batch or an int64 tensor [B, W] with one row
            per sample. They need not be contiguous. None or empty: a pure ODE rollout, W = 0.
        generators: one torch.Generator per sample (see `sample_generator`); drawn from once per stochastic step of that
            sample. None takes torch's default generator, which ties the result to the batch.
        step_noise: [K, B, ...] ready-made noise, row k used if step k is stochastic.
        return_means: keep the mean of every trained step.
        solver: of the ODE steps: "euler", or DPM-Solver++ of order 1, 2 or 3 ("dpm1", "dpm2", "dpm3"). Its history
            holds the read-outs of stochastic steps too, as MixGRPO's does. Not with per-sample windows.
        solver_type: "midpoint" or "heun", the form of its second-order correction.
        solver_steps: "all" ODE steps, or those "post" (after) the window, Euler before it.
        check_finite: on a CPU every step is checked at once; elsewhere the flags are read back once, at the end.

    Returns:
        Trajectory.

    Raises:
        SamplerError: shapes, window or parameters that cannot be right. NonFiniteError: names the first bad step.
    """
    check_tensors(noise, noise)
    batch, steps = noise.shape[0], schedule.num_steps
    form = check_form(log_prob_form, kind)
    positions = window_positions(window, batch, steps)  # [B, W] on the CPU
    shared = bool((positions == positions[:1]).all()) if positions.shape[1] else True
    if step_noise is not None and tuple(step_noise.shape) != (steps, *noise.shape):
        raise SamplerError(
            f"step_noise has shape {list(step_noise.shape)}, expected [K, B, ...] = {[steps, *noise.shape]}"
        )

    if solver not in SOLVERS or solver_steps not in ("all", "post"):
        raise SamplerError(
            f"solver={solver!r} with solver_steps={solver_steps!r}: choose a solver of {', '.join(SOLVERS)} and "
            "solver_steps of 'all' or 'post'"
        )
    if solver != "euler" and not shared:
        raise SamplerError(f"solver={solver!r} keeps a history that a window per sample breaks; use solver='euler'")
    multistep_from = int(positions[0, -1]) + 1 if solver_steps == "post" and positions.shape[1] else 0
    history: tuple[PastOutput, ...] = ()

    sigmas = schedule.sigmas.tolist()
    has_density = find_kind(kind).draws(noise_level)
    recorder = _Recorder(positions, noise, return_means)
    flags: list[Tensor] = []
    x = noise.to(torch.float32)

    for k in range(steps):
        velocity = velocity_fn(x, torch.full((batch,), sigmas[k], dtype=torch.float32, device=x.device))
        check_tensors(x, velocity)
        active = (positions == k).any(dim=1)  # [B]: whose window holds this step
        if not bool(active.any()) and solver != "euler" and k >= multistep_from:
            order = effective_order(SOLVERS[solver], k, steps)
            step = dpm_step(x, velocity, sigmas[k], sigmas[k + 1], history, order=order, solver_type=solver_type)
            if check_finite and x.device.type == "cpu" and not bool(torch.isfinite(step.prev_sample.sum())):
                raise non_finite("rollout", k, sample=x, velocity=velocity)
        else:
            t, u, drawn = sigmas[k], sigmas[k + 1], bool(active.any())
            z = None
            if drawn and has_density:  # a sample outside its window must not consume from its stream
                z = draw_noise(x, generators, active) if step_noise is None else step_noise[k].to(x)
            inside = _mixed(kind, t, u, noise_level, schedule.sigma_cap, None if shared else active) if drawn else None
            step = take_step(
                x,
                velocity,
                inside or step_coefficients("ode", t, u, 0.0),
                noise=z,
                prev_sample=None,
                form=form if drawn and has_density else None,
                fused=fused,
                check_finite=check_finite and x.device.type == "cpu",
                where="rollout",
                step_index=k,
            )
            if drawn:
                recorder.record(k, active, x, step)
        if solver != "euler":
            history = (read_out(x, velocity, sigmas[k]), *history)[: SOLVERS[solver] - 1]
        if check_finite and x.device.type != "cpu":
            flags.append(torch.isfinite(step.prev_sample.flatten(1).sum(dim=1)))
        x = step.prev_sample

    if flags:
        _raise_first_bad(torch.stack(flags))
    return recorder.trajectory(x, schedule, kind, float(noise_level), form, has_density)


def window_positions(window: WindowSteps, batch: int, steps: int) -> Tensor:
    """[B, W] int64 on the CPU, ascending per row; raises SamplerError on anything that is no set of steps."""
    if window is None:
        return torch.empty((batch, 0), dtype=torch.int64)
    if isinstance(window, Tensor):
        if window.is_floating_point() or window.dtype == torch.bool:
            raise SamplerError(f"window has dtype {window.dtype}; pass step positions as an int64 tensor [B, W]")
        rows = window.detach().to("cpu", torch.int64)
        rows = rows[None].expand(batch, -1) if rows.ndim == 1 else rows
    elif not isinstance(window, Iterable) or isinstance(window, str):
        raise SamplerError(
            f"window={window!r} is no sequence of step positions; of a windows object pass .steps(training_step)"
        )
    else:
        rows = torch.tensor([int(p) for p in window], dtype=torch.int64)[None].expand(batch, -1)
    if rows.ndim != 2 or rows.shape[0] != batch:
        raise SamplerError(f"window has shape {list(rows.shape)} for a batch of {batch}; pass [W] or [B, W]")
    rows = rows.sort(dim=1).values
    if rows.numel() and (int(rows.min()) < 0 or int(rows.max()) >= steps):
        raise SamplerError(f"window {rows[0].tolist()} leaves the schedule; positions run from 0 to {steps - 1}")
    if bool((rows[:, 1:] == rows[:, :-1]).any()):
        raise SamplerError(f"window {rows[0].tolist()} holds a step twice; every position may appear once")
    return rows.contiguous()


class _Recorder:
    """Collects the trained steps column by column; per-sample windows fill different columns at one step."""

    def __init__(self, positions: Tensor, like: Tensor, means: bool) -> None:
        self.positions = positions
        shape = (*positions.shape, *like.shape[1:])
        self.latents = torch.empty(shape, dtype=torch.float32, device=like.device)
        self.next_latents = torch.empty_like(self.latents)
        self.means = torch.empty_like(self.latents) if means else None
        self.log_probs = torch.zeros(positions.shape, dtype=torch.float32, device=like.device)
        self.std = torch.zeros_like(self.log_probs)

    def record(self, k: int, active: Tensor, before: Tensor, step: SdeStep) -> None:
        rows: Tensor | slice
        rows, columns = (self.positions == k).nonzero(as_tuple=True)
        where: tuple[Tensor | slice, Tensor | int] = (rows.to(before.device), columns.to(before.device))
        pick = where[0]
        if bool(active.all()) and bool((columns == columns[0]).all()):
            where, pick = (slice(None), int(columns[0])), slice(None)  # the usual case: one plain copy
        self.latents[where] = before[pick]
        self.next_latents[where] = step.prev_sample[pick]
        self.std[where] = step.std[pick]
        if step.log_prob is not None:
            self.log_probs[where] = step.log_prob[pick]
        if self.means is not None:
            self.means[where] = step.mean[pick]

    def trajectory(
        self, final: Tensor, schedule: SigmaSchedule, kind: Kind, noise_level: float, form: LogProbForm, density: bool
    ) -> Trajectory:
        return Trajectory(
            latents=self.latents,
            next_latents=self.next_latents,
            step_index=self.positions.to(final.device),
            sigmas=schedule.sigmas.to(final.device),
            log_probs=self.log_probs if density else None,
            std=self.std,
            final=final,
            schedule_hash=schedule.hash,
            kind=kind,
            noise_level=noise_level,
            log_prob_form=form,
            means=self.means,
        )


def _mixed(kind: Kind, t: float, u: float, noise_level: float, cap: float, active: Tensor | None) -> StepCoefficients:
    """The window's coefficients, and the ODE's for samples outside their window."""
    inside = step_coefficients(kind, t, u, noise_level, cap)
    if active is None or bool(active.all()):
        return inside
    outside = step_coefficients("ode", t, u, 0.0)
    return StepCoefficients(
        *(
            torch.where(active, torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64))
            for a, b in zip(inside, outside, strict=True)
        )
    )


def _raise_first_bad(flags: Tensor) -> None:
    """flags [K, B] True where finite; one read-back for the whole rollout."""
    good = flags.cpu()
    if bool(good.all()):
        return
    step = int((~good.all(dim=1)).nonzero()[0, 0])
    samples = tuple((~good[step]).nonzero().flatten().tolist())
    raise NonFiniteError(
        f"rollout: NaN or inf at step {step} of the schedule, the first bad one, in samples {list(samples)}; "
        "check the weights and the dtype that produced it",
        step,
        samples,
    )
