"""Errors of this package. All of them are `SamplerError`, which is a `ValueError`, and all survive pickling (Ray)."""

from __future__ import annotations


class SamplerError(ValueError):
    """A call that cannot be answered: the message says what was given, what is allowed and what to change."""


class NonFiniteError(SamplerError):
    """A NaN or an infinity entered a step.

    `step` is the position in the schedule (None when a single step was called outside a rollout), `samples` the batch
    rows that are affected.
    """

    def __init__(self, message: str, step: int | None = None, samples: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.step = step
        self.samples = samples

    def __reduce__(self) -> tuple[type[NonFiniteError], tuple[str, int | None, tuple[int, ...]]]:
        return (type(self), (str(self), self.step, self.samples))


class ReplayMismatchError(SamplerError):
    """A trajectory is replayed under another schedule, window or dtype than the one it was sampled with."""
