"""The weights of a diffusers module that samples: adapters and full weights, bound and proven, and which of them is on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lora_sync import LoRAReceipt, LoRASyncError, WeightReceipt, apply_lora, extract_lora, load_named, use_adapter
from lora_sync.checksum import module_sum
from lora_sync.fingerprint import check_base
from lora_sync.layers import layers_of
from torch import Tensor, nn

from .errors import RolloutConfigError, SyncError

AdapterContext = Callable[[str], AbstractContextManager[Any]]


class ModuleWeights:
    """A transformer whose weights are a trainer's own, or a copy.

    Args:
        module: the transformer.
        shared: True when a trainer updates this very module; an adapter is then compared, never bound.
        adapter_ctx: the trainer's way to switch adapters; None switches those that were bound here.
    """

    def __init__(self, module: nn.Module, *, shared: bool, adapter_ctx: AdapterContext | None = None) -> None:
        self.module, self.shared = module, shared
        self._adapter_ctx = adapter_ctx
        self._adapters: set[str] = set()
        self._wrapped = False  # LoRA layers stay in the module once they are there
        self._base_checked = False  # of a shared module; `apply_lora` sees to the others

    def using(self, adapter: str) -> AbstractContextManager[Any]:
        """Inside the block this adapter samples. "default" is the base while none was sent.

        Raises `RolloutConfigError` for an adapter that is not here.
        """
        if self._adapter_ctx is not None:
            return self._adapter_ctx(adapter)
        if adapter in self._adapters:
            return use_adapter(self.module, adapter)
        if adapter == "default" or (adapter == "reference" and not self.shared):
            return use_adapter(self.module, "reference") if self._wrapped else nullcontext()
        known = ", ".join(sorted(self._adapters)) or "none"
        raise RolloutConfigError(
            f"adapter={adapter!r} is not here (there is {known}): send it with update_lora, or pass an adapter_ctx to a "
            "backend that shares its weights with a trainer."
        )

    def bind(self, payload: Any, adapter: str) -> LoRAReceipt:
        """Bind a `LoRAPayload`, or prove that the shared module holds it already.

        Raises `SyncError` when the shared module's adapter differs from the payload, and lora_sync's `WrongBaseError` when, at
        the first sync, the base is another one than the trainer's.
        """
        if not self.shared:
            receipt = apply_lora(self.module, payload, adapter)
            self._adapters.add(adapter)
            self._wrapped = True
            return receipt
        if not self._base_checked:
            check_base(self.module, payload.base_fingerprint)
            self._base_checked = True
        held = extract_lora(self.module, adapter, version=payload.version)
        if held.hash != payload.hash:
            raise SyncError(
                f"The shared module's adapter {adapter!r} has hash {held.hash}, the payload {payload.hash}: this "
                "backend does not hold what was sent. Hand it the trainer's own module, or build it with "
                "shares_weights=False."
            )
        count = len(held.tensors)
        return LoRAReceipt(payload.version, held.hash, count // 2, count)

    def has(self, adapter: str) -> bool:
        """Whether the adapter was bound here."""
        return adapter in self._adapters

    def drop(self, adapter: str) -> None:
        """Forget an adapter that was bound here."""
        for layer in layers_of(self.module, adapter).values():
            layer.delete_adapter(adapter)
        getattr(self.module, "peft_config", {}).pop(adapter, None)
        self._adapters.discard(adapter)

    def replace(self, named: Iterable[tuple[str, Tensor]], version: int) -> WeightReceipt:
        """Replace all weights by name, with or without LoRA layers around them; see `lora_sync.load_named`.

        Raises `SyncError` unless every weight was sent exactly once and found its place.
        """
        try:
            return WeightReceipt(version, load_named(self.module, named), module_sum(self.module))
        except LoRASyncError as error:
            raise SyncError(f"full weights, version {version}: {error}") from error
