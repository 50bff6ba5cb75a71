"""Every format × architecture: what stock diffusers (and PEFT) load gives the same tensors and the same picture."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from lora_sync import ExportError, PayloadError, export, extract_lora, get_map, guess_map, load_any, to_vllm
from lora_sync.comfy import folded, to_comfy
from lora_sync.payload import LoRAPayload
from peft import LoraConfig, PeftModel, inject_adapter_in_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file

ARCHITECTURES = ("qwen_image", "sd3", "z_image", "wan", "flux")


def load_stock(tiny, base, path):
    """A stock pipeline with the file loaded, and what its transformer now holds."""
    pipe = tiny.pipeline(base)
    pipe.set_progress_bar_config(disable=True)
    pipe.load_lora_weights(str(path))
    (name,) = base.peft_config
    return pipe, extract_lora(base, name, version=0)


def assert_same_picture(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal weights paint equal pictures up to the last bit of a matrix product, whose order depends on memory alignment."""
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-6)


def effect(payload: LoRAPayload) -> dict[str, torch.Tensor]:
    return {
        name: payload.scale_of(name)
        * (payload.tensors[name + ".lora_B.weight"].double() @ payload.tensors[name + ".lora_A.weight"].double())
        for name in payload.modules
    }


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_stock_diffusers_loads_our_files_and_paints_the_same_picture(name, tools, tmp_path):
    tiny = tools.tiny[name]
    ours = tools.adapted(name, alpha=6)  # alpha / r = 1.5: a lost or doubled scale shows
    payload = extract_lora(ours, version=7)
    pipe = tiny.pipeline(ours)
    pipe.set_progress_bar_config(disable=True)
    picture = tiny.picture(pipe)
    ours.disable_adapters()
    assert (tiny.picture(pipe) - picture).abs().max() > 1e-3  # the adapter is visible at all

    export(payload, "diffusers", tmp_path / "d", architecture=name)
    pipe, loaded = load_stock(tiny, tools.base(name), tmp_path / "d")
    assert set(loaded.tensors) == set(payload.tensors)
    assert loaded.hash == payload.hash  # names, shapes, bytes and alphas
    assert_same_picture(tiny.picture(pipe), picture)

    export(payload, "peft", tmp_path / "p", architecture=name)
    wrapped = PeftModel.from_pretrained(tools.base(name), tmp_path / "p")
    assert extract_lora(wrapped, version=0).hash == payload.hash
    pipe.transformer = wrapped.base_model.model
    assert_same_picture(tiny.picture(pipe), picture)


@pytest.mark.parametrize("name", [n for n in ARCHITECTURES if get_map(n).comfy_loader])
def test_stock_diffusers_reads_our_comfy_files(name, tools, tmp_path):
    tiny = tools.tiny[name]
    targets = tiny.targets
    if name == "flux":  # diffusers splits single blocks at FLUX's own width only; see the next two tests
        targets = tuple("transformer_blocks.0.attn." + t for t in ("to_q", "to_k", "to_v", "to_out.0", "add_k_proj"))
    ours = tools.adapted(name, targets=targets, alpha=6)
    payload = extract_lora(ours, version=7)
    pipe = tiny.pipeline(ours)
    pipe.set_progress_bar_config(disable=True)
    picture = tiny.picture(pipe)

    file = export(payload, "comfy", tmp_path / "c", architecture=name)
    pipe, loaded = load_stock(tiny, tools.base(name), file)
    wanted, found = effect(payload), effect(loaded)
    assert set(wanted) <= set(found)
    for key in found:  # diffusers spreads alpha over A and B in its own way, so compare the products
        torch.testing.assert_close(found[key], wanted.get(key, torch.zeros_like(found[key])), rtol=1e-6, atol=1e-8)
    assert_same_picture(tiny.picture(pipe), picture)

    again, format = load_any(file)
    assert format == "comfy"
    assert again.hash == folded(payload, name).hash
    assert again.version == 7


def keep_only(payload: LoRAPayload, prefix: str) -> LoRAPayload:
    tensors = {k: v for k, v in payload.tensors.items() if k.startswith(prefix)}
    modules = {k.rsplit(".lora_", 1)[0] for k in tensors}
    return LoRAPayload.build(tensors, alphas={m: payload.alpha_of(m) for m in modules}, version=payload.version)


