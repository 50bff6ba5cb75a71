"""Which steps are trained: a window is a pure function of (seed, training step), the same on every rank.

`window.steps(training_step)` gives ascending positions 0 … K-1 of a K-step schedule. Ranges are half open, [low, high).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from .errors import SamplerError

Edge = Literal["full", "cut", "empty"]


class Window(Protocol):
    """Anything with `steps(training_step) -> ascending step positions`."""

    def steps(self, training_step: int) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class Fixed:
    """The same steps every time; they need not be contiguous. `Fixed(())` trains nothing."""

    positions: Sequence[int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "positions", _positions(self.positions))

    def steps(self, training_step: int) -> tuple[int, ...]:
        _check_training_step(training_step)
        return tuple(self.positions)


@dataclass(frozen=True)
class Random:
    """`size` neighbouring steps, the start uniform over the range, redrawn every `period` training steps.

    Drawn with `random.Random(seed + step // period)`, which is verl-omni's window (and flow_grpo-fast's, whose seed is a process
    index there).
    """

    size: int
    range: tuple[int, int]
    seed: int = 0
    period: int = 1

    def __post_init__(self) -> None:
        _check_range(self.size, self.range, self.period)

    def steps(self, training_step: int) -> tuple[int, ...]:
        _check_training_step(training_step)
        low, high = self.range
        start = random.Random(self.seed + training_step // self.period).randint(low, high - self.size)
        return tuple(range(start, start + self.size))


@dataclass(frozen=True)
class Progressive:
    """The window stays `period` training steps, then moves by `stride` (MixGRPO; verl-omni with `stride=size`).

    At the end of the range it rolls back to the start or clamps there (`at_end`). `edge` says what happens where a full
    window does not fit any more: "full" moves it back so that it always has `size` steps (verl-omni), "cut" trains the
    steps that are left, "empty" does that and also stays a whole period one past the last step, training nothing, which
    is what MixGRPO's published state machine does.
    """

    size: int
    range: tuple[int, int]
    period: int = 25
    stride: int = 1
    at_end: Literal["roll_back", "clamp"] = "roll_back"
    edge: Edge = "full"

    def __post_init__(self) -> None:
        _check_range(self.size, self.range, self.period)
        if self.stride < 1:
            raise SamplerError(f"stride={self.stride!r} must be at least 1 (1 overlaps, stride=size does not)")
        if self.at_end not in ("roll_back", "clamp"):
            raise SamplerError(f"at_end={self.at_end!r} is unknown; choose 'roll_back' or 'clamp'")
        if self.edge not in ("full", "cut", "empty"):
            raise SamplerError(f"edge={self.edge!r} is unknown; choose 'full', 'cut' or 'empty'")

    def steps(self, training_step: int) -> tuple[int, ...]:
        start = self.start(training_step)
        return tuple(range(start, min(start + self.size, self.range[1])))

    def start(self, training_step: int) -> int:
        """First position of the window (equal to the end of the range when `edge="empty"` and the window is empty)."""
        _check_training_step(training_step)
        starts = self._starts()
        turn = training_step // self.period
        return starts[turn % len(starts) if self.at_end == "roll_back" else min(turn, len(starts) - 1)]

    def _starts(self) -> list[int]:
        low, high = self.range
        if self.edge == "full":
            last = high - self.size
            starts = [*range(low, last, self.stride), last]
        elif self.edge == "cut":
            starts = list(range(low, high, self.stride))
        else:
            starts = list(range(low, high + 1, self.stride))
            if self.at_end == "clamp" and starts[-1] != high:
                starts.append(high)
        return starts


def _positions(positions: Sequence[int]) -> tuple[int, ...]:
    values = tuple(sorted(int(p) for p in positions))
    if len(set(values)) != len(values) or (values and values[0] < 0):
        raise SamplerError(f"step positions must be distinct and not negative, got {list(positions)!r}")
    return values


def _check_range(size: int, bounds: tuple[int, int], period: int) -> None:
    low, high = bounds
    if size < 1 or low < 0 or high - low < size:
        raise SamplerError(
            f"size={size!r} with range={tuple(bounds)!r}: the range is [low, high) with low >= 0 and must hold "
            "at least one window of at least one step"
        )
    if period < 1:
        raise SamplerError(f"period={period!r} must be at least 1 training step")


def _check_training_step(training_step: int) -> None:
    if training_step < 0:
        raise SamplerError(f"training_step={training_step!r} must not be negative")
