"""LoRA files as people have them: every tool's keys, prefixes and alphas, and what each broken or foreign file is told."""

from __future__ import annotations

import io
import itertools
import json
import warnings
from pathlib import Path

import pytest
import torch
from lora_sync import LoRAPayload, LoRASyncError, PayloadError, apply_lora, export, load_any
from lora_sync.cli import main
from lora_sync.payload import A, B
from lora_sync.settings import pattern_value
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils.other import get_pattern_key
from safetensors.torch import save_file
from torch import nn

RANK, WIDTH = 16, 32
LAYERS = ("transformer_blocks.0.attn.to_q", "transformer_blocks.1.attn.to_out.0", "transformer_blocks.10.img_mlp.net.2")
CONFIG = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": ["to_q", "to_out.0", "net.2"]}


def pair(out: int = WIDTH, rank: int = RANK, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rank, WIDTH, generator=generator), torch.randn(out, rank, generator=generator)


def lora(prefix: str = "transformer.", layers=LAYERS, down: str = A, up: str = B, **extra) -> dict[str, torch.Tensor]:
    tensors = {}
    for seed, layer in enumerate(layers):
        tensors[prefix + layer + down], tensors[prefix + layer + up] = pair(seed=seed)
    return tensors | extra


def write(file: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> Path:
    save_file(tensors, file, metadata)
    return file


def read(file: Path, **options) -> LoRAPayload:
    """Without a warning: those that warn say so in their test."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return load_any(file, **options)[0]


def scales(payload: LoRAPayload) -> set[float]:
    return {payload.scale_of(name) for name in payload.modules}


def refused(capsys, file: Path, *words: str, **options) -> str:
    """load_any raises, and the command line prints the same as one line and exits with 2."""
    with pytest.raises(LoRASyncError) as caught:
        load_any(file, **options)
    assert main(["inspect", str(file)]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert len(err.splitlines()) == 1
    assert str(file) in err or str(file.parent) in err
    for word in words:
        assert word in str(caught.value)
        assert word in err
    return str(caught.value)


# Alpha in the header ------------------------------------------------------------------------------------------------

DIFFUSERS = {f"transformer.{key}": value for key, value in CONFIG.items()}
HEADERS = [
    {"alpha": "8"},
    {"alpha": "8.0", "rank": "16", "format": "pt"},
    {"lora_alpha": "8", "r": "16"},
    {"lora_alpha": "8", "lora_rank": "16"},
    {"network_alpha": "8", "network_dim": "16"},
    {
        "ss_network_alpha": "8.0",
        "ss_network_dim": "16",
        "ss_network_module": "networks.lora",
        "ss_network_args": '{"x": "1"}',
    },
    {"ss_network_alpha": "8", "ss_network_dim": "Dynamic", "modelspec.architecture": "qwen-image/lora"},
    {"lora_adapter_metadata": json.dumps(CONFIG)},
    {"lora_adapter_metadata": json.dumps(DIFFUSERS)},
    {"lora_adapter_metadata": json.dumps({**DIFFUSERS, "text_encoder.lora_alpha": 99, "text_encoder.r": 4})},
    {"lora_adapter_metadata": json.dumps({"transformer": CONFIG})},
    {"lora_config": json.dumps({"r": 16, "lora_alpha": 8, "lora_dropout": 0.0, "bias": "none"})},
    {"peft_config": json.dumps(CONFIG)},
    {"adapter_config": json.dumps({**CONFIG, "lora_alpha": 2, "use_rslora": True})},
    {"ot_config": json.dumps({"lora_rank": 16, "lora_alpha": 8.0, "lora_decompose": False})},
    {"config": json.dumps({"network": {"type": "lora", "linear": 16, "linear_alpha": 8}})},
    {"lora_adapter_metadata": json.dumps({"r": 16, "target_modules": ["to_q"]})},  # PEFT's default alpha is 8
    {"lora_alpha": "2", "r": "16", "use_rslora": "True"},
    {"training_config": json.dumps({"model": {"lora_alpha": 8}, "optimizer": {"alpha": 0.9}})},
    {"peft_config": json.dumps({"default": CONFIG})},
    {"alpha": "8", "notes": "[" * 100_000},  # deeper than JSON can be read
]


@pytest.mark.parametrize("header", HEADERS, ids=lambda header: next(iter(header)))
@pytest.mark.parametrize("prefix", ["transformer.", "base_model.model.", "diffusion_model."])
def test_alpha_in_the_header(header, prefix, tmp_path):
    payload = read(write(tmp_path / "a.safetensors", lora(prefix), header), architecture="qwen_image")
    assert scales(payload) == {0.5}
    assert payload.modules == tuple(sorted(LAYERS))


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({"alpha": "8", "lora_alpha": "16"}, ("'alpha': 8.0", "'lora_alpha': 16.0", "--alpha")),
        ({"alpha": "8", "lora_adapter_metadata": json.dumps({**CONFIG, "lora_alpha": 4})}, ("alpha 8", "alpha 4")),
        ({"lora_alpha": "8", "r": "4"}, ("rank 4", "rank 16")),
        ({"alpha": "nan"}, ("alpha is 'nan'",)),
        ({"alpha": "-8"}, ("alpha is '-8'",)),
        ({"lora_alpha": "inf"}, ("lora_alpha is 'inf'",)),
        ({"alpha": "eight"}, ("alpha is 'eight'", "number")),
        ({"alpha": "8", "use_dora": "true"}, ("DoRA",)),
        ({"lora_adapter_metadata": json.dumps({**DIFFUSERS, "transformer.use_dora": True})}, ("DoRA",)),
    ],
)
def test_a_header_that_is_no_answer_is_refused(header, words, tmp_path, capsys):
    refused(capsys, write(tmp_path / "a.safetensors", lora(), header), *words)


@pytest.mark.parametrize("prefix", ["transformer.", "base_model.model.", "diffusion_model."])
@pytest.mark.parametrize("header", [None, {"format": "pt", "alpha": "None"}])
def test_unknown_alpha_is_said_or_refused(prefix, header, tmp_path, capsys):
    file = write(tmp_path / "adapter_model.safetensors", lora(prefix), header)
    with pytest.warns(UserWarning, match=r"alpha = rank \(scale 1\) is a guess.*alpha=….*lora_alpha in adapter_config"):
        payload, _ = load_any(file)
    assert scales(payload) == {1.0}
    with pytest.raises(PayloadError, match="strict"):
        load_any(file, strict=True)
    assert scales(read(file, alpha=8)) == {0.5}
    assert main(["inspect", str(file)]) == 0
    assert capsys.readouterr().err.startswith("lora_sync: warning: ")
    assert main(["inspect", "--strict", str(file)]) == 2
    capsys.readouterr()
    assert main(["convert", str(file), str(tmp_path / "out"), "--to", "diffusers", "--alpha", "8"]) == 0
    assert capsys.readouterr().err == ""
    assert scales(read(tmp_path / "out", strict=True)) == {0.5}


def test_an_exported_peft_file_keeps_its_alpha_without_its_config(tmp_path):
    tensors = {layer + side: t for layer in LAYERS for side, t in zip((A, B), pair(), strict=True)}
    payload = LoRAPayload.build(tensors, alphas={LAYERS[0]: 3, LAYERS[1]: 8, LAYERS[2]: 8}, version=3)
    file = export(payload, "peft", tmp_path)
    (tmp_path / "adapter_config.json").unlink()
    assert read(file).hash == payload.hash


# PEFT's adapter_config.json -----------------------------------------------------------------------------------------


def folder(path: Path, config: object, tensors=None) -> Path:
    write(path / "adapter_model.safetensors", lora("base_model.model.") if tensors is None else tensors)
    text = config if isinstance(config, bytes) else json.dumps(config).encode()
    (path / "adapter_config.json").write_bytes(text)
    return path


class Net(nn.Module):
    """Qwen-Image's names with small layers."""

    def __init__(self):
        super().__init__()
        for layer in LAYERS:
            parent: nn.Module = self
            *parts, last = layer.split(".")
            for part in parts:
                if part not in parent._modules:
                    parent.add_module(part, nn.Module())
                parent = parent._modules[part]
            parent.add_module(last, nn.Linear(WIDTH, WIDTH))


PATTERNS = [
    {r"transformer_blocks\.0\.attn\.to_q": 64},
    {r"transformer_blocks\.\d\.attn\.to_q": 64, "net.2": 2},
    {r"^transformer_blocks\.0\..*": 4},
    {r".*\.to_(q|out\.0)": 4},
    {"to_q": 4, "attn.to_q": 32},
    {"attn.to_q": 32, "to_q": 4},
    {"q": 4, "o_q": 4},
    {r"transformer_blocks.1.*": 4},
    {r"^attn\.to_q": 4},
    {r"(?:to_q|net\.2)": 4},
    {"transformer_blocks.1": 4},
]


@pytest.mark.parametrize("alphas", PATTERNS, ids=str)
@pytest.mark.parametrize("rslora", [False, True])
def test_patterns_are_resolved_as_peft_resolves_them(alphas, rslora, tmp_path):
    """Held against PEFT itself: the model that it builds from the same folder, and its own look-up."""
    config = {"r": RANK, "lora_alpha": 8, "target_modules": ["to_q", "to_out.0", "net.2"], "use_rslora": rslora}
    ranks = {pattern: 4 + n for n, pattern in enumerate(alphas)}
    model = get_peft_model(
        Net(), LoraConfig(**config, alpha_pattern=alphas, rank_pattern=ranks, init_lora_weights=False)
    )
    model.save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"  # PEFT sorts the patterns when it saves, and the first that fits counts
    file.write_text(json.dumps({**json.loads(file.read_text()), "alpha_pattern": alphas, "rank_pattern": ranks}))
    payload = read(tmp_path)
    loaded = PeftModel.from_pretrained(Net(), tmp_path).base_model.model
    for name in LAYERS:
        layer = loaded.get_submodule(name)
        assert payload.scale_of(name) == pytest.approx(layer.scaling["default"], rel=1e-12)
        assert payload.rank_of(name) == layer.r["default"]
        assert pattern_value(alphas, [name], -1) == alphas.get(get_pattern_key(alphas.keys(), name), -1)


@pytest.mark.parametrize(
    ("change", "scale"),
    [
        ({}, 0.5),
        ({"lora_alpha": None}, 0.5),  # 8 is PEFT's default
        ({"lora_alpha": ...}, 0.5),
        ({"r": ...}, 0.5),
        ({"lora_alpha": "8"}, 0.5),
        ({"use_rslora": True}, 2.0),
        ({"bias": None, "modules_to_save": [], "use_dora": None, "peft_type": None}, 0.5),
        ({"init_lora_weights": "gaussian"}, 0.5),
        ({"unknown_key_of_a_later_version": {"a": 1}}, 0.5),
    ],
    ids=str,
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_an_adapter_config_that_means_something(change, scale, encoding, tmp_path):
    config = {key: value for key, value in {**CONFIG, **change}.items() if value is not ...}
    path = folder(tmp_path, json.dumps(config).encode(encoding))
    for given in (path, path / "adapter_model.safetensors", path / "adapter_config.json"):
        assert scales(read(given)) == {scale}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"peft_type": "LOHA"}, ("peft_type LOHA",)),
        ({"peft_type": "LOKR"}, ("peft_type LOKR",)),
        ({"peft_type": "OFT"}, ("peft_type OFT",)),
        ({"peft_type": "VERA"}, ("peft_type VERA",)),
        ({"peft_type": "IA3"}, ("peft_type IA3",)),
        ({"use_dora": True}, ("DoRA",)),
        ({"lora_bias": True}, ("bias",)),
        ({"bias": "lora_only"}, ("bias 'lora_only'",)),
        ({"use_qalora": True}, ("QA-LoRA",)),
        ({"modules_to_save": ["proj_out"]}, ("whole modules",)),
        ({"target_parameters": ["w"]}, ("bare parameters",)),
        ({"layer_replication": [[0, 4]]}, ("replicated",)),
        ({"init_lora_weights": "pissa_niter_4"}, ("pissa", "base weights")),
        ({"init_lora_weights": "olora"}, ("olora",)),
        ({"lora_alpha": float("nan")}, ("lora_alpha is nan",)),
        ({"lora_alpha": float("inf")}, ("lora_alpha is inf",)),
        ({"lora_alpha": -8}, ("lora_alpha is -8",)),
        ({"lora_alpha": "many"}, ("lora_alpha is 'many'",)),
        ({"lora_alpha": True}, ("lora_alpha is True",)),
        ({"lora_alpha": [8]}, ("lora_alpha is [8]",)),
        ({"alpha_pattern": {"to_q": float("nan")}}, ("alpha_pattern['to_q'] is nan",)),
        ({"alpha_pattern": {"to_(q": 4}}, ("'to_(q'", "no regular expression")),
        ({"alpha_pattern": [4]}, ("alpha_pattern is [4]",)),
        ({"r": 4}, ("rank 4", "rank 16")),
        ({"rank_pattern": {"to_q": 4}}, ("rank 4", "rank 16")),
    ],
    ids=str,
)
def test_an_adapter_config_of_another_kind_is_refused(change, words, tmp_path, capsys):
    refused(capsys, folder(tmp_path, {**CONFIG, **change}), "adapter_config.json", *words)


