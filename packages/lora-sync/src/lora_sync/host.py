"""The bytes of tensors on the host: views without a copy, and copies off a GPU that overlap."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

_PIECE = 8 << 20


def flat_bytes(tensor: Tensor) -> Tensor:
    """The tensor's bytes as flat uint8 on its own device; a view where it is contiguous."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)


def byte_view(tensor: Tensor) -> memoryview:
    """The memory of a CPU tensor."""
    array: Any = flat_bytes(tensor).numpy()
    return memoryview(array)


def as_tensor(data: Any) -> Tensor:
    """A flat uint8 tensor over bytes, memoryview, numpy array or mmap; no copy."""
    with (
        warnings.catch_warnings()
    ):  # read-only memory (Ray's store) is fine here: nobody writes into a message's tensors
        warnings.filterwarnings("ignore", message=".*not writable.*")
        return torch.frombuffer(data, dtype=torch.uint8) if len(data) else torch.empty(0, dtype=torch.uint8)


def host_pieces(tensor: Tensor) -> Iterator[memoryview]:
    """The tensor's bytes in order, a few megabytes at a time.

    From a GPU they come through one page-locked buffer, at the bus's speed; the next piece overwrites the last.
    """
    flat = flat_bytes(tensor)
    if flat.device.type == "cpu":
        yield from (byte_view(piece) for piece in flat.split(_PIECE) if len(piece))
        return
    host = torch.empty(min(_PIECE, flat.numel()), dtype=torch.uint8, pin_memory=flat.device.type == "cuda")
    for piece in flat.split(_PIECE):
        yield byte_view(host[: piece.numel()].copy_(piece))


def on_host(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Copies of the tensors in host memory; those that are on the host already are handed through as they are.

    From a GPU they go into page-locked memory, queued one behind the other and waited for once. It comes from torch's cache of
    such memory, so the next call does not pay for it again. Tensors are taken one at a time.
    """
    out: dict[str, Tensor] = {}
    devices: set[torch.device] = set()
    for name, tensor in named:
        out[name] = tensor.detach()
        if tensor.device.type == "cuda":
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            out[name] = host.copy_(tensor.detach(), non_blocking=True)
            devices.add(tensor.device)
        elif tensor.device.type != "cpu":
            out[name] = out[name].cpu()
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
    return out
