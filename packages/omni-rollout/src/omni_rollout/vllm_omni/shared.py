"""Buckets of tensors in POSIX shared memory, for an engine whose workers are other processes on this machine."""

from __future__ import annotations

from collections.abc import Iterable
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
