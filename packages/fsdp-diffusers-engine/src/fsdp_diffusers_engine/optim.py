"""AdamW, its learning-rate schedule, and the norm of a gradient that may be sharded."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import get_args

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .config import FSDPOptimizerConfig, Schedule
from .errors import EngineError

SCHEDULES = get_args(Schedule)


def check_optimizer_config(config: FSDPOptimizerConfig) -> None:
    """Refuse settings that cannot train; called before anything is loaded."""
    if config.lr_scheduler_type not in SCHEDULES:
        raise EngineError(f"lr_scheduler_type={config.lr_scheduler_type!r} is unknown; use one of {SCHEDULES}")
    if config.lr_scheduler_type != "constant" and config.total_training_steps <= config.lr_warmup_steps:
        raise EngineError(
            f"lr_scheduler_type={config.lr_scheduler_type!r} needs total_training_steps > lr_warmup_steps, "
            f"got {config.total_training_steps!r} and {config.lr_warmup_steps!r}; set total_training_steps"
        )
    if len(config.betas) != 2 or not all(0.0 <= b < 1.0 for b in config.betas):
        raise EngineError(f"betas={list(config.betas)!r} must be two numbers in [0, 1)")
    for name in ("lr", "weight_decay", "clip_grad", "lr_warmup_steps"):
        if not getattr(config, name) >= 0:
            raise EngineError(f"{name}={getattr(config, name)!r} must not be negative or NaN")


def lr_factor(config: FSDPOptimizerConfig, step: int) -> float:
    """What the peak rate is multiplied with at optimizer step `step` (the first step is 0)."""
    warmup = config.lr_warmup_steps
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if config.lr_scheduler_type == "constant":
        return 1.0
    done = min(1.0, (step - warmup) / (config.total_training_steps - warmup))
    shape = 1.0 - done if config.lr_scheduler_type == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.min_lr_ratio + (1.0 - config.min_lr_ratio) * shape


def build_optimizer(parameters: Iterable[nn.Parameter], config: FSDPOptimizerConfig) -> torch.optim.AdamW:
    """AdamW over `parameters`; fused on CUDA, where one launch replaces hundreds."""
    params = list(parameters)
    return torch.optim.AdamW(
        params,
        lr=config.lr,
        betas=(config.betas[0], config.betas[1]),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True if params and params[0].device.type == "cuda" else None,
    )


class LRSchedule:
    """Sets the learning rate of every parameter group to `lr * lr_factor(step)`.

    The rate is a function of the step and the config alone, so a resumed run needs the step and may change the config.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, config: FSDPOptimizerConfig) -> None:
        self.optimizer = optimizer
        self.config = config
        self.last_epoch = 0
        """Steps taken (torch's name for it)."""
        self.set_step(0)

    def set_step(self, step: int) -> None:
        """Go to `step`."""
        self.last_epoch = step
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.lr * lr_factor(self.config, step)

    def step(self) -> None:
        """Go to the next step."""
        self.set_step(self.last_epoch + 1)

    def get_last_lr(self) -> list[float]:
        """The rate in force, per parameter group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]


def gradient_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """L2 norm of the whole gradient, over all ranks when it is sharded: a plain 0-dim tensor, equal on every rank."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return torch.zeros(())
    norm = torch.nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def not_finite(parameters: Mapping[str, nn.Parameter]) -> str:
    """Name of the first parameter whose gradient, or this rank's shard of it, holds NaN or infinity; empty where none does."""
    for name, parameter in parameters.items():
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            gradient = gradient.to_local()
        if gradient is not None and not bool(gradient.isfinite().all()):
            return name
    return ""


def scale_gradients(parameters: Sequence[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scale gradients in place so that their norm is at most `max_norm` (torch's rule, with its 1e-6)."""
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)


def moments(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], *, create: bool
) -> dict[str, Tensor]:
    """AdamW's moments, live, as `optimizer.<parameter>.<moment>`; `create` makes those that no step has made yet."""
    found: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        state = optimizer.state[parameter] if create else optimizer.state.get(parameter, {})
        for moment in ("exp_avg", "exp_avg_sq"):
            if create and moment not in state:
                state[moment] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            if moment in state:
                found[f"optimizer.{name}.{moment}"] = state[moment].detach()
    return found


def steps_of(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, float]:
    """AdamW's own count of each parameter's steps."""
    states = {name: optimizer.state.get(p, {}) for name, p in parameters.items()}
    return {name: float(state["step"]) for name, state in states.items() if "step" in state}


def set_steps(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], steps: Mapping[str, float]
) -> None:
    """Put those counts back; a parameter without one forgets its moments, as if it had never been stepped."""
    fused = bool(optimizer.defaults.get("fused"))
    for name, parameter in parameters.items():
        if name in steps:
            device = parameter.device if fused else torch.device("cpu")
            optimizer.state[parameter]["step"] = torch.tensor(steps[name], dtype=torch.float32, device=device)
        else:
            optimizer.state.pop(parameter, None)