@pytest.mark.parametrize(
    "text", [json.dumps(CONFIG).encode()[:40], b"", b"\xff\xfe\x00", b"[1]", b"null", b"[" * 100_000]
)
def test_an_adapter_config_that_cannot_be_read(text, tmp_path, capsys):
    refused(capsys, folder(tmp_path, text), "adapter_config.json", "copy it again")


@pytest.mark.parametrize(
    ("text", "kind"),
    [(b"version https://git-lfs.github.com/spec/v1\n", "git-LFS pointer"), (b"<html><body>", "HTML page")],
)
def test_an_adapter_config_that_is_something_else(text, kind, tmp_path, capsys):
    refused(capsys, folder(tmp_path, text), "adapter_config.json is no JSON", kind)


# Keys ----------------------------------------------------------------------------------------------------------------


def alphas_of(keys, value: float = 8.0) -> dict[str, torch.Tensor]:
    return {key + ".alpha": torch.tensor(value) for key in keys}


def flat(layer: str) -> str:
    return layer.replace(".", "_")


DOWN_UP = (".lora_down.weight", ".lora_up.weight")


@pytest.mark.parametrize(
    ("prefix", "form", "sides"),
    [
        ("", str, (".lora_A.default.weight", ".lora_B.default.weight")),  # DiffSynth
        ("pipe.dit.", str, (".lora_A.my_adapter-2.weight", ".lora_B.my_adapter-2.weight")),
        ("transformer.", str, DOWN_UP),  # OneTrainer
        ("diffusion_model.", str, DOWN_UP),
        ("", str, DOWN_UP),  # Lightning
        ("", str, (A, B)),
        ("transformer.", str, (".lora.down.weight", ".lora.up.weight")),
        ("transformer.", str, (".lora_linear_layer.down.weight", ".lora_linear_layer.up.weight")),
        ("lora_unet_", flat, DOWN_UP),
        ("lora_transformer_", flat, DOWN_UP),
        ("lycoris_", flat, DOWN_UP),
        ("lycoris_", flat, (A, B)),
        ("policy.", str, (A, B)),  # what other programs call their model
        ("model.transformer.", str, DOWN_UP),
        ("pipeline.transformer.", str, (A, B)),
        ("net.", str, (".lora_a.weight", ".lora_b.weight")),
        ("", str, (".lora_A", ".lora_B")),
    ],
)
def test_every_key_style_is_read(prefix, form, sides, tmp_path):
    tensors = lora("", down=sides[0], up=sides[1])
    named = {}
    for layer in LAYERS:
        named |= {prefix + form(layer) + side: tensors[layer + side] for side in sides}
        named |= alphas_of([prefix + form(layer)])
    for architecture in (None, "qwen_image"):
        payload = read(write(tmp_path / "a.safetensors", named), architecture=architecture)
        assert payload.modules == tuple(sorted(LAYERS))
        assert scales(payload) == {0.5}
        for layer in LAYERS:
            assert torch.equal(payload.tensors[layer + A], tensors[layer + sides[0]])
            assert torch.equal(payload.tensors[layer + B], tensors[layer + sides[1]])


