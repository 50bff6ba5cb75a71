"""Which steps are trained: a window is a pure function of (seed, training step), the same on every rank.

`window.steps(training_step)` gives ascending positions 0 … K-1 of a K-step schedule. Ranges are half open, [low, high).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from .errors import MissingDependencyError, SamplerError

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

    `rng="python"` draws with `random.Random(seed + step // period)`, which is verl-omni's window (and flow_grpo-fast's,
    whose seed is a process index there). `rng="numpy"` draws with `numpy.random.default_rng` (MixGRPO); it needs numpy.
    """

    size: int
    range: tuple[int, int]
    seed: int = 0
    period: int = 1
    rng: Literal["python", "numpy"] = "python"

    def __post_init__(self) -> None:
        _check_range(self.size, self.range, self.period)
        if self.rng not in ("python", "numpy"):
            raise SamplerError(f"rng={self.rng!r} is unknown; choose 'python' or 'numpy'")

    def steps(self, training_step: int) -> tuple[int, ...]:
        _check_training_step(training_step)
        low, high = self.range
        seed = self.seed + training_step // self.period
        if self.rng == "python":
            start = random.Random(seed).randint(low, high - self.size)
        else:
            start = _numpy_integer(seed, low, high - self.size + 1)
        return tuple(range(start, start + self.size))


@dataclass(frozen=True)
class RandomSubset:
    """`size` of the candidate `positions`, drawn without replacement each training step (Flow-Factory).

    The draw is `torch.randperm` under a generator seeded with `seed + training_step`; the steps are given in ascending
    order, since the order inside a window has no meaning.
    """

    positions: Sequence[int]
    size: int
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "positions", _positions(self.positions))
        if not 0 < self.size <= len(self.positions):
            raise SamplerError(f"size={self.size!r} must lie in 1 … {len(self.positions)}, the number of positions")

    def steps(self, training_step: int) -> tuple[int, ...]:
        _check_training_step(training_step)
        generator = torch.Generator().manual_seed(self.seed + training_step)
        order = torch.randperm(len(self.positions), generator=generator)[: self.size].tolist()
        return tuple(sorted(self.positions[i] for i in order))


@dataclass(frozen=True)
class _Moving:
    """A window that moves through its range; subclasses say how long it stays at each start."""

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

    def _stay(self, start: int) -> int:
        return self.period

    def steps(self, training_step: int) -> tuple[int, ...]:
        start = self.start(training_step)
        return tuple(range(start, min(start + self.size, self.range[1])))

    def start(self, training_step: int) -> int:
        """First position of the window (equal to the end of the range when `edge="empty"` and the window is empty)."""
        _check_training_step(training_step)
        starts = self._starts()
        stays = [self._stay(s) for s in starts]
        left = training_step % sum(stays) if self.at_end == "roll_back" else training_step
        for start, stay in zip(starts, stays, strict=True):
            if left < stay:
                return start
            left -= stay
        return starts[-1]

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


@dataclass(frozen=True)
class Progressive(_Moving):
    """The window stays `period` training steps, then moves by `stride` (MixGRPO; verl-omni with `stride=size`).

    At the end of the range it rolls back to the start or clamps there (`at_end`). `edge` says what happens where a full
    window does not fit any more: "full" moves it back so that it always has `size` steps (verl-omni), "cut" trains the
    steps that are left, "empty" does that and also stays a whole period one past the last step, training nothing, which
    is what MixGRPO's published state machine does.
    """


@dataclass(frozen=True)
class Decay(_Moving):
    """Progressive, with a stay that falls linearly from `period` at the start of the axis to `min_period` at the end.

    MixGRPO's "decay": `max(min_period, int(period * (1 - l/high) + min_period * l/high))` at start `l`.
    """

    min_period: int = 1

    def _stay(self, start: int) -> int:
        share = start / self.range[1]
        return max(self.min_period, int(self.period * (1 - share) + self.min_period * share), 1)


@dataclass(frozen=True)
class ExponentialDecay(_Moving):
    """Progressive, with a stay that falls exponentially past position `knee`: `ceil(period * exp(-rate * (l - knee)))`.

    The defaults (13 and 0.1) are MixGRPO's.
    """

    rate: float = 0.1
    knee: int = 13

    def _stay(self, start: int) -> int:
        return max(1, math.ceil(self.period * math.exp(-self.rate * max(0, start - self.knee))))


def per_sample(window_for: Callable[[int], Sequence[int]], batch: int) -> torch.Tensor:
    """[B, W] int64 from one window per sample, for `rollout(window=...)`; every sample needs the same W."""
    rows = [_positions(window_for(b)) for b in range(batch)]
    if len({len(row) for row in rows}) > 1:
        raise SamplerError(f"windows of one batch must have one size, got {sorted({len(row) for row in rows})}")
    return torch.tensor(rows, dtype=torch.int64).reshape(batch, -1)


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


def _numpy_integer(seed: int, low: int, high: int) -> int:
    try:
        import numpy
    except ImportError as error:
        raise MissingDependencyError(
            "Random(rng='numpy') needs numpy: pip install numpy, or use rng='python'"
        ) from error
    return int(numpy.random.default_rng(seed).integers(low, high))
