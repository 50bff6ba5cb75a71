"""Adapter tensors out of a PEFT model, sharded or not, one layer at a time; the base is never gathered."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from .errors import PayloadError
from .host import on_host
from .layers import (
    adapter_parameters,
    full,
    is_sharded,
    layer_alpha,
    layers_of,
    neutral_name,
    outer_modules,
    reshard,
)
from .payload import LoRAPayload


def stream_lora(module: nn.Module, adapter_name: str = "default", *, copy: bool = True) -> Iterator[tuple[str, Tensor]]:
    """(neutral name, full tensor) of the adapter, in module order, one at a time, in the module's dtype and on its device.

    Under FSDP2 every step is a collective: all ranks iterate, to the end. `copy=False` hands out the live tensors where nothing
    had to be gathered; the next optimizer step changes them.
    """
    reshard(module)  # this puts other Parameter objects in place, so it comes first
    for name, parameter in adapter_parameters(module, adapter_name).items():
        tensor = full(parameter)
        yield name, tensor.clone() if copy and not is_sharded(parameter) else tensor


def extract_lora(
    module: nn.Module,
    adapter_name: str = "default",
    *,
    version: int,
    base_fingerprint: str | None = None,
    copy: bool = True,
    device: str | None = None,
) -> LoRAPayload:
    """Snapshot an adapter as a `LoRAPayload`.

    Args:
        module: a model with PEFT LoRA layers (`add_adapter`, `inject_adapter_in_model` or a `PeftModel`).
        version: larger than at the last sync of this adapter.
        base_fingerprint: of the frozen weights, when receivers should check it; see `lora_sync.fingerprint`.
        copy: False shares memory with the module: cheaper, and stale (a hash error) after the next optimizer step.
        device: `"cpu"` brings an adapter from a GPU to the host first, in one go, and hashes it there: for receivers in
            other processes. None leaves it where it is.

    Raises `AdapterError` (no such adapter) and `PayloadError` (DoRA, LoRA biases, embeddings). Under FSDP2 all
    ranks call it and all get the payload.
    """
    if device not in (None, "cpu"):
        raise PayloadError(f"device={device!r} is not 'cpu' or None.")
    layers = layers_of(module, adapter_name)
    stream = stream_lora(module, adapter_name, copy=copy)
    tensors = on_host(stream) if device == "cpu" else dict(stream)
    return LoRAPayload.build(
        tensors,
        alphas={name: layer_alpha(layer, adapter_name) for name, layer in layers.items()},
        version=version,
        target_modules=_targets(module, adapter_name, set(layers)),
        base_fingerprint=base_fingerprint,
    )


def _targets(module: nn.Module, adapter_name: str, adapted: set[str]) -> tuple[str, ...]:
    """The suffixes that the adapter was configured with, if they select exactly the adapted modules; else full names."""
    config = getattr(module, "peft_config", {}).get(adapter_name)
    suffixes = getattr(config, "target_modules", None)
    if not suffixes or isinstance(suffixes, str):
        return tuple(sorted(adapted))
    ends = tuple("." + suffix for suffix in suffixes)
    names = (neutral_name(name) for name, _, _ in outer_modules(module))
    selected = {name for name in names if ("." + name).endswith(ends)}
    return tuple(sorted(suffixes)) if selected == adapted else tuple(sorted(adapted))