WRAPPERS = ("base_model.model.", "transformer.", "_orig_mod.", "module.", "_fsdp_wrapped_module.", "diffusion_model.")


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_prefixes_come_off_in_any_combination(count, tmp_path):
    wanted = None
    for prefixes in itertools.permutations(WRAPPERS, count):
        payload = read(write(tmp_path / "a.safetensors", lora("".join(prefixes)), {"alpha": "8"}))
        wanted = wanted or payload.hash
        assert payload.hash == wanted, prefixes
    assert payload.modules == tuple(sorted(LAYERS))


def test_wrappers_inside_the_name_come_off(tmp_path):
    inside = [layer.replace(".attn", "._fsdp_wrapped_module._checkpoint_wrapped_module.attn") for layer in LAYERS]
    payload = read(write(tmp_path / "a.safetensors", lora("module._orig_mod.", inside), {"alpha": "8"}))
    assert payload.modules == tuple(sorted(LAYERS))


def test_xlabs_flux_is_read_as_stock_diffusers_reads_it(tmp_path):
    from diffusers import FluxPipeline

    tensors = {}
    for seed, (layer, out) in enumerate(
        (
            *(
                (f"double_blocks.3.processor.{kind}_lora{i}", 96 if kind == "qkv" else 32)
                for kind in ("qkv", "proj")
                for i in (1, 2)
            ),
            *(("single_blocks.7.processor.qkv_lora", 96), ("single_blocks.7.processor.proj_lora", 32)),
        )
    ):
        tensors[f"{layer}.down.weight"], tensors[f"{layer}.up.weight"] = pair(out, seed=seed)
    file = write(tmp_path / "x.safetensors", tensors)
    stock = FluxPipeline.lora_state_dict(str(file))
    with pytest.warns(UserWarning, match="guess"):
        payload, _ = load_any(file, architecture="flux")
    assert set(payload.tensors) == {key.removeprefix("transformer.") for key in stock}
    for key, tensor in payload.tensors.items():
        assert torch.equal(tensor, stock["transformer." + key])
    assert scales(payload) == {1.0}


