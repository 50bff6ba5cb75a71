"""Hashes of tensors: one over names, shapes and bytes, and one of full weights that does not depend on their layout."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import chain

import torch
import xxhash
from torch import Tensor, nn

from .host import host_pieces
from .layers import base_parameters, full

_PARALLEL_BYTES = 32 << 20
_ROW, _PART = 128, 1 << 24
_GOLDEN, _MIX1, _MIX2 = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


def tensor_digest(tensor: Tensor) -> str:
    """XXH3-128 (https://xxhash.com) of the tensor's bytes, 32 hex digits."""
    hasher = xxhash.xxh3_128()
    for piece in host_pieces(tensor):
        hasher.update(piece)
    return hasher.hexdigest()


def content_hash(tensors: Mapping[str, Tensor], alphas: Mapping[str, float]) -> str:
    """`"xxh3:<32 hex>"` of names, dtypes, shapes, bytes and alphas. Large adapters are hashed on several threads."""
    named = sorted(tensors.items())
    threads = min(4, os.cpu_count() or 1) if sum(t.nbytes for t in tensors.values()) >= _PARALLEL_BYTES else 1
    with ThreadPoolExecutor(threads) as pool:  # xxhash lets the interpreter lock go
        shares = [named[start::threads] for start in range(threads)]
        digests = dict(chain.from_iterable(pool.map(_digests, shares)))
    rows = [[name, str(t.dtype), list(t.shape), digests[name]] for name, t in named]
    text = json.dumps([rows, sorted((name, float(alpha)) for name, alpha in alphas.items())], separators=(",", ":"))
    return "xxh3:" + xxhash.xxh3_128_hexdigest(text.encode())


def _digests(named: Iterable[tuple[str, Tensor]]) -> list[tuple[str, str]]:
    return [(name, tensor_digest(tensor)) for name, tensor in named]


def content_sum(tensors: Iterable[Tensor]) -> str:
    """Checksum of all elements, `"<count>:<16 hex digits>"`, that stays when a sampler fuses or splits the tensors.

    Each element's bits go through a 64-bit mixer (the finaliser of splitmix64) and the results are added modulo 2^64: a changed,
    lost or doubled element shows, two that trade places do not. On a GPU one kernel reads the elements once.
    """
    count, sums = 0, defaultdict[torch.device, list[Tensor]](list)
    for tensor in tensors:
        flat = tensor.detach().contiguous().reshape(-1)
        bits = flat.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
        whole = bits.numel() // _ROW * _ROW
        for part in (*bits[:whole].view(-1, _ROW).split(_PART // _ROW), bits[whole:][None]):
            if part.numel():
                mixed = _mixer(part.device.type) if len(part) > 1 else _mixed  # one row would be compiled by itself
                sums[part.device].append(mixed(part).sum())
        count += flat.numel()
    total = sum(int(torch.stack(each).sum()) for each in sums.values())
    return f"{count}:{total % 2**64:016x}"


def _mixed(bits: Tensor) -> Tensor:
    """[n, m] → the sum of each row's mixed bits, int64 [n]."""
    x = bits.to(torch.int64) + _GOLDEN
    x = (x ^ _shift(x, 30)) * _MIX1
    x = (x ^ _shift(x, 27)) * _MIX2
    return (x ^ _shift(x, 31)).sum(1)


@cache
def _mixer(device: str) -> Callable[[Tensor], Tensor]:
    """`_mixed`, compiled where there is a GPU and a C compiler: it holds no number of its own between the operations.

    Rows of one length are added side by side whatever their number. All elements as one row would be added by a single block
    of threads if the tensor that it is compiled for is a small one: seconds for each layer.
    """
    if device != "cuda":
        return _mixed
    compiled = torch.compile(_mixed, dynamic=True)
    try:
        compiled(torch.zeros(1 << 12, _ROW, dtype=torch.int32, device=device))
    except Exception:  # whatever it lacks, the sum is the same
        return _mixed
    return compiled


def _shift(x: Tensor, by: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def added_sums(sums: Iterable[str]) -> str:
    """Content sums of parts → content sum of the whole."""
    pairs = [entry.split(":") for entry in sums]
    return f"{sum(int(count) for count, _ in pairs)}:{sum(int(value, 16) for _, value in pairs) % 2**64:016x}"


def value_sum(tensors: Iterable[Tensor]) -> str:
    """`content_sum` of the values in float32: the same for a receiver that holds them in a wider dtype than they came in."""
    return content_sum(tensor.detach().float() for tensor in tensors)


def module_sum(module: nn.Module) -> str:
    """`value_sum` of a module's base parameters; adapters do not change it. A collective when it is sharded."""
    return value_sum(full(parameter) for parameter in base_parameters(module).values())
