"""Full weights by name: loading them with nothing lost, and a checksum of what a module holds.

A PEFT or vLLM LoRA layer keeps the base weight under `….base_layer.weight`; senders do not know whether LoRA layers
exist, so both forms of a name are understood and a name that finds nothing is an error, never skipped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from .errors import SyncError


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
    """Copy tensors into a module by base name. Returns how many were copied.

    Every name and shape is checked before its own copy; the first that does not fit raises `SyncError`.
    """
    targets = base_tensors(module)
    count = 0
    for name, value in named:
        target = targets.get(base_name(name))
        if target is None:
            raise SyncError(f"weight {name!r} has no parameter in the rollout module; sent to the wrong architecture?")
        if target.shape != value.shape:
            raise SyncError(f"weight {name!r} has shape {tuple(value.shape)}, the module {tuple(target.shape)}.")
        target.copy_(value)
        count += 1
    return count


def tensors_checksum(named: Iterable[tuple[str, Tensor]]) -> str:
    """sha256 over names, shapes, dtypes and bytes, in the order of the names: equal exactly for equal weights."""
    digest = hashlib.sha256()
    for name, value in sorted(named, key=lambda item: item[0]):
        digest.update(f"{name}|{tuple(value.shape)}|{value.dtype}".encode())
        digest.update(value.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def module_checksum(module: nn.Module) -> str:
    """Checksum of a module's base parameters; adapters and LoRA wrappers do not change it."""
    return tensors_checksum(base_tensors(module).items())