@pytest.mark.parametrize(
    ("prefix", "second"),
    [
        ("transformer.", "transformer_2."),
        ("", "transformer_2."),
        ("base_model.model.transformer.", "base_model.model.transformer_2."),
        ("transformer.base_model.model.", "transformer_2.base_model.model."),
        ("module.transformer._orig_mod.", "module.transformer_2._orig_mod."),
        ("high_noise_model.", "low_noise_model."),
        ("diffusion_model.", "diffusion_model_2."),
        ("pipe.dit.", "pipe.dit2."),
    ],
)
@pytest.mark.parametrize("layer", ["blocks.0.attn1.to_q", "blocks.0.self_attn.q"])
def test_the_two_experts_of_wan_stay_two(prefix, second, layer, tmp_path):
    tensors = lora(prefix, [layer]) | lora(second, [layer])
    settings = {f"transformer{n}.{key}": value for n in ("", "_2") for key, value in CONFIG.items()}
    settings["transformer_2.lora_alpha"] = 4
    file = write(tmp_path / "w.safetensors", tensors, {"lora_adapter_metadata": json.dumps(settings)})
    payload = read(file, architecture="wan")
    first, other = "transformer.blocks.0.attn1.to_q", "transformer_2.blocks.0.attn1.to_q"
    assert payload.modules == (first, other)
    assert (payload.scale_of(first), payload.scale_of(other)) == (0.5, 0.25)
    assert read(export(payload, "diffusers", tmp_path / "d").parent).hash == payload.hash


