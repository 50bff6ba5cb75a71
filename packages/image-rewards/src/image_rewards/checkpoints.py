"""Names of weights in older releases, translated to transformers' names. Pure functions on tables of tensors.

open_clip  -> transformers.CLIPModel             (HPS v2, and any CLIP trained with open_clip)
BLIP       -> BlipVisionModel and BlipTextModel  (ImageReward)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_CLIP_BLOCK = [
    ("attn.out_proj.", "self_attn.out_proj."),
    ("ln_1.", "layer_norm1."),
    ("ln_2.", "layer_norm2."),
    ("mlp.c_fc.", "mlp.fc1."),
    ("mlp.c_proj.", "mlp.fc2."),
]
_CLIP_SINGLE = {
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.ln_pre.weight": "vision_model.pre_layrnorm.weight",
    "visual.ln_pre.bias": "vision_model.pre_layrnorm.bias",
    "visual.ln_post.weight": "vision_model.post_layernorm.weight",
    "visual.ln_post.bias": "vision_model.post_layernorm.bias",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "ln_final.weight": "text_model.final_layer_norm.weight",
    "ln_final.bias": "text_model.final_layer_norm.bias",
    "logit_scale": "logit_scale",
}
_CLIP_TRANSPOSED = {"visual.proj": "visual_projection.weight", "text_projection": "text_projection.weight"}


def clip_from_open_clip(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """open_clip's names to `CLIPModel`'s. Its fused query-key-value weights are split, its projections transposed."""
    out: dict[str, torch.Tensor] = {}
    for full, tensor in state.items():
        key = full.removeprefix("module.")
        if key == "attn_mask":
            continue
        block = re.fullmatch(r"(visual\.)?transformer\.resblocks\.(\d+)\.(.+)", key)
        if block:
            prefix = f"{'vision' if block[1] else 'text'}_model.encoder.layers.{block[2]}."
            name = block[3]
            if name in ("attn.in_proj_weight", "attn.in_proj_bias"):
                for part, piece in zip("qkv", tensor.chunk(3), strict=True):
                    out[f"{prefix}self_attn.{part}_proj.{name.removeprefix('attn.in_proj_')}"] = piece.clone()
                continue
            for old, new in _CLIP_BLOCK:
                name = name.replace(old, new)
            out[prefix + name] = tensor
        elif key in _CLIP_TRANSPOSED:
            out[_CLIP_TRANSPOSED[key]] = tensor.T.contiguous()
        else:
            out[_CLIP_SINGLE.get(key, key)] = tensor
    return out


_BLIP_VISION = [
    (r"^cls_token$", "embeddings.class_embedding"),
    (r"^pos_embed$", "embeddings.position_embedding"),
    (r"^patch_embed\.proj\.", "embeddings.patch_embedding."),
    (r"^blocks\.", "encoder.layers."),
    (r"\.norm1\.", ".layer_norm1."),
    (r"\.norm2\.", ".layer_norm2."),
    (r"\.attn\.qkv\.", ".self_attn.qkv."),
    (r"\.attn\.proj\.", ".self_attn.projection."),
    (r"^norm\.", "post_layernorm."),
]


def split_image_reward(
    state: Mapping[str, torch.Tensor],
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """ImageReward's table to those of `BlipVisionModel`, `BlipTextModel` (without pooler) and the scoring head.

    What the score does not use (BLIP's projections and its own position ids) is left out.
    """
    vision: dict[str, torch.Tensor] = {}
    text: dict[str, torch.Tensor] = {}
    head: dict[str, torch.Tensor] = {}
    for key, tensor in state.items():
        if key.startswith("blip.visual_encoder."):
            name = key.removeprefix("blip.visual_encoder.")
            for old, new in _BLIP_VISION:
                name = re.sub(old, new, name)
            vision[name] = tensor
        elif key.startswith("blip.text_encoder."):
            name = key.removeprefix("blip.text_encoder.")
            if not name.endswith("position_ids"):
                text[name] = tensor
        elif key.startswith("mlp."):
            head[key.removeprefix("mlp.")] = tensor
    return vision, text, head
