"""Sigma grids: one table per run, shifted once, carried verbatim with every sample.

Notation: sigma = t in [0, 1], x_t = (1 - t) x0 + t e; a schedule decreases from (usually) 1 to exactly 0.

Two different N-step grids are called "shift 3" in public code, and both are here by name:
    grid="diffusers"  FlowMatchEulerDiscreteScheduler.set_timesteps(N): N points between the ends of an already shifted
                      1000-step grid, shifted once more (SD3 in flow_grpo, DiffusionNFT, verl-omni).
    grid="linear"     shift(linspace(1, 0, N + 1)): DanceGRPO and MixGRPO; with `mu` it is the grid of the FLUX and
                      Qwen-Image pipelines (linspace(1, 1/N, N), dynamic shift, terminal stretch, then 0).
Arithmetic follows the sources operation by operation, so that the tables agree bit for bit.
"""

from __future__ import annotations

import copy
import hashlib
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from .errors import SamplerError

Grid = Literal["diffusers", "linear"]
TimeShift = Literal["exponential", "linear"]

FLUX_SHIFT: Mapping[str, float] = {"base_shift": 0.5, "max_shift": 1.15, "base_len": 256, "max_len": 4096}
QWEN_IMAGE_SHIFT: Mapping[str, float] = {"base_shift": 0.5, "max_shift": 0.9, "base_len": 256, "max_len": 8192}
QWEN_IMAGE_SHIFT_TERMINAL = 0.02


@dataclass(frozen=True, eq=False)
class SigmaSchedule:
    """A strictly decreasing sigma table, fp32 [K+1] on the CPU, whose last entry is exactly 0.

    Attributes:
        sigmas: [K+1] fp32.
        hash: 16 hex digits over the bytes of the table. Two schedules are equal when their hashes are.

    Raises:
        SamplerError: another dtype or shape, entries outside [0, 1] or not finite, an increase, a last entry that
            is not 0.
    """

    sigmas: Tensor
    hash: str = field(init=False)

    def __post_init__(self) -> None:
        sigmas = self.sigmas
        if not isinstance(sigmas, Tensor) or sigmas.dtype != torch.float32 or sigmas.ndim != 1 or sigmas.numel() < 2:
            given = f"{list(sigmas.shape)} {sigmas.dtype}" if isinstance(sigmas, Tensor) else repr(sigmas)
            raise SamplerError(
                f"SigmaSchedule needs a torch.float32 tensor of shape [K+1] with K >= 1, got {given}; "
                "use SigmaSchedule.from_values(...) to convert a list"
            )
        table = sigmas.detach().to("cpu").clone()
        values = table.tolist()
        if not all(math.isfinite(v) and 0.0 <= v <= 1.0 for v in values):
            raise SamplerError(
                f"sigmas must be finite and inside [0, 1], got {values!r}; is this a timestep table (÷1000)?"
            )
        if values[-1] != 0.0:
            raise SamplerError(f"the last sigma must be exactly 0, got {values[-1]!r}; append 0 to the table")
        if any(a <= b for a, b in pairwise(values)):
            raise SamplerError(f"sigmas must decrease strictly, got {values!r}; use fewer steps or a smaller shift")
        digest = hashlib.sha256(struct.pack(f"<{len(values)}f", *values)).hexdigest()[:16]
        object.__setattr__(self, "sigmas", table)
        object.__setattr__(self, "hash", digest)

    @classmethod
    def from_values(cls, values: Sequence[float] | Tensor) -> SigmaSchedule:
        """From K+1 numbers (or a tensor), rounded to fp32; the last one must be 0."""
        return cls(torch.as_tensor(values).detach().to(device="cpu", dtype=torch.float32))

    @property
    def num_steps(self) -> int:
        return self.sigmas.numel() - 1

    @property
    def sigma_cap(self) -> float:
        """Second entry: what stands in for sigma = 1 in the std of Flow-SDE."""
        return float(self.sigmas[1])

    def timesteps(self, num_train_timesteps: int = 1000) -> Tensor:
        """[K] fp32, `sigma * num_train_timesteps`, as diffusers hands them to a transformer."""
        return self.sigmas[:-1] * num_train_timesteps

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SigmaSchedule) and self.hash == other.hash

    def __hash__(self) -> int:
        return hash(self.hash)

    def __len__(self) -> int:
        return self.num_steps