def test_flux_single_blocks_at_real_width_split_as_diffusers_splits_them(tmp_path):
    """linear1 fuses q, k, v and the MLP's first layer with rows 3072, 3072, 3072, 12288."""
    from diffusers import FluxPipeline

    generator = torch.Generator().manual_seed(0)
    rows = {"attn.to_q": 3072, "attn.to_k": 3072, "attn.to_v": 3072, "proj_mlp": 12288}
    tensors = {}
    for layer, out in rows.items():
        for block in (0, 37):
            key = f"single_transformer_blocks.{block}.{layer}"
            tensors[key + ".lora_A.weight"] = torch.randn(2, 3072, generator=generator)
            tensors[key + ".lora_B.weight"] = torch.randn(out, 2, generator=generator)
    payload = LoRAPayload.build(tensors, alphas=2.0, version=1)
    file = export(payload, "comfy", tmp_path / "flux.safetensors", architecture="flux")
    assert "lora_unet_single_blocks_37_linear1.lora_down.weight" in load_file(file)
    stock = FluxPipeline.lora_state_dict(str(file))
    assert set(stock) == {"transformer." + key for key in tensors}
    for key, tensor in tensors.items():  # alpha = r: diffusers' alpha / r is one
        assert torch.equal(stock["transformer." + key], tensor)
    assert load_any(file)[0].hash == payload.hash


