"""Buckets of tensors in POSIX shared memory, for an engine whose workers are other processes on this machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from multiprocessing import shared_memory

import safetensors.torch
from torch import Tensor


def write_bucket(named: Iterable[tuple[str, Tensor]]) -> shared_memory.SharedMemory:
    """Put tensors into a new block (safetensors bytes). The caller closes and unlinks it."""
    data = safetensors.torch.save({name: value.detach().contiguous().cpu() for name, value in named})
    block = shared_memory.SharedMemory(create=True, size=len(data))
    memory = block.buf
    assert memory is not None
    memory[: len(data)] = data
    return block


def read_bucket(name: str) -> list[tuple[str, Tensor]]:
    """The tensors of a block, copied out of it."""
    block = shared_memory.SharedMemory(name=name)
    try:
        memory = block.buf
        assert memory is not None
        return list(safetensors.torch.load(bytes(memory)).items())
    finally:
        block.close()


def buckets(named: Iterable[tuple[str, Tensor]], limit_bytes: int) -> Iterator[tuple[list[tuple[str, Tensor]], bool]]:
    """Group a stream into buckets of at most `limit_bytes` (a larger tensor is one of its own): (bucket, is it the last)."""
    held: list[tuple[str, Tensor]] = []
    size = 0
    for name, value in named:
        bytes_ = value.numel() * value.element_size()
        if held and size + bytes_ > limit_bytes:
            yield held, False
            held, size = [], 0
        held.append((name, value))
        size += bytes_
    yield held, True
