"""Find the LoRA layers of a module without importing PEFT, and name them in one way.

Wrappers add segments of their own to module names. A layer's neutral name is the one it has in the bare model, such as
`transformer_blocks.0.attn.to_q`; its tensors are `<layer>.lora_A.weight` [r, in] and `<layer>.lora_B.weight` [out, r].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .errors import AdapterError, PayloadError

REFERENCE = "reference"
WRAPPER_SEGMENTS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_PEFT_PREFIX = "base_model.model."


def neutral_name(name: str) -> str:
    """`base_model.model._orig_mod.blocks.0.to_q` → `blocks.0.to_q`."""
    bare = ".".join(part for part in name.split(".") if part not in WRAPPER_SEGMENTS)
    return bare.removeprefix(_PEFT_PREFIX)


def base_name(name: str) -> str:
    """The name of a base parameter in the bare model, without `base_layer`: `blocks.0.to_q.weight`."""
    return ".".join(part for part in neutral_name(name).split(".") if part != "base_layer")


def base_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Base parameters by `base_name`, adapters left out."""
    return {
        base_name(name): parameter
        for name, parameter in module.named_parameters()
        if not any(part.startswith("lora_") for part in name.split("."))
    }


def is_lora_layer(module: nn.Module) -> bool:
    """True for a PEFT LoRA layer: it keeps dictionaries `lora_A`/`lora_B`/`scaling` keyed by adapter name."""
    return isinstance(module._modules.get("lora_A"), nn.ModuleDict) and hasattr(module, "scaling")


def outer_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module, bool]]:
    """(name, module, whether it is a LoRA layer) in the order of `named_modules`, without what lies inside LoRA layers."""
    seen: set[int] = set()
    waiting: list[tuple[str, nn.Module]] = [("", module)]
    while waiting:
        name, child = waiting.pop()
        if id(child) in seen:
            continue
        seen.add(id(child))
        adapted = is_lora_layer(child)
        yield name, child, adapted
        if not adapted:
            dot = name and name + "."
            waiting += [(dot + key, inner) for key, inner in reversed(child._modules.items()) if inner is not None]


def lora_layers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """(neutral name, layer) of every LoRA layer, in module order."""
    for name, child, adapted in outer_modules(module):
        if adapted:
            yield neutral_name(name), child


def adapter_names(module: nn.Module) -> tuple[str, ...]:
    """Names of all adapters found in the module, in order of first appearance."""
    return tuple(dict.fromkeys(name for _, layer in lora_layers(module) for name in layer.lora_A))


def layers_of(module: nn.Module, adapter_name: str) -> dict[str, Any]:
    """Layers that carry the adapter. Raises `AdapterError` when there are none, and for `"reference"`."""
    if adapter_name == REFERENCE:
        raise AdapterError(
            f"{REFERENCE!r} is the state with every adapter off, not an adapter: it has no tensors to read or write. "
            "Use disable_adapter() or use_adapter('reference') to run it."
        )
    found = {name: layer for name, layer in lora_layers(module) if adapter_name in layer.lora_A}
    if not found:
        raise AdapterError(
            f"adapter {adapter_name!r} is not in this {type(module).__name__}, which has "
            f"{list(adapter_names(module))!r}. Add it (before sharding) with model.add_adapter(config, {adapter_name!r})."
        )
    return found


def check_plain_lora(name: str, layer: Any, adapter_name: str) -> None:
    """Refuse the LoRA variants whose effect A and B alone do not describe: a sync that dropped them would lie."""
    problems = []
    if adapter_name in getattr(layer, "lora_variant", {}):
        problems.append(f"variant {type(layer.lora_variant[adapter_name]).__name__}")
    if getattr(layer.lora_B[adapter_name], "bias", None) is not None:
        problems.append("lora_bias=True")
    if len(getattr(layer, "lora_embedding_A", ())):
        problems.append("an embedding LoRA")
    if type(layer).__name__ == "ParamWrapper":
        problems.append("target_parameters")
    if problems:
        raise PayloadError(
            f"layer {name!r} uses {', '.join(problems)}, which A and B do not carry. Train a plain LoRA "
            "(use_dora=False, lora_bias=False, target_modules of Linear or Conv layers)."
        )


def layer_alpha(layer: Any, adapter_name: str) -> float:
    """Alpha such that the layer adds (alpha / r) · B·A. Covers rsLoRA and `set_scale`, which change only `scaling`."""
    rank = int(layer.r[adapter_name])
    alpha, scaling = float(layer.lora_alpha[adapter_name]), float(layer.scaling[adapter_name])
    return alpha if alpha / rank == scaling else scaling * rank


def adapter_parameters(module: nn.Module, adapter_name: str) -> dict[str, nn.Parameter]:
    """Neutral tensor name → the live parameter (a DTensor when sharded)."""
    found: dict[str, nn.Parameter] = {}
    for name, layer in layers_of(module, adapter_name).items():
        check_plain_lora(name, layer, adapter_name)
        found[f"{name}.lora_A.weight"] = layer.lora_A[adapter_name].weight
        found[f"{name}.lora_B.weight"] = layer.lora_B[adapter_name].weight
    return found


def reshard(module: nn.Module) -> None:
    """Bring an FSDP2 module back to its sharded parameters: after a forward the root still has full copies registered."""
    waiting = [module]
    while waiting:
        child = waiting.pop()
        kind: Any = type(child)  # FSDPModule has both, and is not imported for it
        if hasattr(kind, "reshard") and hasattr(kind, "unshard"):
            kind.reshard(child)
        waiting += [inner for inner in child._modules.values() if inner is not None]


def is_sharded(tensor: Tensor) -> bool:
    """True for a DTensor."""
    return hasattr(tensor, "full_tensor") and hasattr(tensor, "placements")


def local(tensor: Tensor) -> Tensor:
    """This rank's own elements: the shard of a DTensor, or the tensor itself; shares memory, no gradient."""
    tensor = tensor.detach()
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def full(tensor: Tensor) -> Tensor:
    """All elements. For a DTensor this is a collective: every rank of its mesh calls it, in the same order."""
    tensor = tensor.detach()
    if not is_sharded(tensor):
        return tensor
    device_type = tensor.device_mesh.device_type  # type: ignore[attr-defined]
    if tensor.device.type != device_type:  # CPU offload: the collective needs the mesh's device
        tensor = tensor.to(device_type)
    return tensor.full_tensor()  # type: ignore[attr-defined]


def local_slices(tensor: Tensor) -> tuple[slice, ...]:
    """Where this rank's shard sits in the full tensor."""
    if not is_sharded(tensor):
        return tuple(slice(0, size) for size in tensor.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)  # type: ignore[attr-defined]
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def copy_into(target: Tensor, source: Tensor) -> None:
    """Write a full tensor into a parameter, this rank's part of it when the parameter is sharded."""
    with torch.no_grad():
        local(target).copy_(source[local_slices(target)] if is_sharded(target) else source)


def exchange(targets: Mapping[str, Tensor], copies: Mapping[str, Tensor]) -> None:
    """Let `copies` and the parameters of those names change places, this rank's elements; storage stays, on whatever devices."""
    with torch.no_grad():
        for name, copy in copies.items():
            ours, theirs = local(targets[name]), local(copy)
            kept = ours.clone()
            ours.copy_(theirs)
            theirs.copy_(kept)
