"""How much of the old policy survives an update: DiffusionNFT's schedules. Imports without torch."""

from __future__ import annotations


def old_policy_decay(step: int, start: int = 0, rate: float = 0.0, largest: float = 0.0) -> float:
    """d in old <- d old + (1 - d) new after `step` gradient steps: rate (step - start), held within 0 and `largest`.

    Published (arXiv 2509.16117 and its code): rate 0 replaces the old policy every time (`decay_type` 0, verl-omni's default);
    start 0, rate 0.001, largest 0.5 is the paper's default (1); start 75, rate 0.0075, largest 0.999 is the code's schedule for
    OCR (2).
    """
    return min(max(rate * (step - start), 0.0), largest)