KINDS = [
    ({"transformer_blocks.0.attn.to_q.lokr_w1": 1, "transformer_blocks.0.attn.to_q.lokr_w2_a": 1}, "LoKr"),
    ({"lycoris_transformer_blocks_0_attn_to_q.lokr_w1": 1}, "LoKr"),
    ({"transformer.transformer_blocks.0.attn.to_q.hada_w1_a": 1}, "LoHa"),
    ({"base_model.model.transformer_blocks.0.attn.to_q.hada_w1_a.default": 1}, "LoHa"),
    ({"transformer_blocks.0.attn.to_q.dora_scale": 1}, "DoRA"),
    ({"base_model.model.transformer_blocks.0.attn.to_q.lora_magnitude_vector": 1}, "DoRA"),
    ({"base_model.model.transformer_blocks.0.attn.to_q.lora_magnitude_vector.default.weight": 1}, "DoRA"),
    ({"lora_unet_transformer_blocks_0_attn_to_q.oft_blocks": 1}, "OFT"),
    ({"base_model.model.transformer_blocks.0.attn.to_q.oft_R.weight": 1}, "OFT"),
    ({"base_model.model.transformer_blocks.0.attn.to_q.boft_R": 1}, "OFT"),
    ({"transformer_blocks.0.attn.to_q.lora_mid.weight": 1}, "lora_mid"),
    ({"transformer_blocks.0.attn.to_q.a1.weight": 1}, "GLoRA"),
    ({"base_model.model.transformer_blocks.0.attn.to_q.vera_lambda_b": 1}, "VeRA"),
    ({"base_model.model.transformer_blocks.0.attn.to_q.ia3_l": 1}, "IA3"),
    ({"base_model.model.embed.lora_embedding_A": 1}, "embedding"),
    ({"base_model.model.modules_to_save.proj_out.weight": 1}, "full weights"),
    ({"diffusion_model.transformer_blocks.0.attn.to_q.diff": 1}, "full weights"),
    ({"diffusion_model.transformer_blocks.0.attn.to_q.diff_b": 1}, "full weights"),
    ({"transformer_blocks.0.attn.to_q.lora_B.bias": 1}, "bias"),
    ({"transformer_blocks.0.attn.to_q.lora_up.bias": 1}, "bias"),
    ({"base_model.model.transformer_blocks.0.attn.to_q.base_layer.bias": 1}, "bias"),
    ({"base_model.model.transformer_blocks.0.attn.to_q.lora_E": 1}, "AdaLoRA"),
    ({"transformer_blocks.0.attn.to_q.glora_a1.weight": 1}, "GLoRA"),
    ({"base_model.model.transformer_blocks.0.attn.to_q.hra_u.default": 1}, "another kind of adapter"),
    ({"transformer_blocks.0.attn.to_q.lora_A.weight_scale": 1}, "quantised"),
    ({"transformer_blocks.0.attn.to_q.weight": 1}, "no LoRA tensor"),
]


