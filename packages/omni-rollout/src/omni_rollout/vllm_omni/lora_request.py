"""LoRA adapters that never touch a disk: the request carries the tensors, `WorkerAdapters` binds them."""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import TYPE_CHECKING

import torch
from lora_sync import get_map
from lora_sync.one_copy import LentLoRA
from torch import Tensor
from vllm_omni.lora.request import LoRARequest

if TYPE_CHECKING:
    from lora_sync import LoRAPayload


class OmniTensorLoRARequest(LoRARequest):
    """A `LoRARequest` (a msgspec struct) that holds its adapter.

    Args:
        lora_name, lora_int_id, lora_path: as in vLLM; the path must be absolute and is never opened.
        peft_config: r and lora_alpha.
        lora_tensors: `<component>.<diffusers module>.lora_A.weight` and `…lora_B.weight`.
        lora_scales: `<component>.<diffusers module>` → factor on B·A where it is not lora_alpha / r.
        lent: name of an adapter that the worker has borrowed, whose tensors stand in for `lora_tensors`.
        lora_names: which map of lora_sync says what the modules are called in the engine; "any": as they are.
    """

    peft_config: dict | None = None
    lora_tensors: dict | None = None
    lora_scales: dict | None = None
    lora_names: str = "any"
    lent: str | None = None


def make_request(payload: LoRAPayload | LentLoRA, lora_int_id: int, name: str, names: str) -> OmniTensorLoRARequest:
    """A request around the tensors of a payload, which are not copied; `names` becomes its `lora_names`."""
    if isinstance(payload, LentLoRA):
        return OmniTensorLoRARequest(
            lora_name=name,
            lora_int_id=lora_int_id,
            lora_path=f"/in-memory/{name}",
            peft_config={"r": payload.rank, "lora_alpha": payload.rank},
            lora_scales={engine_name(module): scale for module, scale in payload.scales.items()},
            lora_names=names,
            lent=payload.name,
        )
    modules = payload.modules
    return OmniTensorLoRARequest(
        lora_name=name,
        lora_int_id=lora_int_id,
        lora_path=f"/in-memory/{name}",
        peft_config={"r": max(map(payload.rank_of, modules)), "lora_alpha": payload.alpha},
        lora_tensors={engine_name(key): tensor for key, tensor in payload.tensors.items()},
        lora_scales={engine_name(module): payload.scale_of(module) for module in modules},
        lora_names=names,
    )


def engine_name(name: str) -> str:
    """A trainer's name below the engine's component: Wan's experts say which they are, all others are `transformer`."""
    return name if name.startswith(("transformer.", "transformer_2.")) else f"transformer.{name}"


def checked_config(config: dict) -> dict:
    """A PEFT config whose every module adds lora_alpha / r · B·A; one that means anything else raises `ValueError`."""
    if missing := {"r", "lora_alpha"} - set(config):
        raise ValueError(f"peft_config needs {sorted(missing)}.")
    known = ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "lora_bias")
    if unknown := [key for key in known if config.get(key)]:
        raise ValueError(f"peft_config has {unknown}: send a LoRAPayload, which carries a scale for every module.")
    return config


def engine_tensors(
    request: OmniTensorLoRARequest, modules: Container[str], device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """What the engine's layers should hold after binding: (key under the pipeline's module name, tensor).

    Each module's alpha / r is folded into its B, in the dtype it was sent in, so that modules of different rank or
    alpha need no special care. A module that exists under its diffusers name keeps it; the request's map says what the
    others are called in the engine.

    Args:
        request: an adapter.
        modules: names of the pipeline's modules.
        device, dtype: of the result.
    """
    config, scales = request.peft_config or {}, request.lora_scales or {}
    names = None if request.lora_names == "any" else get_map(request.lora_names)
    for key, sent in (request.lora_tensors or {}).items():
        module, _, part = key.rpartition(".lora_")
        tensor = sent.to(device)
        if part.startswith("B."):
            scale = scales.get(module)
            tensor = tensor * (config["lora_alpha"] / config["r"] if scale is None else scale)
        if names is not None and module not in modules:
            component, _, inner = module.partition(".")
            module = f"{component}.{names.to_vllm(inner)}"
        yield f"{module}.lora_{part}", tensor.to(dtype)
