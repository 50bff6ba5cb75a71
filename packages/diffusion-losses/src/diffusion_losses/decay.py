"""How much of the old policy survives an update: DiffusionNFT's schedules.

After an optimisation epoch the sampling policy is refreshed as old <- d old + (1 - d) new, with d from the number of
gradient steps so far.
"""

from __future__ import annotations

from diffusion_losses.errors import LossError, unknown_name

# name -> (steps at zero, growth per step, largest value); names in comments are the public code's `decay_type`.
SCHEDULES: dict[str, tuple[int, float, float]] = {
    "copy": (0, 0.0, 0.0),  # type 0: the new policy replaces the old one every time; verl-omni's default
    "linear": (0, 0.001, 0.5),  # type 1, and the paper's eta_i = min(0.001 i, 0.5)
    "delayed": (75, 0.0075, 0.999),  # type 2
}


def old_policy_decay(step: int, schedule: str = "linear", *, max_decay: float | None = None) -> float:
    """The decay d in [0, 1) after `step` gradient steps (arXiv 2509.16117 and its public code).

    schedule: "copy" 0; "linear" min(0.001 n, 0.5), the paper's default and ours; "delayed" 0 for n < 75, then
        min(0.0075 (n - 75), 0.999), the code's schedule for OCR, for which the paper only names the largest value.
    max_decay: another largest value, such as the paper's 0.999 (OCR) or 0.95 (several rewards).
    Raises `LossError` for a negative step, an unknown schedule or a max_decay outside [0, 1).
    """
    if schedule not in SCHEDULES:
        raise unknown_name("schedule", schedule, SCHEDULES)
    if step < 0:
        raise LossError(f"step={step!r} must not be negative; it counts gradient steps since the start of training")
    start, rate, largest = SCHEDULES[schedule]
    if max_decay is not None:
        if not 0.0 <= max_decay < 1.0:
            raise LossError(f"max_decay={max_decay!r} must be in [0, 1); at 1 the old policy would never change")
        largest = max_decay
    return min(rate * max(step - start, 0), largest)