def flow_match(
    num_steps: int,
    shift: float = 3.0,
    grid: Grid | None = None,
    *,
    mu: float | None = None,
    time_shift: TimeShift = "exponential",
    shift_terminal: float | None = None,
    num_train_timesteps: int = 1000,
) -> SigmaSchedule:
    """A flow-matching schedule of `num_steps` steps.

    Args:
        num_steps: K >= 1.
        shift: static shift `k t / (1 + (k - 1) t)`; not used when `mu` is given.
        grid: "diffusers" (shifts twice) or "linear" (shifts once), see the top of this file. Defaults to "diffusers",
            and to "linear" when `mu` is given (what the FLUX and Qwen-Image pipelines do).
        mu: dynamic shift (see `mu_from_tokens`): `e^mu / (e^mu + 1/t - 1)`, or `mu / (mu + 1/t - 1)` with
            `time_shift="linear"`.
        shift_terminal: stretches the shifted grid so that the last non-zero sigma is this value. A one-step grid holds
            only sigma = 1, which cannot be stretched, and stays as it is.

    Raises:
        SamplerError: a number of steps below 1, an unknown grid, a shift that is not positive.
    """
    _check_steps(num_steps)
    if grid is None:
        grid = "diffusers" if mu is None else "linear"
    if grid not in ("diffusers", "linear"):
        raise SamplerError(f"grid={grid!r} is unknown; choose 'diffusers' (shifts twice) or 'linear' (shifts once)")
    if time_shift not in ("exponential", "linear"):
        raise SamplerError(f"time_shift={time_shift!r} is unknown; choose 'exponential' or 'linear'")
    if mu is None and not (math.isfinite(shift) and shift > 0):
        raise SamplerError(f"shift={shift!r} must be a positive number; 1.0 leaves the grid as it is")
    if mu is not None and not (math.isfinite(mu) and (time_shift == "exponential" or mu > 0)):
        raise SamplerError(f"mu={mu!r} must be finite, and positive for time_shift='linear'; see mu_from_tokens()")

    if grid == "diffusers":
        ends = torch.tensor([1.0, 1.0 / num_train_timesteps], dtype=torch.float32)
        if mu is None:  # the constructor of the diffusers scheduler shifts its table once, in fp32
            ends = _static_shift(ends, shift)
        times = _linspace(float(ends[0]) * num_train_timesteps, float(ends[1]) * num_train_timesteps, num_steps)
        grid_values = torch.tensor(times, dtype=torch.float64) / num_train_timesteps
    elif mu is None:
        grid_values = torch.linspace(1.0, 0.0, num_steps + 1)[:-1]
    else:
        grid_values = torch.tensor(_linspace(1.0, 1.0 / num_steps, num_steps), dtype=torch.float64).float()

    shifted = _static_shift(grid_values, shift) if mu is None else _dynamic_shift(grid_values, mu, time_shift)
    if shift_terminal is not None:
        shifted = _stretch(shifted, shift_terminal)
    return _with_zero(shifted)


