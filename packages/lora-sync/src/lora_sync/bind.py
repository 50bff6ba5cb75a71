"""Put a payload into a module, whole or not at all, and say what was done.

What can be wrong is found before the first write. The old values are kept until what was written has been read back and proven.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from .checksum import content_hash
from .errors import BindError, CorruptPayloadError, MissingExtraError, StaleVersionError
from .fingerprint import check_base
from .layers import (
    REFERENCE,
    adapter_names,
    adapter_parameters,
    copy_into,
    full,
    is_lora_layer,
    is_sharded,
    layer_alpha,
    layers_of,
    local,
    neutral_name,
    reshard,
)
from .payload import A, B, LoRAPayload
from .receipt import LoRAReceipt

_RECORD = "_lora_sync_applied"


def apply_lora(module: nn.Module, payload: LoRAPayload, adapter_name: str = "default") -> LoRAReceipt:
    """Bind the payload to an adapter of the module; add the adapter when it is not there (needs peft).

    Afterwards the module is read: its hash goes into the receipt, or, where it holds the adapter in another dtype, the
    number of elements that equal the sent ones. The base is compared with the payload's `base_fingerprint` when an adapter is
    bound for the first time. Under FSDP2 every rank calls it with the full payload; the receipt speaks of full tensors.

    Raises `BindError` (names, shapes), `StaleVersionError`, `WrongBaseError`, `CorruptPayloadError`, and `PayloadError` for a
    weight that is NaN; the module is then as it was before.
    """
    if adapter_name == REFERENCE:
        raise BindError(
            f"{REFERENCE!r} is the state with every adapter off and cannot be bound to; choose another name."
        )
    held = applied_version(module, adapter_name)
    # the very same payload again is a harmless retry
    if held is not None and payload.version <= held[0] and (payload.version, payload.hash) != held:
        raise StaleVersionError(
            f"adapter {adapter_name!r} holds version {held[0]} ({held[1]}), version {payload.version} ({payload.hash}) is not "
            "newer. Count versions up, also after a restart of the trainer."
        )
    payload.check_finite(f"version {payload.version}")
    if held is None:
        check_base(module, payload.base_fingerprint)
    added = adapter_name not in adapter_names(module)
    if added:
        _inject(module, payload, adapter_name)
    reshard(module)
    try:
        targets = adapter_parameters(module, adapter_name)
        _check_fit(targets, payload, adapter_name)
        proof = _write(module, targets, payload, adapter_name)
    except BaseException:
        if added:
            _remove(module, adapter_name)
        raise
    module.__dict__.setdefault(_RECORD, {})[adapter_name] = (payload.version, payload.hash)
    bound = adapter_parameters(module, adapter_name)
    return LoRAReceipt(payload.version, proof[0], len(layers_of(module, adapter_name)), len(bound), 0, proof[1])


def applied_version(module: nn.Module, adapter_name: str = "default") -> tuple[int, str] | None:
    """(version, hash) of the last payload bound to this adapter by `apply_lora`, or None."""
    record: dict[str, tuple[int, str]] = module.__dict__.get(_RECORD, {})
    return record.get(adapter_name)


def _check_fit(targets: dict[str, nn.Parameter], payload: LoRAPayload, adapter_name: str) -> None:
    missing, extra = sorted(set(payload.tensors) - set(targets)), sorted(set(targets) - set(payload.tensors))
    if missing or extra:
        raise BindError(
            f"adapter {adapter_name!r}: {len(missing)} of {len(payload.tensors)} sent tensors have no place "
            f"({missing[:2]!r}…), {len(extra)} of {len(targets)} places would keep old values ({extra[:2]!r}…). "
            "Both sides need the same target_modules."
        )
    wrong = [n for n, t in payload.tensors.items() if tuple(t.shape) != tuple(targets[n].shape)]
    if wrong:
        name = wrong[0]
        raise BindError(
            f"adapter {adapter_name!r}: {len(wrong)} tensors have another shape, e.g. {name!r}: sent "
            f"{tuple(payload.tensors[name].shape)}, module has {tuple(targets[name].shape)}. Both sides need the same rank."
        )


def _write(
    module: nn.Module, targets: dict[str, nn.Parameter], payload: LoRAPayload, adapter_name: str
) -> tuple[str | None, int | None]:
    """Copy the payload in and prove it; after any error the old values are back."""
    undo: list[tuple[Tensor, Tensor]] = []
    layers = layers_of(module, adapter_name)
    alphas = {name: (layer.lora_alpha[adapter_name], layer.scaling[adapter_name]) for name, layer in layers.items()}
    try:
        for name, target in targets.items():
            undo.append((local(target), local(target).clone()))
            copy_into(target, payload.tensors[name])
        _set_alphas(layers, adapter_name, {name: (a, a / payload.rank_of(name)) for name, a in payload.alphas.items()})
        return _prove(layers, targets, payload, adapter_name)
    except BaseException:
        with torch.no_grad():
            for live, old in undo:
                live.copy_(old)
        _set_alphas(layers, adapter_name, alphas)
        raise


def _prove(
    layers: dict[str, Any], targets: dict[str, nn.Parameter], payload: LoRAPayload, adapter_name: str
) -> tuple[str | None, int | None]:
    """Read the module: its hash, or, in another dtype, the number of elements that equal the payload's; the other is None.

    A collective for sharded modules. Raises `CorruptPayloadError` when the module does not hold what was sent.
    """
    if any(target.dtype != payload.tensors[name].dtype for name, target in targets.items()):
        payload.check()
        for name, target in targets.items():
            held = full(target)
            if not torch.equal(held, payload.tensors[name].to(held.device, held.dtype)):
                raise CorruptPayloadError(
                    f"version {payload.version}: {name!r} reads back different from what was written."
                )
        return None, payload.numel
    alphas = {name: layer_alpha(layer, adapter_name) for name, layer in layers.items()}
    found = content_hash({name: full(target) for name, target in targets.items()}, alphas)
    if found != payload.hash:
        raise CorruptPayloadError(
            f"version {payload.version}: the module holds {found} after binding, {payload.hash} was promised. The payload "
            "changed after it was made (extract with copy=True), or a tensor was not written."
        )
    return found, None


def _set_alphas(layers: dict[str, Any], adapter_name: str, alphas: dict[str, tuple[Any, Any]]) -> None:
    for name, layer in layers.items():
        layer.lora_alpha[adapter_name], layer.scaling[adapter_name] = alphas[name]


def _inject(module: nn.Module, payload: LoRAPayload, adapter_name: str) -> None:
    """Add an empty adapter of the payload's shape, after checking that every module exists and fits."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise MissingExtraError(
            f"adapter {adapter_name!r} is not in the module and adding it needs peft: pip install './packages/lora-sync[peft]'"
        ) from error
    actual = {neutral_name(name): (name, child) for name, child in module.named_modules()}
    if missing := [name for name in payload.modules if name not in actual]:
        raise BindError(
            f"{len(missing)} of {len(payload.modules)} modules of the payload are not in this {type(module).__name__}: "
            f"{missing[:3]!r}…. It was made for another architecture, or its names need a map (lora_sync.names)."
        )
    for name in payload.modules:
        child = actual[name][1]
        weight = (child.base_layer if is_lora_layer(child) else child).weight
        if is_sharded(weight):
            raise BindError("the module is sharded already; add the adapter before fully_shard, then bind to it.")
        want = payload.tensors[name + B].shape[0], payload.tensors[name + A].shape[1]
        if tuple(weight.shape[:2]) != want:
            raise BindError(f"{name!r}: the payload is for a weight {want}, the module has {tuple(weight.shape)}.")
    config = LoraConfig(
        r=payload.rank,
        lora_alpha=payload.alpha,  # type: ignore[arg-type]  # PEFT takes fractions, its annotation says int
        target_modules="(" + "|".join(re.escape(actual[name][0]) for name in payload.modules) + ")",
        rank_pattern={
            f"^{re.escape(n)}": payload.rank_of(n) for n in payload.modules if payload.rank_of(n) != payload.rank
        },
        alpha_pattern={f"^{re.escape(name)}": alpha for name, alpha in payload.alpha_pattern.items()},
        inference_mode=True,
    )
    first = not adapter_names(module)
    inject_adapter_in_model(config, module, adapter_name=adapter_name)
    if hasattr(module, "_hf_peft_config_loaded"):
        vars(module)["_hf_peft_config_loaded"] = True  # diffusers asks this flag before it touches adapters
    for layer in layers_of(module, adapter_name).values():
        if first:
            layer._active_adapter = [adapter_name]
        for part in (layer.lora_A[adapter_name], layer.lora_B[adapter_name]):
            part.to(payload.tensors[payload.modules[0] + A].dtype)
            part.requires_grad_(False)


def _remove(module: nn.Module, adapter_name: str) -> None:
    for layer in layers_of(module, adapter_name).values():
        layer.delete_adapter(adapter_name)
    getattr(module, "peft_config", {}).pop(adapter_name, None)
