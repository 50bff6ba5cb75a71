"""What the samplers return.

Shapes: B sample, W trained (window) step, K denoising step, `...` the latent dims (tokens [S, C], image [C, H, W],
video [C, T, H, W]).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from .errors import ReplayMismatchError, SamplerError
from .kinds import Kind, LogProbForm

__all__ = ["Kind", "LogProbForm", "SdeStep", "Trajectory", "VelocityFn"]

VelocityFn = Callable[[Tensor, Tensor], Tensor]
"""`velocity_fn(x [B, ...] fp32, sigma [B] fp32) -> v [B, ...]`, any floating dtype."""


class SdeStep:
    """One transition `x_u ~ N(mean, std² I)`.

    Attributes:
        prev_sample: [B, ...] fp32, detached. The sample that was drawn, or the one that was handed in to be scored.
        mean: [B, ...] fp32, carries the gradient. Computed at the first access: a loss that reads only `log_prob` never
            needs it in memory.
        std: [B] fp32, the TOTAL std of the transition (never the std per root of time); 0 for a deterministic one.
        log_prob: [B] fp32, mean over the latent elements; None for an ODE step or zero noise.

    Unpacks in the order `prev_sample, mean, std, log_prob`.
    """

    __slots__ = ("_mean", "log_prob", "prev_sample", "std")

    def __init__(
        self, prev_sample: Tensor, mean: Tensor | Callable[[], Tensor], std: Tensor, log_prob: Tensor | None
    ) -> None:
        self.prev_sample = prev_sample
        self._mean = mean
        self.std = std
        self.log_prob = log_prob

    @property
    def mean(self) -> Tensor:
        if not isinstance(self._mean, Tensor):
            self._mean = self._mean()
        return self._mean

    def __iter__(self) -> Iterator[Tensor | None]:
        yield from (self.prev_sample, self.mean, self.std, self.log_prob)

    def __repr__(self) -> str:
        log_prob = "None" if self.log_prob is None else f"{self.log_prob.detach().tolist()}"
        return f"SdeStep(prev_sample={list(self.prev_sample.shape)}, std={self.std.tolist()}, log_prob={log_prob})"


@dataclass(frozen=True)
class Trajectory:
    """The trained part of a rollout, in fp32, with everything that a replay needs to be exact.

    Attributes:
        latents, next_latents: [B, W, ...] fp32, the states before and after each trained step. A window may have gaps
            and may differ per sample, so `next_latents[:, w]` is not `latents[:, w + 1]` in general.
        step_index: [B, W] int64, positions 0 … K-1 in the schedule.
        sigmas: [K+1] fp32, the schedule, verbatim.
        log_probs: [B, W] fp32, or None when the steps have no density (kind "ode", zero noise).
        std: [B, W] fp32, total std of each transition.
        final: [B, ...] fp32, the latents at the end of the schedule.
        schedule_hash, kind, noise_level, log_prob_form: what the log-probs mean; a replay refuses other ones.
        means: [B, W, ...] fp32 or None.
    """

    latents: Tensor
    next_latents: Tensor
    step_index: Tensor
    sigmas: Tensor
    log_probs: Tensor | None
    std: Tensor
    final: Tensor
    schedule_hash: str
    kind: Kind
    noise_level: float
    log_prob_form: LogProbForm
    means: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("latents", "next_latents", "sigmas", "log_probs", "std", "final", "means"):
            value = getattr(self, name)
            if value is not None and value.dtype != torch.float32:
                raise ReplayMismatchError(
                    f"Trajectory.{name} has dtype {value.dtype}, but log-probs are only comparable in torch.float32 "
                    "(a bf16 round trip moves them by up to 0.15); keep the trajectory in fp32 as rollout() made it"
                )
        if self.latents.ndim < 3 or self.latents.shape != self.next_latents.shape:
            raise SamplerError(
                f"Trajectory.latents {list(self.latents.shape)} and next_latents {list(self.next_latents.shape)} "
                "must have one shape [B, W, ...] with at least one latent dim"
            )
        batch, window = self.latents.shape[:2]
        for name in ("step_index", "std", "log_probs"):
            value = getattr(self, name)
            if value is not None and tuple(value.shape) != (batch, window):
                raise SamplerError(
                    f"Trajectory.{name} has shape {list(value.shape)}, expected [B, W] = {[batch, window]}"
                )
        if self.step_index.dtype != torch.int64:
            raise SamplerError(f"Trajectory.step_index has dtype {self.step_index.dtype}, expected torch.int64")

    @property
    def window_size(self) -> int:
        return int(self.latents.shape[1])

    def to(self, device: torch.device | str) -> Trajectory:
        """The same trajectory on another device; dtypes stay."""
        moved: dict[str, Any] = {
            f.name: value.to(device) for f in fields(self) if isinstance(value := getattr(self, f.name), Tensor)
        }
        return replace(self, **moved)