@pytest.mark.parametrize(("extra", "kind"), KINDS, ids=lambda value: value if isinstance(value, str) else "")
def test_other_kinds_are_named(extra, kind, tmp_path, capsys):
    """Alone or beside a plain LoRA: the key, its kind and what makes a plain LoRA of it."""
    for tensors in (extra, {**lora(), **extra}):
        file = write(tmp_path / "a.safetensors", {key: torch.ones(2, 2) for key in tensors})
        text = refused(capsys, file, kind, next(iter(extra)))
        assert kind in ("bias", "embedding", "quantised", "no LoRA tensor") or "save_as_lora" in text


@pytest.mark.parametrize(
    "key",
    [
        "text_encoder.text_model.encoder.layers.0.self_attn.q_proj",
        "text_encoder_2.text_model.encoder.layers.0.self_attn.q_proj",
        "text_encoders.qwen25_7b.transformer.model.layers.0.self_attn.q_proj",
        "base_model.model.text_encoder.layers.0.q_proj",
        "lora_te1_text_model_encoder_layers_0_self_attn_q_proj",
        "lora_te_text_model_encoder_layers_0_mlp_fc1",
        "lora_te3_encoder_block_0_layer_0_SelfAttention_k",
        "clip_l.text_model.encoder.layers.0.self_attn.q_proj",
        "t5.encoder.block.0.layer.0.SelfAttention.q",
        "qwen2_5_vl.model.layers.0.self_attn.q_proj",
        "lora_llama_model_layers_0_self_attn_q_proj",
    ],
)
def test_a_text_encoder_is_named_and_may_be_left_out(key, tmp_path, capsys):
    theirs = lora("", [key], *DOWN_UP) | alphas_of([key])
    ours = lora("transformer.") | alphas_of("transformer." + layer for layer in LAYERS)
    file = write(tmp_path / "a.safetensors", ours | theirs)
    refused(capsys, file, "text encoder", "3 of 12", "skip")
    payload = read(file, skip_text_encoder=True)
    assert payload.modules == tuple(sorted(LAYERS))
    target = str(tmp_path / "out")
    assert main(["convert", str(file), target, "--to", "diffusers", "--skip-text-encoder"]) == 0
    assert read(tmp_path / "out").hash == payload.hash
    capsys.readouterr()
    alone = write(tmp_path / "alone.safetensors", theirs)
    refused(capsys, alone, "text encoder")
    with pytest.raises(PayloadError, match="text encoder alone"):
        load_any(alone, skip_text_encoder=True)


