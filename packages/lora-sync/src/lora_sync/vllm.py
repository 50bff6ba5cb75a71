"""An adapter in the form that vLLM-Omni binds: its module names, scale in B, slices as it can find them.

vLLM-Omni 0.30 fuses q, k and v. For most architectures it looks the slices up under their own names; for FLUX it does not, so
there the adapter is fused here. Layers that it builds as plain Linear cannot carry a LoRA: they are an error.
"""

from __future__ import annotations

from torch import Tensor

from .experts import split_experts
from .fuse import Piece, fuse
from .maps import get_map
from .payload import A, B, LoRAPayload


def to_vllm(payload: LoRAPayload, architecture: str) -> dict[str, Tensor]:
    """`<engine layer>.lora_A.weight` / `.lora_B.weight` for every layer, to be applied with scale 1.

    The names are relative to the transformer; vLLM's loader wants `base_model.model.transformer.` in front. Those of
    Wan2.2's experts keep their `transformer.` or `transformer_2.`. Raises `NameMapError` for layers without a rule or
    without a place in the engine.
    """
    names, experts = get_map(architecture), split_experts(payload)
    if "" not in experts:
        return {
            f"{expert}.{key}": tensor
            for expert, part in experts.items()
            for key, tensor in to_vllm(part, architecture).items()
        }
    out: dict[str, Tensor] = {}
    fused: dict[str, tuple[int, dict[int, Piece]]] = {}
    for module in payload.modules:
        layer, index, count = names.vllm_layer(module)
        scale = payload.scale_of(module)
        down, up = payload.tensors[module + A], payload.tensors[module + B]
        up = up if scale == 1.0 else up * scale
        if index is None or names.vllm_packs_by_name:
            name = names.to_vllm(module)
            out[name + A], out[name + B] = down, up
        else:
            fused.setdefault(layer, (count, {}))[1][index] = Piece(down, up, float(down.shape[0]))
    for layer, (count, pieces) in fused.items():
        whole = fuse(layer, (1,) * count, pieces)
        out[layer + A], out[layer + B] = whole.down, whole.up
    return out
