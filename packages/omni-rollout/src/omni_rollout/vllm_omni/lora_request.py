"""LoRA adapters that never touch a disk: the request carries the tensors, `WorkerAdapters` binds them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from lora_sync import get_map
from torch import Tensor
from vllm_omni.lora.request import LoRARequest

if TYPE_CHECKING:
    from lora_sync import LoRAPayload


class OmniTensorLoRARequest(LoRARequest):
    """A `LoRARequest` (a msgspec struct) that holds its adapter.

    Args:
        lora_name, lora_int_id, lora_path: as in vLLM; the path must be absolute and is never opened.
        peft_config: r and lora_alpha.
        lora_tensors: `<component>.<diffusers module>.lora_A.weight` and `…lora_B.weight`; the pipeline that gets them
            knows what its own modules are called.
        lora_scales: `<component>.<diffusers module>` → factor on B·A where it is not lora_alpha / r.
    """

    peft_config: dict | None = None
    lora_tensors: dict | None = None
    lora_scales: dict | None = None


def make_request(payload: LoRAPayload, lora_int_id: int, name: str) -> OmniTensorLoRARequest:
    """A request around the tensors of a payload, which are not copied."""
    modules = payload.modules
    return OmniTensorLoRARequest(
        lora_name=name,
        lora_int_id=lora_int_id,
        lora_path=f"/in-memory/{name}",
        peft_config={"r": max(map(payload.rank_of, modules)), "lora_alpha": payload.alpha},
        lora_tensors={engine_name(key): tensor for key, tensor in payload.tensors.items()},
        lora_scales={engine_name(module): payload.scale_of(module) for module in modules},
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


class TensorLoRAMixin:
    """Says what an adapter's modules are called in a pipeline of the engine."""

    lora_architecture: str
    """Name of lora_sync's map for this transformer."""

    def engine_tensors(
        self, request: OmniTensorLoRARequest, device: torch.device, dtype: torch.dtype
    ) -> Iterator[tuple[str, Tensor]]:
        """What the engine's layers should hold after binding: (key under this pipeline's module name, tensor).

        Each module's alpha / r is folded into its B, in the dtype it was sent in, so that modules of different rank or
        alpha need no special care. A module that exists under its diffusers name keeps it; lora_sync's map says what the
        others are called here.
        """
        config, scales = request.peft_config or {}, request.lora_scales or {}
        names, modules = get_map(self.lora_architecture), dict(self.named_modules())  # type: ignore[attr-defined]
        for key, sent in (request.lora_tensors or {}).items():
            module, _, part = key.rpartition(".lora_")
            tensor = sent.to(device)
            if part.startswith("B."):
                scale = scales.get(module)
                tensor = tensor * (config["lora_alpha"] / config["r"] if scale is None else scale)
            if module not in modules:
                component, _, inner = module.partition(".")
                module = f"{component}.{names.to_vllm(inner)}"
            yield f"{module}.lora_{part}", tensor.to(dtype)