@pytest.mark.parametrize(
    ("layers", "name"),
    [
        (["lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q"], "Stable Diffusion"),
        (
            [
                "lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn2_to_k",
                "lora_te1_text_model_encoder_layers_0_mlp_fc1",
            ],
            "XL",
        ),
        (["unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_q"], "Stable Diffusion"),
        (["unet.up_blocks.1.attentions.0.transformer_blocks.0.attn1.processor.to_q_lora"], "Stable Diffusion"),
        (["base_model.model.down_blocks.0.attentions.0.proj_in"], "Stable Diffusion"),
        (["lora_unet_double_blocks_0_img_mlp_fc1"], "HunyuanVideo"),
        (["diffusion_model.double_blocks.0.img_attn_qkv"], "HunyuanVideo"),
        (["transformer.single_transformer_blocks.0.attn.to_qkv_mlp_proj"], "FLUX.2"),
        (["transformer.transformer_blocks.0.attn1.to_q"], "LTX-Video"),
        (["diffusion_model.layers.0.attn.to_q"], "Lumina"),
        (["base_model.model.model.layers.0.self_attn.q_proj"], "language model"),
        (["diffusion_model.double_stream_blocks.0.block.attn1.to_q"], "HiDream"),
        (["transformer.nothing.like.this"], "no architecture's rules know all layers"),
    ],
)
@pytest.mark.parametrize("architecture", [None, "qwen_image"])
def test_another_architecture_is_refused_by_name(layers, name, architecture, tmp_path, capsys):
    sides = (".down.weight", ".up.weight") if layers[0].endswith("_lora") else DOWN_UP
    file = write(tmp_path / "a.safetensors", lora("", layers, *sides), {"ss_network_alpha": "8"})
    refused(capsys, file, name, architecture=architecture)


def test_a_lora_of_another_known_architecture_is_refused_by_name(tmp_path):
    file = write(tmp_path / "a.safetensors", lora(layers=["single_transformer_blocks.0.attn.to_q"]), {"alpha": "8"})
    with pytest.raises(LoRASyncError, match=r"not in qwen_image.*this is a LoRA for flux; give one for qwen_image"):
        load_any(file, architecture="qwen_image")
    assert read(file, architecture="flux").modules == ("single_transformer_blocks.0.attn.to_q",)


def test_any_keeps_the_names_of_a_model_without_a_map(tmp_path):
    file = write(tmp_path / "a.safetensors", lora("base_model.model.", ["my.own_model.0.fc"]), {"alpha": "8"})
    assert read(file, architecture="any").modules == ("my.own_model.0.fc",)


def test_sd3_layers_without_a_comfy_name_are_read(tmp_path):
    layers = ["transformer_blocks.0.norm1_context.linear", "transformer_blocks.0.norm1.linear"]
    file = write(tmp_path / "a.safetensors", lora(layers=layers), {"alpha": "8"})
    assert len(read(file, architecture="sd3").modules) == 2


# Values --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_weight_that_is_not_finite_is_refused(value, dtype, tmp_path, capsys):
    tensors = {key: tensor.to(dtype) for key, tensor in lora().items()}
    tensors["transformer." + LAYERS[1] + B][3, 5] = value
    file = write(tmp_path / "a.safetensors", tensors, {"alpha": "8"})
    refused(capsys, file, LAYERS[1] + B, "NaN or infinity")


def test_large_finite_weights_are_no_infinity(tmp_path):
    tensors = {key: torch.full_like(tensor, 3e38) for key, tensor in lora().items()}  # the sum overflows
    assert len(read(write(tmp_path / "a.safetensors", tensors, {"alpha": "8"})).modules) == 3


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_an_alpha_tensor_that_is_no_scale_is_refused(value, tmp_path, capsys):
    keys = [f"diffusion_model.{layer}" for layer in LAYERS]
    tensors = lora("diffusion_model.", LAYERS, *DOWN_UP) | alphas_of(keys) | alphas_of(keys[1:2], value)
    refused(capsys, write(tmp_path / "a.safetensors", tensors), keys[1] + ".alpha")


def test_alpha_zero_is_said(tmp_path):
    file = write(tmp_path / "a.safetensors", lora(), {"alpha": "0"})
    with pytest.warns(UserWarning, match="alpha is 0 for 3 layers"):
        assert scales(load_any(file)[0]) == {0.0}


def test_quantised_weights_are_refused(tmp_path, capsys):
    tensors = {key: tensor.to(torch.int8) for key, tensor in lora().items()}
    refused(capsys, write(tmp_path / "a.safetensors", tensors, {"alpha": "8"}), "int8")


def test_a_payload_that_is_not_finite_binds_nothing():
    model = get_peft_model(Net(), LoraConfig(r=RANK, target_modules=["to_q", "to_out.0", "net.2"])).base_model.model
    before = {name: value.clone() for name, value in model.state_dict().items()}
    tensors = {layer + side: t for layer in LAYERS for side, t in zip((A, B), pair(), strict=True)}
    tensors[LAYERS[0] + A] = torch.full((RANK, WIDTH), float("nan"))
    payload = LoRAPayload.build(tensors, alphas=8.0, version=1)
    with pytest.raises(PayloadError, match=r"version 1: .*to_q.lora_A.weight' holds NaN"):
        apply_lora(model, payload)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(PayloadError, match="alpha of"):
        LoRAPayload.build({**tensors}, alphas=float("nan"), version=1)


