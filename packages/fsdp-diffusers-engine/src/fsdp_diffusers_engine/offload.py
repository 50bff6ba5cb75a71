"""Moving parameters, gradients, optimizer state and activations between the device and the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def activations_on_cpu() -> Iterator[None]:
    """What a forward inside saves for its backward waits on the CPU, in pinned memory where there is a GPU.

    Weights stay: a linear layer saves its own for the gradient of its input, and without checkpointing a copy of every
    one would cross the bus in every forward (`torch.autograd.graph.save_on_cpu` does that). Copies are queued on the
    stream, so forward does not wait for them, and keep their strides, so that backward runs the same kernels.
    """
    with torch.autograd.graph.saved_tensors_hooks(_pack, _unpack):
        yield


def is_weight(tensor: Tensor) -> bool:
    """Whether a saved tensor is a parameter, or a view of one (its transpose, most often)."""
    base = tensor._base if tensor._is_view() else tensor
    return isinstance(base, nn.Parameter)


_Kept = tuple[torch.device, torch.Size, tuple[int, ...], Tensor]
"""Where a tensor was, its shape and strides, and its elements on the CPU, each once."""


def _pack(tensor: Tensor) -> Tensor | _Kept:
    if is_weight(tensor):
        return tensor
    strides = tensor.stride()
    own = tensor.as_strided(
        [size if stride else min(size, 1) for size, stride in zip(tensor.shape, strides, strict=True)], strides
    )
    kept = torch.empty_like(own, device="cpu", pin_memory=tensor.is_cuda)
    return tensor.device, tensor.shape, strides, kept.copy_(own, non_blocking=True)


def _unpack(packed: Tensor | _Kept) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    device, shape, strides, kept = packed
    # With the gaps of a slice, if it was one: `to` would close them, and a compiled backward reads what it expects.
    back = torch.empty_strided(kept.shape, strides, dtype=kept.dtype, device=device)
    return back.copy_(kept, non_blocking=True).as_strided(shape, strides)


def move_module(module: nn.Module, device: torch.device, *, grad: bool = True) -> None:
    """Move parameters, buffers and (`grad`) gradients; parameter objects stay the same, so the optimizer still
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
