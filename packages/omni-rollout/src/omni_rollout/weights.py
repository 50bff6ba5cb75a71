"""Full weights by name: loading them with nothing lost, and a checksum of what a module holds.

A PEFT or vLLM LoRA layer keeps the base weight under `….base_layer.weight`; senders do not know whether LoRA layers
exist, so both forms of a name are understood and a name that finds nothing is an error, never skipped.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from .errors import SyncError

_PART = 1 << 24
_GOLDEN, _MIX1, _MIX2 = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


def base_name(name: str) -> str:
    """The name of a parameter as it would be without LoRA layers around it."""
    return name.replace(".base_layer.", ".")


def is_adapter(name: str) -> bool:
    """True for the name of an adapter's own tensor."""
    return ".lora_" in name or ".lora_a_stacked" in name or ".lora_b_stacked" in name


def base_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Base parameters of a module, adapters left out, under names without `base_layer`."""
    return {base_name(name): value for name, value in module.named_parameters() if not is_adapter(name)}


@torch.no_grad()
def load_named(module: nn.Module, named: Iterable[tuple[str, Tensor]]) -> int:
    """Copy a complete set of weights into a module by base name. Returns how many tensors that were.

    Raises `SyncError` for a name that finds nothing, another shape, a tensor sent twice, or one that was not sent.
    """
    targets = base_tensors(module)
    missing = set(targets)
    for name, value in named:
        base = base_name(name)
        target = targets.get(base)
        if target is None:
            raise SyncError(f"weight {name!r} has no parameter in the rollout module; sent to the wrong architecture?")
        if base not in missing:
            raise SyncError(f"weight {name!r} was sent twice.")
        if target.shape != value.shape:
            raise SyncError(f"weight {name!r} has shape {tuple(value.shape)}, the module {tuple(target.shape)}.")
        target.copy_(value)
        missing.discard(base)
    if missing:
        raise SyncError(f"{len(missing)} of {len(targets)} weights were not sent, e.g. {sorted(missing)[:3]!r}.")
    return len(targets)


def content_sum(tensors: Iterable[Tensor]) -> str:
    """Checksum of all elements that does not depend on how they are laid out: "<count>:<16 hex digits>".

    A sampler may fuse three projections into one tensor; the elements stay the same, and so does this sum. Each element's
    bits go through a 64-bit mixer (the finaliser of splitmix64) and the results are added modulo 2^64, so a changed,
    lost or doubled element shows. It does not see two elements trade places: the pictures do.
    """
    count, total = 0, 0
    for tensor in tensors:
        flat = tensor.detach().contiguous().reshape(-1)
        bits = flat.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
        for part in bits.split(_PART):
            x = part.to(torch.int64) + _GOLDEN
            x = (x ^ _shift(x, 30)) * _MIX1
            x = (x ^ _shift(x, 27)) * _MIX2
            total += int((x ^ _shift(x, 31)).sum())
        count += flat.numel()
    return f"{count}:{total % 2**64:016x}"


def _shift(x: Tensor, by: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def module_checksum(module: nn.Module) -> str:
    """`content_sum` of a module's base parameters; adapters and LoRA wrappers do not change it."""
    return content_sum(base_tensors(module).values())