def test_a_layer_or_half_too_few_or_too_many(tmp_path, capsys):
    tensors = lora()
    del tensors["transformer." + LAYERS[0] + B]
    refused(capsys, write(tmp_path / "a.safetensors", tensors), LAYERS[0], "needs A and B")
    refused(capsys, write(tmp_path / "a.safetensors", lora() | lora("")), LAYERS[0], "second time")
    two = lora("", LAYERS, ".lora_A.one.weight", ".lora_B.one.weight") | lora(
        "", LAYERS, ".lora_A.two.weight", ".lora_B.two.weight"
    )
    refused(capsys, write(tmp_path / "a.safetensors", two), "2 adapters", "'one', 'two'")
    other = lora() | {"transformer." + LAYERS[0] + B: torch.ones(WIDTH, RANK // 2)}
    refused(capsys, write(tmp_path / "a.safetensors", other, {"alpha": "8"}), "do not share a rank")


# Files that are something else ---------------------------------------------------------------------------------------


def pickled(**options) -> bytes:
    out = io.BytesIO()
    torch.save({"a": torch.ones(2)}, out, **options)
    return out.getvalue()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 12\n", ("git-LFS pointer", "git lfs pull")),
        (b"\xef\xbb\xbfversion https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 12\n", ("git-LFS pointer",)),
        ((200_000).to_bytes(8, "little") + b"[" * 200_000, ("header cannot be read",)),
        (b"<!DOCTYPE html><html><body>Sign in</body></html>", ("HTML page",)),
        (b"\n  <html lang=en>" + b" " * 600, ("HTML page",)),
        (b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>", ("XML text",)),
        (b'{"error": "Repository not found"}', ("JSON text", "Repository not found")),
        (b"Entry not found", ("plain text", "Entry not found")),
        (b"/annex/objects/SHA256E-s1--abc.safetensors\n", ("git-annex pointer",)),
        (pickled(), ("zip archive", "torch.save")),
        (pickled(_use_new_zipfile_serialization=False), ("pickle", "torch.save")),
        (b"GGUF\x03\0\0\0" + b"\1" * 64, ("GGUF",)),
        (b"\x1f\x8b\x08\0" + b"\1" * 64, ("gzip",)),
        (b"\x89PNG\r\n\x1a\n" + b"\1" * 64, ("PNG",)),
        (b"", ("empty (0 bytes)",)),
        (b"\0" * 4096, ("zeros", "not finished")),
        (b"\xff" * 64, ("no safetensors file",)),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_file_of_another_kind_is_told_what_it_is(data, words, tmp_path, capsys):
    file = tmp_path / "lora.safetensors"
    file.write_bytes(data)
    refused(capsys, file, *words)
    with pytest.raises(LoRASyncError, match=words[0].replace("(", r"\(").replace(")", r"\)")):
        LoRAPayload.load(file)


def test_a_download_that_was_cut(tmp_path, capsys):
    whole = write(tmp_path / "a.safetensors", lora(), {"alpha": "8"}).read_bytes()
    file = tmp_path / "b.safetensors"
    for size in (4, 100, len(whole) - 1):
        file.write_bytes(whole[:size])
        refused(capsys, file, "copy it again")


def test_folders_without_the_one_file(tmp_path, capsys):
    refused(capsys, tmp_path / "nothing.safetensors", "does not exist")
    refused(capsys, tmp_path, "0 safetensors files")
    (tmp_path / "adapter_model.bin").write_bytes(pickled())
    refused(capsys, tmp_path, "adapter_model.bin is a pickle")
    for name in ("a", "b"):
        write(tmp_path / f"{name}.safetensors", lora())
    refused(capsys, tmp_path, "2 safetensors files", "a.safetensors")


def test_tables_are_printed_where_output_is_ascii(tmp_path, monkeypatch):
    out = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(out, encoding="ascii", write_through=True))
    assert main(["inspect", str(write(tmp_path / "a.safetensors", lora(), {"alpha": "8"}))]) == 0
    assert b"3 modules" in out.getvalue()
