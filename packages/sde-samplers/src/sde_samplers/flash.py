"""MixGRPO-Flash: fewer steps after the trained window (arXiv 2507.21802, `--dpm_apply_strategy post`).

The schedule up to the end of the window stays; what follows is replaced by k points from the window's end to 0, with
`k = int(max((N - last) * ratio, 1))` where `last` is the window's last step. Sample it with
`rollout(..., solver="dpm2", solver_steps="post")`.

`flash_schedule` places the points as published, evenly BEFORE the shift of the "linear" grid. `thin_tail` takes any
schedule, whose shift it need not know, and keeps entries of it, evenly by position.

Where we differ: with k = 1 the published grid is the single point it starts from, so sampling stops there with noise
left in the latents. Here the tail always reaches 0, with one step in that case.
"""

from __future__ import annotations

import math

import torch

from .errors import SamplerError
from .schedule import SigmaSchedule, flow_match


def flash_schedule(
    num_steps: int, window_end: int, *, shift: float = 3.0, mu: float | None = None, ratio: float = 0.4
) -> SigmaSchedule:
    """The "linear" grid of `num_steps` with a compressed tail after `window_end`.

    Args:
        num_steps: N of the full grid.
        window_end: end of the trained window, half open: `last = window_end - 1` is its last step. 0 compresses all.
        shift: static shift, or `mu` for the exponential dynamic one (`shift = e^mu`).
        ratio: share of the remaining points that is kept, in (0, 1].

    Returns:
        A schedule of at most N steps; positions below `window_end` mean the same as in the full grid.

    Raises:
        SamplerError: a window end outside 0 … N, a ratio outside (0, 1].
    """
    points = _tail_points(num_steps, window_end, ratio)
    factor = shift if mu is None else math.exp(mu)
    full = flow_match(num_steps, factor, "linear")
    if window_end == num_steps:
        return full
    start = float(torch.linspace(1.0, 0.0, num_steps + 1)[window_end])
    tail = torch.linspace(start, 0.0, points)
    shifted = factor * tail / (1 + (factor - 1) * tail)
    # The joint is the full grid's own entry, so that the trained steps keep their sigmas to the bit.
    return SigmaSchedule(torch.cat([full.sigmas[: window_end + 1], shifted[1:]]))


def thin_tail(schedule: SigmaSchedule, window_end: int, ratio: float) -> SigmaSchedule:
    """A schedule with fewer steps after `window_end`; every entry is one of the given schedule.

    Args:
        schedule: N steps, of any grid.
        window_end: end of the trained window, half open; entries 0 … window_end stay, and so do the steps between them.
            0 thins the whole schedule.
        ratio: share of the remaining points that is kept, in (0, 1]; 1 keeps the schedule.

    Returns:
        A schedule that ends at 0: entries 0 … window_end, then points evenly spaced by position and rounded to entries,
        `int(max((N - (window_end - 1)) * ratio, 1))` of them with the joint, and at least the joint and 0.

    Raises:
        SamplerError: a window end outside 0 … N, a ratio outside (0, 1].
    """
    steps = schedule.num_steps
    last = _tail_points(steps, window_end, ratio) - 1
    if window_end == steps:
        return schedule
    span = steps - window_end
    # Halves round up, in integers: at least one position apart, so no entry is kept twice.
    tail = [window_end + (2 * i * span + last) // (2 * last) for i in range(1, last + 1)]
    return SigmaSchedule(schedule.sigmas[[*range(window_end + 1), *tail]])


def _tail_points(num_steps: int, window_end: int, ratio: float) -> int:
    """Points of the tail, the joint and 0 among them."""
    if not 0 <= window_end <= num_steps:
        raise SamplerError(f"window_end={window_end!r} must lie in 0 … num_steps={num_steps!r}")
    if not 0.0 < ratio <= 1.0:
        raise SamplerError(f"ratio={ratio!r} must lie in (0, 1]")
    return max(int(max((num_steps - (window_end - 1)) * ratio, 1)), 2)
