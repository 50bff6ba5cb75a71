"""Scoring a stored trajectory under other weights, with gradient.

With the weights, the device and the batch shape of the rollout the log-probs come out equal to the bit, so the first
policy ratio is exactly 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .coefficients import step_coefficients
from .denoise import window_positions
from .errors import ReplayMismatchError
from .schedule import SigmaSchedule
from .steps import check_tensors, take_step
from .types import SdeStep, Trajectory, VelocityFn


def replay(
    velocity_fn: VelocityFn,
    trajectory: Trajectory,
    schedule: SigmaSchedule,
    *,
    window: Sequence[int] | Tensor | None = None,
    fused: bool | None = None,
    check_finite: bool | None = None,
) -> Iterator[SdeStep]:
    """One scored `SdeStep` per trained step, in window order.

    Lazy: a step is computed when it is asked for, so its graph can be freed by `backward()` before the next one. The
    checks run at the call.

    Args:
        velocity_fn: `(x [B, ...] fp32, sigma [B] fp32) -> v [B, ...]`; the gradient flows into mean and log_prob.
        trajectory: from `rollout`.
        schedule: the one of the rollout.
        window: when given, the steps that the caller expects to train; another window is refused.

    Raises:
        ReplayMismatchError: another schedule hash, sigma table, dtype or window.
        NonFiniteError: names the first bad step.
    """
    if trajectory.schedule_hash != schedule.hash:
        raise ReplayMismatchError(
            f"the trajectory was sampled on schedule {trajectory.schedule_hash}, the replay uses {schedule.hash} "
            f"({schedule.num_steps} steps); rebuild the schedule of the rollout"
        )
    stored = trajectory.sigmas.to("cpu")
    if stored.shape != schedule.sigmas.shape or not torch.equal(stored, schedule.sigmas):
        raise ReplayMismatchError(
            f"trajectory.sigmas {stored.tolist()} differ from the schedule {schedule.sigmas.tolist()}; "
            "carry the table verbatim"
        )
    batch = trajectory.latents.shape[0]
    positions = trajectory.step_index.to("cpu")
    if positions.numel() and (int(positions.min()) < 0 or int(positions.max()) >= schedule.num_steps):
        raise ReplayMismatchError(
            f"trajectory.step_index {positions[0].tolist()} leaves the schedule of {schedule.num_steps} steps"
        )
    if window is not None:
        expected = window_positions(window, batch, schedule.num_steps)
        if not torch.equal(expected, positions.sort(dim=1).values):
            raise ReplayMismatchError(
                f"the trajectory holds steps {positions.tolist()}, the caller trains {expected.tolist()}; "
                "train the window that was sampled"
            )
    return _steps(velocity_fn, trajectory, schedule, positions, fused, check_finite)


def _steps(
    velocity_fn: VelocityFn,
    trajectory: Trajectory,
    schedule: SigmaSchedule,
    positions: Tensor,
    fused: bool | None,
    check_finite: bool | None,
) -> Iterator[SdeStep]:
    device = trajectory.latents.device
    for w in range(trajectory.window_size):
        index = positions[:, w]
        sigma, sigma_next = schedule.sigmas[index], schedule.sigmas[index + 1]
        one_step = bool((index == index[0]).all())
        x = trajectory.latents[:, w]
        velocity = velocity_fn(x, sigma.to(device))
        check_tensors(x, velocity)
        coefficients = step_coefficients(
            trajectory.kind,
            float(sigma[0]) if one_step else sigma,
            float(sigma_next[0]) if one_step else sigma_next,
            trajectory.noise_level,
            schedule.sigma_cap,
        )
        yield take_step(
            x,
            velocity,
            coefficients,
            noise=None,
            prev_sample=trajectory.next_latents[:, w],
            form=None if trajectory.log_probs is None else trajectory.log_prob_form,
            fused=fused,
            check_finite=check_finite,
            where="replay",
            step_index=int(index[0]) if one_step else None,
        )