def test_flux_single_blocks_at_real_width_paint_the_same_picture(tools, tmp_path):
    """A single-block FLUX as wide as the real one: 140 M parameters, filled from a small random pattern."""
    from diffusers import FluxTransformer2DModel

    with torch.device("meta"):
        base = FluxTransformer2DModel(
            in_channels=16, num_layers=0, num_single_layers=1, joint_attention_dim=32, pooled_projection_dim=16
        )
    base = base.to_empty(device="cpu").eval()
    pattern = torch.randn(1 << 16, generator=torch.Generator().manual_seed(1)) * 0.02
    for parameter in base.parameters():
        flat = parameter.data.view(-1)
        flat.copy_(pattern.repeat(flat.numel() // pattern.numel() + 1)[: flat.numel()])
    config = LoraConfig(r=2, lora_alpha=3, target_modules=["to_q", "to_k", "to_v", "proj_mlp", "norm.linear"])
    base.add_adapter(config)
    tools.randomise(base)
    payload = extract_lora(base, version=1)
    pipe = tools.tiny["flux"].pipeline(base)
    pipe.set_progress_bar_config(disable=True)
    picture = tools.tiny["flux"].picture(pipe)
    base.delete_adapters("default")
    without = tools.tiny["flux"].picture(pipe)
    file = export(payload, "comfy", tmp_path / "flux", architecture="flux")
    pipe.load_lora_weights(str(file))
    again = tools.tiny["flux"].picture(pipe)
    assert (picture - without).abs().max() > 0.05
    torch.testing.assert_close(again, picture, rtol=0, atol=1e-5)


def test_sd3_comfy_keys_are_those_of_the_original_model(tools, tmp_path):
    """diffusers has no SD3 conversion, so the writer is held to the names of the original MMDiT."""
    payload = extract_lora(tools.adapted("sd3"), version=1)
    keys = set(load_file(export(payload, "comfy", tmp_path / "sd3", architecture="sd3")))
    layers = {
        *("joint_blocks.0.x_block.attn.qkv", "joint_blocks.0.x_block.attn.proj"),
        *("joint_blocks.0.x_block.attn2.qkv", "joint_blocks.0.x_block.attn2.proj"),
        *("joint_blocks.0.x_block.mlp.fc1", "joint_blocks.0.x_block.mlp.fc2"),
        *("joint_blocks.0.context_block.attn.qkv", "joint_blocks.0.context_block.attn.proj"),
        *("joint_blocks.0.context_block.mlp.fc1", "joint_blocks.0.context_block.mlp.fc2"),
        *("joint_blocks.1.x_block.attn.qkv", "joint_blocks.1.x_block.attn.proj"),
        *("joint_blocks.1.x_block.mlp.fc1", "joint_blocks.1.x_block.mlp.fc2"),
        "joint_blocks.1.context_block.attn.qkv",  # the last block's context ends here
    }
    suffixes = (".lora_down.weight", ".lora_up.weight", ".alpha")
    assert keys == {f"diffusion_model.{layer}{suffix}" for layer in layers for suffix in suffixes}
    assert load_any(tmp_path / "sd3.safetensors")[0].hash == payload.hash


def test_fused_layers_give_the_same_product_as_their_slices(tools):
    payload = extract_lora(tools.adapted("sd3", alpha=6), version=1)
    comfy = to_comfy(payload, "sd3")
    key = "diffusion_model.joint_blocks.0.x_block.attn.qkv"
    down, up, alpha = (comfy[key + s].double() for s in (".lora_down.weight", ".lora_up.weight", ".alpha"))
    fused = float(alpha) / down.shape[0] * (up @ down)
    parts = effect(payload)
    wanted = torch.cat([parts[f"transformer_blocks.0.attn.to_{x}"] for x in "qkv"])
    torch.testing.assert_close(fused, wanted, rtol=1e-12, atol=1e-14)


def test_a_lora_trained_on_the_fused_layer_is_split_by_rows(tmp_path):
    generator = torch.Generator().manual_seed(0)
    key = "diffusion_model.layers.0.attention.qkv"
    down, up = torch.randn(6, 64, generator=generator), torch.randn(3 * 64, 6, generator=generator)
    save_file(
        {key + ".lora_down.weight": down, key + ".lora_up.weight": up, key + ".alpha": torch.tensor(3.0)},
        tmp_path / "z.safetensors",
    )
    payload, format = load_any(tmp_path / "z.safetensors")
    assert (format, payload.modules[0]) == ("comfy", "layers.0.attention.to_k")
    wanted = 0.5 * (up.double() @ down.double())
    found = torch.cat([effect(payload)[f"layers.0.attention.to_{x}"] for x in "qkv"])
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)


def test_two_experts_are_written_and_loaded_one_by_one(tools, tmp_path):
    """Wan2.2: one adapter over both transformers in training, two LoRAs everywhere else."""
    tiny = tools.tiny["wan"]

    def pipeline(experts):
        pipe = tiny.pipeline(experts.transformer)
        pipe.register_modules(transformer_2=experts.transformer_2)
        pipe.register_to_config(boundary_ratio=0.9)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def pair():
        module = torch.nn.Module()
        module.transformer, module.transformer_2 = tools.base("wan", 0), tools.base("wan", 1)
        return module.eval()

    ours = pair()
    inject_adapter_in_model(LoraConfig(r=4, lora_alpha=6, target_modules=["to_q", "to_out.0", "ffn.net.2"]), ours)
    tools.randomise(ours)
    payload = extract_lora(ours, version=3)
    picture = tiny.picture(pipeline(ours))
    for _ in range(2):  # the second time over what is there, as a run that went on does
        export(payload, "diffusers", tmp_path / "d", architecture="wan")
        assert load_any(tmp_path / "d")[0].hash == payload.hash
    theirs = pair()
    pipe = pipeline(theirs)
    for steps, same in ((0, False), (1, False), (2, True)):
        if steps == 1:
            pipe.load_lora_weights(str(tmp_path / "d"))
        if steps == 2:
            pipe.load_lora_weights(str(tmp_path / "d" / "transformer_2"), load_into_transformer_2=True)
        assert ((tiny.picture(pipe) - picture).abs().max() < 2e-6) == same
    file = export(payload, "comfy", tmp_path / "c.safetensors", architecture="wan")
    assert {f.name for f in tmp_path.glob("c*")} == {"c.high_noise.safetensors", "c.low_noise.safetensors"}
    assert file.name == "c.high_noise.safetensors"
    keys = set(to_vllm(payload, "wan"))
    assert "transformer_2.blocks.1.ffn.net_2.lora_A.weight" in keys
    assert len(keys) == len(payload.tensors)
    assert guess_map(payload.modules).name == "wan"
    export(payload, "peft", tmp_path / "p")
    assert load_any(tmp_path / "p")[0].hash == payload.hash


def test_layers_that_stock_diffusers_drops_are_marked(tmp_path):
    """FLUX's embedders in a ComfyUI file: when this fails, diffusers learned to read them, and `stock` can go."""
    from diffusers import FluxPipeline

    for rule in get_map("flux").rules:
        if rule.stock or "modulation" in rule.comfy:
            continue
        name = rule.neutral
        tensors = {name + ".lora_A.weight": torch.ones(1, 8), name + ".lora_B.weight": torch.ones(8, 1)}
        file = export(LoRAPayload.build(tensors, alphas=1.0, version=1), "comfy", tmp_path / "x", architecture="flux")
        assert not any(key.startswith("transformer.") for key in FluxPipeline.lora_state_dict(str(file))), name
        assert load_any(file)[0].modules == (name,)


def test_unequal_ranks_and_alphas_survive(tools, tmp_path):
    ours = tools.adapted(
        rank_pattern={"img_mlp.net.2": 2, "transformer_blocks.1.attn.to_q": 3}, alpha_pattern={"txt_mlp.net.2": 5}
    )
    payload = extract_lora(ours, version=2)
    assert payload.rank_of("transformer_blocks.0.img_mlp.net.2") == 2
    assert payload.alpha_of("transformer_blocks.3.txt_mlp.net.2") == 5
    export(payload, "diffusers", tmp_path / "d")
    _, loaded = load_stock(tools.tiny["qwen_image"], tools.base(), tmp_path / "d")
    assert loaded.hash == payload.hash
    export(payload, "peft", tmp_path / "p")
    assert extract_lora(PeftModel.from_pretrained(tools.base(), tmp_path / "p"), version=0).hash == payload.hash
    assert load_any(export(payload, "comfy", tmp_path / "c"))[0].hash == payload.hash


def test_rslora_scale_is_kept(tools, tmp_path):
    payload = extract_lora(tools.adapted(use_rslora=True), version=1)
    assert payload.scale_of(payload.modules[0]) == pytest.approx(8 / 4**0.5)
    export(payload, "diffusers", tmp_path / "d")
    assert load_stock(tools.tiny["qwen_image"], tools.base(), tmp_path / "d")[1].hash == payload.hash


def test_a_layer_named_like_the_end_of_another_is_not_adapted_by_accident(tools, tmp_path):
    """FLUX has `proj_out` at the top and in every single block."""
    ours = tools.adapted("flux", targets=("single_transformer_blocks.0.proj_out",))
    payload = extract_lora(ours, version=1)
    assert payload.modules == ("single_transformer_blocks.0.proj_out",)
    only_top = LoRAPayload.build(
        {"proj_out.lora_A.weight": torch.ones(2, 32), "proj_out.lora_B.weight": torch.ones(16, 2)},
        alphas=2.0,
        version=1,
    )
    export(only_top, "diffusers", tmp_path / "d")
    _, loaded = load_stock(tools.tiny["flux"], tools.base("flux"), tmp_path / "d")
    assert loaded.modules == ("proj_out",)


def test_bfloat16_stays_bfloat16(tools, tmp_path):
    payload = extract_lora(tools.adapted(dtype=torch.bfloat16), version=1)
    for format in ("diffusers", "peft", "comfy"):
        file = export(payload, format, tmp_path / format)
        with safe_open(file, "pt") as opened:
            key = next(k for k in opened.keys() if k.endswith("weight"))
            assert opened.get_tensor(key).dtype == torch.bfloat16


def test_a_file_that_reads_back_different_is_an_error(tools, tmp_path, monkeypatch):
    payload = extract_lora(tools.adapted(), version=1)
    other = LoRAPayload.build(
        {**payload.tensors, payload.modules[0] + ".lora_A.weight": torch.zeros(4, 128)}, alphas=8.0, version=1
    )
    monkeypatch.setattr(sys.modules["lora_sync.export"], "load_any", lambda *a, **k: (other, "diffusers"))
    with pytest.raises(ExportError, match="reads back different"):
        export(payload, "diffusers", tmp_path / "d")
    fewer = keep_only(payload, "transformer_blocks.0")
    monkeypatch.setattr(sys.modules["lora_sync.export"], "load_any", lambda *a, **k: (fewer, "diffusers"))
    with pytest.raises(ExportError, match="lost"):
        export(payload, "diffusers", tmp_path / "d")
    rescaled = LoRAPayload.build(payload.tensors, alphas=4.0, version=1)
    monkeypatch.setattr(sys.modules["lora_sync.export"], "load_any", lambda *a, **k: (rescaled, "diffusers"))
    with pytest.raises(ExportError, match="alpha"):
        export(payload, "diffusers", tmp_path / "d")


def test_foreign_files_are_read_or_refused_whole(tools, tmp_path):
    payload = extract_lora(tools.adapted(alpha=4), version=3)
    bare = {"transformer." + key: tensor for key, tensor in payload.tensors.items()}
    save_file(bare, tmp_path / "a.safetensors")  # no metadata: alpha = rank by convention
    with pytest.warns(UserWarning, match="guess"):
        loaded, format = load_any(tmp_path / "a.safetensors")
    assert (format, loaded.version, loaded.hash) == ("diffusers", 0, payload.hash)
    save_file({**bare, "transformer.x.lora_A.weight.oops": torch.ones(1)}, tmp_path / "b.safetensors")
    with pytest.raises(ValueError, match="no LoRA tensor"):
        load_any(tmp_path / "b.safetensors")
    save_file({"diffusion_model.nothing.lora_down.weight": torch.ones(1, 1)}, tmp_path / "c.safetensors")
    with pytest.raises(ValueError, match=r"no architecture|only"):
        load_any(tmp_path / "c.safetensors")
    (tmp_path / "empty").mkdir()
    with pytest.raises(PayloadError, match="0 safetensors files"):
        load_any(tmp_path / "empty")
    with pytest.raises(ExportError, match="choose one of"):
        export(payload, "pickle", tmp_path / "x")


def test_peft_config_is_what_vllm_reads(tools, tmp_path):
    payload = extract_lora(tools.adapted(alpha=8), version=1)
    export(payload, "peft", tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 8, "LORA")
    assert isinstance(config["lora_alpha"], int)
    assert sorted(config["target_modules"]) == sorted(tools.qwen_targets)
