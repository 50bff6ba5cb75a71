"""Moving parameters, gradients and optimizer state between the device and the CPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def move_module(module: nn.Module, device: torch.device, *, grad: bool = True) -> None:
    """Move parameters, buffers and (``grad``) gradients; parameter objects stay the same, so the optimizer still
    knows them. A module that is there already is not touched."""
    if all(p.device == device for p in module.parameters()) and all(b.device == device for b in module.buffers()):
        return
    kept: list[tuple[nn.Parameter, Tensor]] = []
    if not grad:
        kept = [(p, p.grad) for p in module.parameters() if p.grad is not None]
        for parameter, _ in kept:
            parameter.grad = None
    nn.Module.to(module, device, non_blocking=True)
    for parameter, gradient in kept:
        parameter.grad = gradient if gradient.device == parameter.device else None
    _settle(device)


def move_optimizer(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move the moments; step counters stay where the optimizer made them."""
    moved = False
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor) and key != "step" and value.device != device:
                state[key] = value.to(device, non_blocking=True)
                moved = True
    if moved:
        _settle(device)


def _settle(device: torch.device) -> None:
    if torch.cuda.is_available():
        # Copies to pageable CPU memory may still run; the next reader, or the freed block's next owner, must not race.
        torch.cuda.synchronize()
        if device.type == "cpu":
            torch.cuda.empty_cache()
