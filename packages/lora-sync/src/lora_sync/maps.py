"""Name maps of the supported architectures, as data.

Neutral names are those of diffusers' transformers. ComfyUI names are those of its own model code, which follows the
original releases; where ComfyUI also accepts diffusers names for an architecture (Qwen-Image, Z-Image), those are
written, because stock diffusers then reads the same file. Checked by tests against the real diffusers modules, and, for
every architecture that it can convert, against diffusers' own loaders.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable

from .errors import NameMapError
from .experts import expert_of
from .names import NameMap, Part, Rule

_QKV = (1, 1, 1)


def _same(*patterns: str) -> tuple[Rule, ...]:
    return tuple(Rule(pattern, pattern) for pattern in patterns)


def _fused(comfy: str, *neutral: str, widths: tuple[int, ...] = _QKV, write: bool = True) -> tuple[Rule, ...]:
    return tuple(Rule(name, comfy, part=Part(index, widths), write=write) for index, name in enumerate(neutral))


_TO_QKV = (".attn.to_qkv", (".attn.to_q", ".attn.to_k", ".attn.to_v"))
_TO_QKV2 = (".attn2.to_qkv", (".attn2.to_q", ".attn2.to_k", ".attn2.to_v"))
_ADD_QKV = (".attn.add_kv_proj", (".attn.add_q_proj", ".attn.add_k_proj", ".attn.add_v_proj"))
_TIME = ("time_text_embed.timestep_embedder.linear_1", "time_text_embed.timestep_embedder.linear_2")

QWEN_IMAGE = NameMap(
    name="qwen_image",
    transformer_class="QwenImageTransformer2DModel",
    aliases=("QwenImagePipeline",),
    rules=_same(
        *(f"transformer_blocks.{{i}}.attn.{x}" for x in ("to_q", "to_k", "to_v", "to_out.0")),
        *(f"transformer_blocks.{{i}}.attn.{x}" for x in ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")),
        *(f"transformer_blocks.{{i}}.{side}_mlp.{x}" for side in ("img", "txt") for x in ("net.0.proj", "net.2")),
        *(f"transformer_blocks.{{i}}.{side}_mod.1" for side in ("img", "txt")),
        *("img_in", "txt_in", *_TIME, "norm_out.linear", "proj_out"),
    ),
    vllm=((".attn.to_out.0", ".attn.to_out"),),
    vllm_packed=(_TO_QKV, _ADD_QKV),
)

Z_IMAGE = NameMap(
    name="z_image",
    transformer_class="ZImageTransformer2DModel",
    aliases=("ZImagePipeline",),
    rules=(
        *_same(
            *(
                f"{part}.{{i}}.{x}"
                for part in ("layers", "noise_refiner", "context_refiner")
                for x in (
                    *(f"attention.{p}" for p in ("to_q", "to_k", "to_v", "to_out.0")),
                    *("feed_forward.w1", "feed_forward.w2", "feed_forward.w3"),
                )
            ),
            *("layers.{i}.adaLN_modulation.0", "noise_refiner.{i}.adaLN_modulation.0"),
            *("all_x_embedder.2-1", "all_final_layer.2-1.linear", "all_final_layer.2-1.adaLN_modulation.1"),
            *("cap_embedder.1", "t_embedder.mlp.0", "t_embedder.mlp.2"),
        ),
        # what tools that train on the original weights write
        *(
            rule
            for part in ("layers", "noise_refiner", "context_refiner")
            for rule in (
                *_fused(
                    f"{part}.{{i}}.attention.qkv",
                    *(f"{part}.{{i}}.attention.{x}" for x in ("to_q", "to_k", "to_v")),
                    write=False,
                ),
                Rule(f"{part}.{{i}}.attention.to_out.0", f"{part}.{{i}}.attention.out", write=False),
            )
        ),
    ),
    vllm_packed=(
        (".attention.to_qkv", (".attention.to_q", ".attention.to_k", ".attention.to_v")),
        (".feed_forward.w13", (".feed_forward.w1", ".feed_forward.w3")),
    ),
)

_WAN_EMBEDDERS = {
    "time_proj": "time_projection.1",
    "time_embedder.linear_1": "time_embedding.0",
    "time_embedder.linear_2": "time_embedding.2",
    "text_embedder.linear_1": "text_embedding.0",
    "text_embedder.linear_2": "text_embedding.2",
    "image_embedder.ff.net.0.proj": "img_emb.proj.1",
    "image_embedder.ff.net.2": "img_emb.proj.3",
}

WAN = NameMap(
    name="wan",
    transformer_class="WanTransformer3DModel",
    aliases=("WanPipeline",),
    rules=(
        *(
            Rule(f"blocks.{{i}}.{ours}.{x}", f"blocks.{{i}}.{theirs}.{y}")
            for ours, theirs in (("attn1", "self_attn"), ("attn2", "cross_attn"))
            for x, y in (("to_q", "q"), ("to_k", "k"), ("to_v", "v"), ("to_out.0", "o"))
        ),
        Rule("blocks.{i}.attn2.add_k_proj", "blocks.{i}.cross_attn.k_img"),
        Rule("blocks.{i}.attn2.add_v_proj", "blocks.{i}.cross_attn.v_img"),
        Rule("blocks.{i}.ffn.net.0.proj", "blocks.{i}.ffn.0"),
        Rule("blocks.{i}.ffn.net.2", "blocks.{i}.ffn.2"),
        # diffusers reads no alpha outside the blocks
        *(Rule(f"condition_embedder.{ours}", theirs, fold_alpha=True) for ours, theirs in _WAN_EMBEDDERS.items()),
        Rule("proj_out", "head.head", fold_alpha=True),
    ),
    vllm=((".to_out.0", ".to_out"), (".ffn.net.0.proj", ".ffn.net_0.proj"), (".ffn.net.2", ".ffn.net_2")),
    vllm_packed=((".attn1.to_qkv", (".attn1.to_q", ".attn1.to_k", ".attn1.to_v")),),
    vllm_frozen=(*(f"condition_embedder.{layer}" for layer in _WAN_EMBEDDERS), "proj_out"),
)

_FLUX_BLOCK, _FLUX_SINGLE = "transformer_blocks.{i}", "single_transformer_blocks.{i}"

_FLUX_TOP = {
    "x_embedder": "img_in",
    "context_embedder": "txt_in",
    _TIME[0]: "time_in.in_layer",
    _TIME[1]: "time_in.out_layer",
    "time_text_embed.text_embedder.linear_1": "vector_in.in_layer",
    "time_text_embed.text_embedder.linear_2": "vector_in.out_layer",
    "time_text_embed.guidance_embedder.linear_1": "guidance_in.in_layer",
    "time_text_embed.guidance_embedder.linear_2": "guidance_in.out_layer",
    "proj_out": "final_layer.linear",
}

FLUX = NameMap(
    name="flux",
    transformer_class="FluxTransformer2DModel",
    aliases=("FluxPipeline",),
    comfy_prefix="lora_unet_",
    rules=(
        *_fused("double_blocks.{i}.img_attn.qkv", *(f"{_FLUX_BLOCK}.attn.to_{x}" for x in "qkv")),
        *_fused("double_blocks.{i}.txt_attn.qkv", *(f"{_FLUX_BLOCK}.attn.add_{x}_proj" for x in "qkv")),
        Rule(f"{_FLUX_BLOCK}.attn.to_out.0", "double_blocks.{i}.img_attn.proj"),
        Rule(f"{_FLUX_BLOCK}.attn.to_add_out", "double_blocks.{i}.txt_attn.proj"),
        Rule(f"{_FLUX_BLOCK}.ff.net.0.proj", "double_blocks.{i}.img_mlp.0"),
        Rule(f"{_FLUX_BLOCK}.ff.net.2", "double_blocks.{i}.img_mlp.2"),
        Rule(f"{_FLUX_BLOCK}.ff_context.net.0.proj", "double_blocks.{i}.txt_mlp.0"),
        Rule(f"{_FLUX_BLOCK}.ff_context.net.2", "double_blocks.{i}.txt_mlp.2"),
        Rule(f"{_FLUX_BLOCK}.norm1.linear", "double_blocks.{i}.img_mod.lin"),
        Rule(f"{_FLUX_BLOCK}.norm1_context.linear", "double_blocks.{i}.txt_mod.lin"),
        *_fused(
            "single_blocks.{i}.linear1",
            *(f"{_FLUX_SINGLE}.attn.to_{x}" for x in "qkv"),
            f"{_FLUX_SINGLE}.proj_mlp",
            widths=(1, 1, 1, 4),
        ),
        Rule(f"{_FLUX_SINGLE}.proj_out", "single_blocks.{i}.linear2"),
        Rule(f"{_FLUX_SINGLE}.norm.linear", "single_blocks.{i}.modulation.lin"),
        # ComfyUI reads these; diffusers 0.40 converts them to keys without the "transformer." prefix and drops them
        *(Rule(ours, theirs, stock=False) for ours, theirs in _FLUX_TOP.items()),
        Rule("norm_out.linear", "final_layer.adaLN_modulation.1", swap_halves=True, stock=False),
        # XLabs (x-flux) names LoRAs after its attention processors; layers as in diffusers' conversion of such files
        *(
            rule
            for i, to_x, out in ((1, "to_{}", "to_out.0"), (2, "add_{}_proj", "to_add_out"))
            for rule in (
                *_fused(
                    f"double_blocks.{{i}}.processor.qkv_lora{i}",
                    *(f"{_FLUX_BLOCK}.attn.{to_x.format(x)}" for x in "qkv"),
                    write=False,
                ),
                Rule(f"{_FLUX_BLOCK}.attn.{out}", f"double_blocks.{{i}}.processor.proj_lora{i}", write=False),
            )
        ),
        *_fused("single_blocks.{i}.processor.qkv_lora", *(f"{_FLUX_SINGLE}.attn.to_{x}" for x in "qkv"), write=False),
        Rule(f"{_FLUX_SINGLE}.proj_out", "single_blocks.{i}.processor.proj_lora", write=False),
    ),
    vllm_packed=(_TO_QKV, _ADD_QKV),
    vllm_packs_by_name=False,
    vllm_frozen=tuple(_FLUX_TOP),
)

_SD3_BLOCK, _SD3_X, _SD3_C = "transformer_blocks.{i}", "joint_blocks.{i}.x_block", "joint_blocks.{i}.context_block"

_SD3_EMBEDDERS = {
    _TIME[0]: "t_embedder.mlp.0",
    _TIME[1]: "t_embedder.mlp.2",
    "time_text_embed.text_embedder.linear_1": "y_embedder.mlp.0",
    "time_text_embed.text_embedder.linear_2": "y_embedder.mlp.2",
}

SD3 = NameMap(
    name="sd3",
    transformer_class="SD3Transformer2DModel",
    aliases=("StableDiffusion3Pipeline",),
    comfy_loader=False,
    # in the last block its halves are swapped, in the others not
    neutral_only=(f"{_SD3_BLOCK}.norm1_context.linear",),
    rules=(
        *_fused(f"{_SD3_X}.attn.qkv", *(f"{_SD3_BLOCK}.attn.to_{x}" for x in "qkv")),
        *_fused(f"{_SD3_X}.attn2.qkv", *(f"{_SD3_BLOCK}.attn2.to_{x}" for x in "qkv")),
        *_fused(f"{_SD3_C}.attn.qkv", *(f"{_SD3_BLOCK}.attn.add_{x}_proj" for x in "qkv")),
        Rule(f"{_SD3_BLOCK}.attn.to_out.0", f"{_SD3_X}.attn.proj"),
        Rule(f"{_SD3_BLOCK}.attn2.to_out.0", f"{_SD3_X}.attn2.proj"),
        Rule(f"{_SD3_BLOCK}.attn.to_add_out", f"{_SD3_C}.attn.proj"),
        Rule(f"{_SD3_BLOCK}.ff.net.0.proj", f"{_SD3_X}.mlp.fc1"),
        Rule(f"{_SD3_BLOCK}.ff.net.2", f"{_SD3_X}.mlp.fc2"),
        Rule(f"{_SD3_BLOCK}.ff_context.net.0.proj", f"{_SD3_C}.mlp.fc1"),
        Rule(f"{_SD3_BLOCK}.ff_context.net.2", f"{_SD3_C}.mlp.fc2"),
        Rule(f"{_SD3_BLOCK}.norm1.linear", f"{_SD3_X}.adaLN_modulation.1"),
        Rule("context_embedder", "context_embedder"),
        *(Rule(ours, theirs) for ours, theirs in _SD3_EMBEDDERS.items()),
        Rule("proj_out", "final_layer.linear"),
        Rule("norm_out.linear", "final_layer.adaLN_modulation.1", swap_halves=True),
    ),
    vllm_packed=(_TO_QKV, _TO_QKV2, _ADD_QKV),
    vllm_frozen=(f"{_SD3_BLOCK}.norm1.linear", *_SD3_EMBEDDERS, "norm_out.linear"),
)

MAPS = (QWEN_IMAGE, FLUX, SD3, Z_IMAGE, WAN)


def get_map(name: str) -> NameMap:
    """Map by short name (`"qwen_image"`), transformer class, pipeline class, or `"module:attribute"` of one's own; raises
    `NameMapError`."""
    if ":" in name:
        try:
            found = pkgutil.resolve_name(name)
        except (ImportError, AttributeError, ValueError) as error:
            raise NameMapError(f"the name map {name!r} cannot be imported: {error}") from error
        if isinstance(found, NameMap):
            return found
        raise NameMapError(f"{name!r} is a {type(found).__name__}; give a lora_sync.NameMap.")
    for entry in MAPS:
        if name in (entry.name, entry.transformer_class, *entry.aliases):
            return entry
    raise NameMapError(f"no name map for {name!r}; known: {', '.join(entry.name for entry in MAPS)}.")


def guess_map(modules: Iterable[str]) -> NameMap:
    """The map whose rules know every given neutral module; raises `NameMapError` for none. Ties go to the first."""
    names = [expert_of(name)[1] for name in modules]
    for entry in MAPS:
        if all(any(rule.matcher.fullmatch(name) for rule in entry.rules) for name in names):
            return entry
    raise NameMapError(f"no architecture has all of these layers: {names[:4]!r}…; name it with architecture=….")
