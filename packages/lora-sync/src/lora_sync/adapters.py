"""`LoRAAdapterMixin`: several named policies in one set of frozen weights.

A trainer keeps the adapter that learns (`default`) and a slower copy of it (`old`). `"reference"` is the model with every
adapter off: a state, not an adapter, so it has no tensors.

Switching writes PEFT's active list and its off switch directly: PEFT's own `set_adapter` would also turn gradients off, which
FSDP2 must not see change between forward and backward. All tensor work is elementwise on each rank's own shard.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from .errors import AdapterError, BindError
from .layers import REFERENCE, adapter_names, adapter_parameters, layers_of, local, lora_layers, reshard


class LoRAAdapterMixin:
    """Mix into a class with `self.module`: a model with PEFT LoRA layers, plain or under `fully_shard`."""

    module: nn.Module

    def copy_adapter(self, source: str = "default", target: str = "old") -> None:
        """Make `target` bitwise equal to `source`, alpha included. Both exist, with the same ranks."""
        with torch.no_grad():
            for _, ours, theirs in _pairs(self.module, source, target):
                theirs.copy_(ours)
        layers = layers_of(self.module, source)
        for name, layer in layers_of(self.module, target).items():
            for setting in ("lora_alpha", "scaling"):
                getattr(layer, setting)[target] = getattr(layers[name], setting)[source]

    def ema_update_adapter(self, source: str = "default", target: str = "old", decay: float = 0.0) -> None:
        """target ← decay · target + (1 − decay) · source, in float32. `decay=0` copies, `decay=1` does nothing."""
        if not 0.0 <= decay <= 1.0:
            raise AdapterError(f"decay is {decay!r}; it must be in [0, 1].")
        if decay == 0.0:
            return self.copy_adapter(source, target)
        pairs, layers = _pairs(self.module, source, target), layers_of(self.module, source)
        for name, _, theirs in pairs:
            if theirs.dtype not in (torch.float32, torch.float64):
                raise AdapterError(
                    f"{name!r} of adapter {target!r} is {theirs.dtype}: an average that moves by {1 - decay:.3g} per step is "
                    "rounded away in it. Keep adapters in float32 (the base may stay in bfloat16)."
                )
        if any(layer.scaling[source] != layer.scaling[target] for layer in layers.values()):
            raise BindError(
                f"adapters {source!r} and {target!r} scale B·A differently; copy_adapter first, or equal alphas."
            )
        with torch.no_grad():
            for _, ours, theirs in pairs:
                theirs.add_(ours.to(theirs.dtype) - theirs, alpha=1.0 - decay)
        return None

    def use_adapter(self, name: str) -> AbstractContextManager[None]:
        """Run with one adapter, or with none for `"reference"`; the state before comes back, also after an error."""
        return use_adapter(self.module, name)

    def disable_adapter(self) -> AbstractContextManager[None]:
        """Run the base model: every adapter off."""
        return use_adapter(self.module, REFERENCE)


@contextmanager
def use_adapter(module: nn.Module, name: str) -> Iterator[None]:
    """See `LoRAAdapterMixin.use_adapter`."""
    if name != REFERENCE:
        layers_of(module, name)
    layers = [layer for _, layer in lora_layers(module)]
    if not layers:
        raise AdapterError(f"this {type(module).__name__} has no LoRA layers, so there is no adapter to choose.")
    if any(layer.merged for layer in layers):
        raise BindError("an adapter is merged into the base weights, so switching would not undo it; unmerge first.")
    saved = [(layer, layer._active_adapter, layer._disable_adapters) for layer in layers]
    try:
        for layer in layers:
            if name == REFERENCE:
                layer._disable_adapters = True
            else:
                layer._active_adapter, layer._disable_adapters = [name], False
        yield
    finally:
        for layer, active, disabled in saved:
            layer._active_adapter, layer._disable_adapters = active, disabled


def _pairs(module: nn.Module, source: str, target: str) -> list[tuple[str, Tensor, Tensor]]:
    reshard(module)
    ours, theirs = adapter_parameters(module, source), adapter_parameters(module, target)
    if set(ours) != set(theirs):
        lonely = sorted(set(ours) ^ set(theirs))
        raise BindError(
            f"adapters {source!r} and {target!r} of {list(adapter_names(module))!r} adapt different modules, e.g. "
            f"{lonely[:3]!r}; add both with the same target_modules."
        )
    for name in ours:
        first, second = ((tuple(p.shape), getattr(p, "placements", None)) for p in (ours[name], theirs[name]))
        if first != second:  # elementwise work on shards is exact only when both are cut alike
            raise BindError(
                f"{name}: {first!r} and {second!r} differ; give both adapters the same rank and shard them alike."
            )
    return [(name, local(ours[name]), local(theirs[name])) for name in ours]
