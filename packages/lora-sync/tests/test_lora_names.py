"""Name maps against the real modules of every architecture."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lora_sync import LoRAPayload, NameMapError, export, extract_lora, get_map, guess_map, load_any, to_vllm
from lora_sync.maps import MAPS
from lora_sync.names import Place
from lora_sync.payload import A, B

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
            assert names.find(layer) == [Place(layer)]
            flat = names.comfy_key(comfy).removeprefix(names.comfy_prefix).replace(".", "_")
            for back in (names.find(comfy), names.find(flat, flat=True)):
                assert layer in [place.module for place in back]
            assert names.find(layer.replace(".", "_"), flat=True)[0].module == layer


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
    places = flux.find("single_blocks_37_linear1", flat=True)
    assert [place.module.removeprefix("single_transformer_blocks.37.") for place in places] == [
        *("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")
    ]
    assert get_map("wan").to_comfy("blocks.12.attn2.to_out.0")[0] == "blocks.12.cross_attn.o"
    flat = get_map("qwen_image").find("transformer_blocks_59_attn_to_out_0", flat=True)
    assert flat == [Place("transformer_blocks.59.attn.to_out.0")]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_architecture_is_recognised_from_the_layers(name, tools):
    payload = extract_lora(tools.adapted(name), version=1)
    assert guess_map(payload.modules).name == name


@pytest.fixture(scope="module")
def engine() -> dict[str, dict[str, set[str]]]:
    """Linear layers of vLLM-Omni's own classes, recorded by vllm_modules.py."""
    record = json.loads((Path(__file__).parent / "data/vllm_omni_linears.json").read_text())
    try:
        installed = importlib.metadata.version("vllm-omni")
    except importlib.metadata.PackageNotFoundError:
        installed = record["vllm-omni"]
    assert installed == record["vllm-omni"], "vLLM-Omni changed: run tests/vllm_modules.py and check the maps"
    return {k: {kind: set(names) for kind, names in v.items()} for k, v in record["architectures"].items()}


# With every change, the maps are held to the record of the installed version, and test_rollout_vllm_models.py binds every
# architecture's adapter in an engine.
@pytest.mark.nightly
def test_the_engine_holds_what_was_sent_layer_by_layer(engine):
    """The installed vLLM-Omni: its modules are the recorded ones, and its own LoRA manager binds our names, all of them."""
    if importlib.util.find_spec("vllm_omni") is None:
        pytest.skip("needs vLLM-Omni")
    script = Path(__file__).with_name("vllm_modules.py")
    environment = {**os.environ, "OMNI_ROLLOUT_CPU": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert {k: {kind: set(v) for kind, v in x.items()} for k, x in found["architectures"].items()} == engine
    assert set(found["bound"]) == {*ARCHITECTURES, "wan i2v"}
    for name, result in found["bound"].items():
        assert result["engine_layers"] >= len(engine[name]["adaptable"]), name  # one may have two names
        assert result["layers"] >= result["engine_layers"], name
        assert result["apart"] == 0.0, name


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_vllm_names_are_layers_of_the_engine(name, tools, engine):
    names = get_map(name)
    cases = [(tools.base(name), engine[name])] + ([(i2v(), engine["wan i2v"])] if name == "wan" else [])
    for module, layers in cases:
        reached: set[str] = set()
        for layer in linears(module):
            if layer in WITHOUT_RULE.get(name, ()) or later_block(layer):
                continue
            if layer in layers["plain"]:
                with pytest.raises(NameMapError, match="drop it in silence"):
                    names.vllm_layer(layer)
                continue
            engine_layer, index, count = names.vllm_layer(layer)
            assert engine_layer in layers["adaptable"], layer
            assert (index is None) == (count == 1)
            reached.add(engine_layer)
        assert {layer for layer in layers["adaptable"] if not later_block(layer)} == reached


def later_block(layer: str) -> bool:
    """Whether the name is of block 1, 2, …: the recording is compared block 0 by block 0."""
    found = re.match(r"[a-z_]+\.(\d+)\.", layer)
    return bool(found) and found[1] != "0"


def test_every_adapted_layer_reaches_the_engine_with_its_effect(tools):
    for name in ARCHITECTURES:
        targets = tuple(
            t for t in tools.tiny[name].targets if t not in ("time_proj", "text_embedder.linear_1", "proj_out")
        )
        payload = extract_lora(tools.adapted(name, targets=targets, alpha=6), version=1)
        tensors = to_vllm(payload, name)
        wanted = sum(
            float(
                (payload.scale_of(m) * payload.tensors[m + B].double() @ payload.tensors[m + A].double()).square().sum()
            )
            for m in payload.modules
        )
        found = sum(
            float((tensors[k].double() @ tensors[k.replace("lora_B", "lora_A")].double()).square().sum())
            for k in tensors
            if "lora_B" in k
        )
        assert found == pytest.approx(wanted, rel=1e-6), name
    payload = extract_lora(tools.adapted("flux"), version=1)
    with pytest.raises(NameMapError, match="'proj_out'"):
        to_vllm(payload, "flux")
    layers = {k.rsplit(".lora_", 1)[0] for k in to_vllm(extract_lora(tools.adapted(), version=1), "qwen_image")}
    assert "transformer_blocks.0.attn.to_out" in layers
    assert "transformer_blocks.0.attn.to_q" in layers


def test_lookups_by_any_usual_name():
    for entry in MAPS:
        for alias in (entry.name, entry.transformer_class, *entry.aliases):
            assert get_map(alias) is entry
    with pytest.raises(NameMapError, match="known: qwen_image"):
        get_map("unet")
    with pytest.raises(NameMapError, match="no architecture"):
        guess_map(["mid_block.attentions.0"])


def test_a_name_map_of_ones_own(tmp_path, monkeypatch):
    """By import path: it turns names for the engine, and reads and checks files; "any" keeps the names."""
    (tmp_path / "map_of_a_test.py").write_text(
        "from lora_sync.names import NameMap, Rule\n"
        'rules = (Rule("layers.{i}.q", "blocks.{i}.query"), Rule("out", "head"))\n'
        'MINE = NameMap("mine", "MineTransformer", rules, vllm=((".q", ".q_proj"),))\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    names = get_map("map_of_a_test:MINE")
    assert names.to_vllm("layers.3.q") == "layers.3.q_proj"
    assert names.to_comfy("layers.3.q")[0] == "blocks.3.query"
    tensors = {f"layers.0.q.lora_{x}.weight": torch.ones(2, 2) for x in "AB"}
    payload = LoRAPayload.build(tensors, alphas=2.0, version=1)
    for kind in ("diffusers", "comfy"):  # written, read back and compared under this map
        file = export(payload, kind, tmp_path / kind, architecture="map_of_a_test:MINE")
        assert load_any(file, architecture="map_of_a_test:MINE")[0].modules == ("layers.0.q",)
    with pytest.raises(NameMapError, match="1 of 1 layers are not in qwen_image"):
        load_any(tmp_path / "comfy.safetensors", architecture="qwen_image")
    for wrong in ("map_of_a_test:rules", "map_of_a_test:missing", "no_such_module_of_a_test:MINE"):
        with pytest.raises(NameMapError, match="map_of_a_test|no_such_module"):
            get_map(wrong)
