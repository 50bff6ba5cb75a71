"""Adapters on the host: copies off a GPU that overlap, and payloads that cross processes without being written twice."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .codec import as_buffer, byte_view

_BLOCK = 64 << 20
_ALIGN = 64


def on_host(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Copies of the tensors in host memory; those that are on the host already are handed through as they are.

    From a GPU they go into page-locked blocks, queued one behind the other and waited for once. The blocks come from
    torch's cache of such memory, so the next call does not pay for them again. Tensors are taken one at a time.
    """
    out: dict[str, Tensor] = {}
    block, place = torch.empty(0, dtype=torch.uint8), 0
    devices: set[torch.device] = set()
    for name, tensor in named:
        tensor = tensor.detach()
        if tensor.device.type == "cpu":
            out[name] = tensor
            continue
        size, cuda = tensor.numel() * tensor.element_size(), tensor.device.type == "cuda"
        if place + size > block.numel():
            block, place = torch.empty(max(_BLOCK, size), dtype=torch.uint8, pin_memory=cuda), 0
        target = block[place : place + size].view(tensor.dtype).reshape(tensor.shape)
        out[name] = target.copy_(tensor, non_blocking=cuda)
        place += size + -size % _ALIGN
        devices |= {tensor.device} if cuda else set()
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
    return out


def out_of_band(tensors: Mapping[str, Tensor]) -> list[tuple[str, str, tuple[int, ...], Any]]:
    """(name, dtype, shape, bytes) per tensor, for pickle protocol 5: Ray and others move the bytes without copying them
    into the pickle, straight from these tensors."""
    return [
        (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), _buffer(tensor))
        for name, tensor in on_host(tensors.items()).items()
    ]


def _buffer(tensor: Tensor) -> Any:
    flat = tensor.detach().contiguous().reshape(-1)
    return pickle.PickleBuffer(byte_view(flat.view(torch.uint8))) if flat.numel() else b""


def from_buffers(parts: Iterable[tuple[str, str, tuple[int, ...], Any]]) -> Iterator[tuple[str, Tensor]]:
    """Inverse of `out_of_band`: tensors over the received memory, which may be read-only (Ray's store is)."""
    for name, dtype, shape, data in parts:
        kind, memory = getattr(torch, dtype), memoryview(data)
        yield name, as_buffer(memory).view(kind).reshape(shape) if memory.nbytes else torch.empty(shape, dtype=kind)
