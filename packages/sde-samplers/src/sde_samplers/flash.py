"""MixGRPO-Flash: fewer steps after the trained window (arXiv 2507.21802, `--dpm_apply_strategy post`).

Sample the thinned schedule with `rollout(..., solver="dpm2", solver_steps="post")`. MixGRPO places the points of the tail evenly
before the shift of its grid; `thin_tail` takes any schedule, whose shift it need not know, and keeps entries of it, evenly by
position. With one point left the published grid stops with noise in the latents; here the tail always reaches 0.
"""

from __future__ import annotations

from .errors import SamplerError
from .schedule import SigmaSchedule


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
    if not 0 <= window_end <= steps:
        raise SamplerError(f"window_end={window_end!r} must lie in 0 … num_steps={steps!r}")
    if not 0.0 < ratio <= 1.0:
        raise SamplerError(f"ratio={ratio!r} must lie in (0, 1]")
    if window_end == steps:
        return schedule
    last = max(int((steps - (window_end - 1)) * ratio), 2) - 1
    span = steps - window_end
    # Halves round up, in integers: at least one position apart, so no entry is kept twice.
    tail = [window_end + (2 * i * span + last) // (2 * last) for i in range(1, last + 1)]
    return SigmaSchedule(schedule.sigmas[[*range(window_end + 1), *tail]])
