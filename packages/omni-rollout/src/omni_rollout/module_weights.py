"""The weights of a diffusers module that samples: adapters and full weights, bound and proven, and which of them is on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from lora_sync import (
    LoRAReceipt,
    LoRASyncError,
    WeightBucket,
    WeightLoader,
    WeightReceipt,
    apply_lora,
    extract_lora,
    use_adapter,
)
from lora_sync.checksum import added_sums, module_sum, value_sum
from lora_sync.fingerprint import check_base
from lora_sync.layers import base_name, base_parameters, exchange, layers_of, local, local_slices, reshard
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
        self._folded: dict[str, dict[str, Tensor]] = {}
        self._loader: WeightLoader | None = None

    def using(self, adapter: str) -> AbstractContextManager[Any]:
        """Inside the block this adapter samples. "default" is the base while none was sent.

        Raises `RolloutConfigError` for an adapter that is not here.
        """
        if adapter in self._folded:
            return self._merged(self._folded[adapter])
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

    @contextmanager
    def _merged(self, weights: dict[str, Tensor]) -> Iterator[None]:
        """Sample with these weights in their places, and with no adapter."""
        assert self._adapter_ctx is not None
        with self._adapter_ctx("reference"):
            self._exchange(weights)
            try:
                yield
            finally:
                self._exchange(weights)

    def _exchange(self, weights: dict[str, Tensor]) -> None:
        reshard(self.module)
        exchange(base_parameters(self.module), weights)

    def hold(self, named: Iterable[tuple[str, Tensor]], version: int, adapter: str, *, fold: bool) -> WeightReceipt:
        """Prove that the shared module samples with these weights for `adapter`.

        Args:
            named: all weights of the trainer's policy state, as whole tensors.
            version: of them.
            adapter: which policy state that is.
            fold: they are a LoRA's base with the adapter folded in. The layers that differ by it are kept here and change places
                with the module's own while it samples.

        Raises `SyncError` where the module's checksum is not that of what was given.
        """
        adapted = set(layers_of(self.module, adapter)) if fold else set()
        targets, kept, sums, count = base_parameters(self.module), dict[str, Tensor](), [], 0
        for name, value in named:
            base = base_name(name)
            if base.removesuffix(".weight") in adapted and base.endswith(".weight"):
                kept[base] = value[local_slices(targets[base])].to(local(targets[base]).device, copy=True)
            sums.append(value_sum([value]))
            count += 1
        if fold:
            self._folded[adapter] = kept
        with self.using(adapter):
            held = module_sum(self.module)
        sent = added_sums(sums)
        if (held, count) != (sent, len(targets)):
            raise SyncError(
                f"The shared module's weights for {adapter!r} are {len(targets)} tensors of sum {held}, the trainer's {count} of "
                f"sum {sent}: this backend does not hold what was sent. Hand it the trainer's own module."
            )
        return WeightReceipt(version, count, held)

    def take(self, bucket: WeightBucket) -> WeightReceipt | None:
        """The next message of a stream of all weights, with or without LoRA layers around them; a receipt after the last.

        Raises `SyncError` unless every weight was sent exactly once and found its place.
        """
        if bucket.index == 0 or self._loader is None:
            self._loader = WeightLoader(self.module)
        try:
            return self._loader.take(bucket)
        except LoRASyncError as error:
            raise SyncError(f"full weights, version {bucket.version}: {error}") from error