def from_diffusers(
    scheduler: Any, num_steps: int, *, mu: float | None = None, sigmas: Sequence[float] | Tensor | None = None
) -> SigmaSchedule:
    """The grid that a diffusers `FlowMatchEulerDiscreteScheduler` would use, bit for bit.

    One exception: a first entry that misses 1 by rounding, as with shift 0.2, becomes exactly 1.

    Calls `set_timesteps` on a copy: the scheduler that is handed in stays as it is.

    Args:
        num_steps: K.
        mu: dynamic shift; needed when the scheduler's config has `use_dynamic_shifting`.
        sigmas: explicit grid before the shift, [K] (the FLUX and Qwen-Image pipelines pass linspace(1, 1/K, K)).

    Raises:
        SamplerError: not a flow-matching scheduler, a missing `mu`, or a grid that does not end at 0 (`invert_sigmas`).
    """
    _check_steps(num_steps)
    config = getattr(scheduler, "config", None)
    if config is None or not hasattr(scheduler, "set_timesteps") or not hasattr(config, "use_dynamic_shifting"):
        raise SamplerError(
            f"from_diffusers got {type(scheduler).__name__}, which is no FlowMatchEulerDiscreteScheduler; "
            "load the scheduler of a flow-matching pipeline or build a grid with flow_match()"
        )
    if getattr(config, "stochastic_sampling", False) or type(scheduler).__name__ == "FlowMatchLCMScheduler":
        raise SamplerError(
            f"{type(scheduler).__name__} draws noise of its own in every step (stochastic_sampling, LCM), and a sigma table "
            "leaves that out; take a FlowMatchEulerDiscreteScheduler without it, and a stochastic kind of sde_step"
        )
    if config.use_dynamic_shifting and mu is None:
        raise SamplerError(
            "this scheduler shifts by the token count (use_dynamic_shifting), but mu=None; "
            "compute it with mu_from_tokens(tokens, **FLUX_SHIFT) or **QWEN_IMAGE_SHIFT"
        )
    keywords: dict[str, Any] = {}
    if sigmas is not None:
        values = sigmas.tolist() if isinstance(sigmas, Tensor) else list(sigmas)
        if len(values) != num_steps:
            raise SamplerError(
                f"sigmas holds {len(values)} values for num_steps={num_steps}; pass one per step, without 0"
            )
        keywords["sigmas"] = values
    if mu is not None:
        keywords["mu"] = mu
    own = copy.deepcopy(scheduler)
    own.set_timesteps(num_steps, **keywords)
    table = own.sigmas.detach().to(device="cpu", dtype=torch.float32)
    if num_steps == 1 and getattr(config, "shift_terminal", None) and not bool(torch.isfinite(table).all()):
        table = torch.tensor([1.0, 0.0])  # a lone sigma = 1 cannot be stretched (0/0 in diffusers)
    return SigmaSchedule(_exact_one(table))


def mu_from_tokens(tokens: int, *, base_shift: float, max_shift: float, base_len: float, max_len: float) -> float:
    """Dynamic shift: linear in the packed token count, not clamped outside [base_len, max_len].

    `mu_from_tokens(4096, **FLUX_SHIFT)` is 1.15.
    """
    if tokens < 1:
        raise SamplerError(f"tokens={tokens!r} must be the number of packed latent tokens (at least 1)")
    slope = (max_shift - base_shift) / (max_len - base_len)
    return tokens * slope + (base_shift - slope * base_len)


def _check_steps(num_steps: int) -> None:
    if isinstance(num_steps, bool) or not isinstance(num_steps, int) or num_steps < 1:
        raise SamplerError(f"num_steps={num_steps!r} must be an integer of at least 1")


def _linspace(start: float, stop: float, count: int) -> list[float]:
    """float64, evaluated as numpy does it (start + i * step, exact stop)."""
    if count == 1:
        return [start]
    step = (stop - start) / (count - 1)
    return [i * step + start for i in range(count - 1)] + [stop]


def _static_shift(t: Tensor, shift: float) -> Tensor:
    return shift * t / (1 + (shift - 1) * t)


def _dynamic_shift(t: Tensor, mu: float, time_shift: TimeShift) -> Tensor:
    factor = math.exp(mu) if time_shift == "exponential" else mu
    # number / tensor is reciprocal-then-multiply in torch, two roundings; numpy and this divide once.
    one, numerator = torch.ones_like(t), torch.full_like(t, factor)
    return numerator / (factor + (one / t - 1))


def _stretch(t: Tensor, terminal: float) -> Tensor:
    if not 0.0 < terminal < 1.0:
        raise SamplerError(f"shift_terminal={terminal!r} must lie inside (0, 1), or be None for no stretch")
    if float(t[-1]) >= 1.0:
        return t
    rest = 1 - t
    return 1 - rest / (rest[-1] / (1 - terminal))


def _with_zero(t: Tensor) -> SigmaSchedule:
    return SigmaSchedule(_exact_one(torch.cat([t.to(torch.float32), torch.zeros(1)])))


def _exact_one(table: Tensor) -> Tensor:
    """Snap a first entry that rounding moved off 1 (shift 0.2 gives 1.0000006): Flow-SDE divides by 1 - t."""
    if 0.0 < abs(float(table[0]) - 1.0) < 2e-6:
        table = table.clone()
        table[0] = 1.0
    return table
