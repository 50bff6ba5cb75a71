"""Name maps against the real modules of every architecture."""

from __future__ import annotations

import pytest
import torch
from lora_sync import NameMapError, extract_lora, get_map, guess_map
from lora_sync.maps import MAPS

ARCHITECTURES = tuple(entry.name for entry in MAPS)
WITHOUT_RULE = {"sd3": {"transformer_blocks.0.norm1_context.linear", "transformer_blocks.1.norm1_context.linear"}}


def linears(module) -> dict[str, torch.nn.Linear]:
    return {name: child for name, child in module.named_modules() if isinstance(child, torch.nn.Linear)}


def i2v():
    from diffusers import WanTransformer3DModel

    sizes = {"num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 16, "ffn_dim": 64, "text_dim": 32}
    return WanTransformer3DModel(**sizes, image_dim=16, added_kv_proj_dim=32)


def guided_flux():
    from diffusers import FluxTransformer2DModel

    sizes = {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2}
    more = {"joint_attention_dim": 32, "pooled_projection_dim": 16, "axes_dims_rope": (4, 6, 6)}
    return FluxTransformer2DModel(in_channels=16, guidance_embeds=True, **sizes, **more)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_linear_has_a_rule_and_comes_back(name, tools):
    names = get_map(name)
    modules = [tools.base(name)] + ([i2v()] if name == "wan" else []) + ([guided_flux()] if name == "flux" else [])
    for module in modules:
        assert type(module).__name__ == names.transformer_class
        seen: dict[tuple[str, int], str] = {}
        for layer in linears(module):
            if layer in WITHOUT_RULE.get(name, ()):
                with pytest.raises(NameMapError, match="no rule"):
                    names.to_comfy(layer)
                continue
            comfy, part = names.to_comfy(layer)
            slot = (comfy, part.index if part else 0)
            assert seen.setdefault(slot, layer) == layer, "two layers share one place"
            assert names.comfy_of_key(names.comfy_key(comfy)) in (comfy, names.rule(layer)[0].comfy) or names.kohya
            back = names.from_comfy(comfy)
            assert layer in [found for found, _ in back]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_rule_names_a_real_layer(name, tools):
    """No rule is fiction: each neutral pattern matches a Linear of the real class."""
    modules = [tools.base(name)] + ([i2v()] if name == "wan" else []) + ([guided_flux()] if name == "flux" else [])
    layers = [layer for module in modules for layer in linears(module)]
    for rule in get_map(name).rules:
        assert any(rule.matcher.fullmatch(layer) for layer in layers), rule.neutral


@pytest.mark.parametrize("name", ["flux", "sd3"])
def test_fused_widths_are_the_real_ones(name, tools):
    names, layers = get_map(name), linears(tools.base(name))
    fused: dict[str, dict[int, tuple[int, int, tuple[int, ...]]]] = {}
    for layer, child in layers.items():
        if layer not in WITHOUT_RULE.get(name, ()) and (found := names.to_comfy(layer))[1]:
            comfy, part = found
            fused.setdefault(comfy, {})[part.index] = (child.out_features, child.in_features, part.widths)
    assert fused
    for comfy, parts in fused.items():
        widths = parts[0][2]
        assert sorted(parts) == list(range(len(widths))), comfy
        assert len({parts[i][0] / widths[i] for i in parts}) == 1, comfy
        assert len({parts[i][1] for i in parts}) == 1, comfy


def test_block_numbers_survive(tools):
    flux = get_map("flux")
    assert flux.to_comfy("single_transformer_blocks.37.attn.to_k")[0] == "single_blocks.37.linear1"
    assert flux.comfy_key("single_blocks.37.linear1") == "lora_unet_single_blocks_37_linear1"
    assert flux.comfy_of_key("lora_unet_single_blocks_37_linear1") == "single_blocks.37.linear1"
    assert get_map("wan").to_comfy("blocks.12.attn2.to_out.0")[0] == "blocks.12.cross_attn.o"
    assert get_map("qwen_image").comfy_of_key("lora_unet_transformer_blocks_59_attn_to_out_0") == (
        "transformer_blocks.59.attn.to_out.0"
    )


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_architecture_is_recognised_from_the_layers(name, tools):
    payload = extract_lora(tools.adapted(name), version=1)
    assert guess_map(payload.modules).name == name


def test_lookups_by_any_usual_name():
    for entry in MAPS:
        for alias in (entry.name, entry.transformer_class, *entry.aliases):
            assert get_map(alias) is entry
    with pytest.raises(NameMapError, match="known: qwen_image"):
        get_map("unet")
    with pytest.raises(NameMapError, match="no architecture"):
        guess_map(["mid_block.attentions.0"])
