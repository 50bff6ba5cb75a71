"""Weights out of and into the engine: streams, merging, exports that stock diffusers loads, warm starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_diffusers_engine import EngineError
from fsdp_diffusers_engine.loading import RandomSource
from lora_sync import export, extract_lora


def stock(folder: Path, part: str = "transformer") -> Any:
    from diffusers import QwenImageTransformer2DModel

    return QwenImageTransformer2DModel.from_pretrained(folder / part)


def answer(module: Any) -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        return module(
            torch.randn(2, 4, 64, generator=draw),
            encoder_hidden_states=torch.randn(2, 5, 64, generator=draw),
            timestep=torch.tensor([0.3, 0.8]),
            img_shapes=[[(1, 2, 2)]] * 2,
            return_dict=False,
        )[0]


def test_lora_streams(make_engine: Any, stir: Any, tiny_qwen: Path) -> None:
    engine = make_engine()
    stir(engine)
    base = {n: p.detach() for n, p in stock(tiny_qwen).named_parameters()}
    stream, config = engine.get_per_tensor_param(base_sync_done=False)
    sent = dict(stream)
    assert config is None
    assert sent.keys() == base.keys()
    assert all(torch.equal(sent[n], base[n]) for n in base)
    stream, config = engine.get_per_tensor_param(layered_summon=True, base_sync_done=True)
    adapter = dict(stream)
    assert (config["r"], config["lora_alpha"]) == (4, 8)
    assert len(adapter) == len(engine.trainable)
    assert all(n.endswith((".lora_A.weight", ".lora_B.weight")) for n in adapter)
    assert {n: p for n, p in adapter.items() if float(p.abs().max()) == 0.0} == {}


def test_merged_weights_are_the_policy_for_a_stock_model(make_engine: Any, stir: Any, tiny_qwen: Path) -> None:
    from fsdp_diffusers_engine import LoRAOptions

    engine = make_engine(model={"lora": LoRAOptions(merge=True)})
    stir(engine)
    stream, config = engine.get_per_tensor_param(base_sync_done=True)
    assert config is None
    other = stock(tiny_qwen)
    before = answer(other)
    other.load_state_dict(dict(stream))
    ours = answer(engine.module)
    assert float((ours - before).abs().max()) > 1e-2
    assert float((answer(other) - ours).abs().max()) <= 2e-5


@pytest.mark.parametrize("full", [False, True])
def test_exports_load_in_stock_diffusers(
    make_engine: Any, stir: Any, tiny_qwen: Path, tmp_path: Path, full: bool
) -> None:
    contents = {"save_contents": ["model", "hf_model", *([] if full else ["lora"])]}
    engine = make_engine(full=full, checkpoint=contents)
    stir(engine)
    engine.save_checkpoint(tmp_path / "ck")
    ours = answer(engine.module)
    assert float((answer(stock(tmp_path / "ck", "hf_model")) - ours).abs().max()) <= 2e-5
    if not full:
        other = stock(tiny_qwen)
        other.load_lora_adapter(
            str(tmp_path / "ck" / "lora"), prefix="transformer", weight_name="pytorch_lora_weights.safetensors"
        )
        assert float((answer(other) - ours).abs().max()) <= 2e-5


def test_two_experts_export_as_two_folders(make_engine: Any, stir: Any, tiny_wan: Path, tmp_path: Path) -> None:
    from diffusers import WanTransformer3DModel

    engine = make_engine(path=tiny_wan, checkpoint={"save_contents": ["hf_model"]})
    engine.save_checkpoint(tmp_path / "ck")
    for part in ("transformer", "transformer_2"):
        saved, first = (
            WanTransformer3DModel.from_pretrained(p / part) for p in (tmp_path / "ck" / "hf_model", tiny_wan)
        )
        for (name, a), (_, b) in zip(saved.named_parameters(), first.named_parameters(), strict=True):
            assert torch.equal(a, b), name
    alone = make_engine(path=tiny_wan, model={"transformer_subfolder": "transformer_2"})
    assert not any(n.startswith("transformer") for n in alone.trainable)


@pytest.mark.parametrize("format", ["diffusers", "peft"])
def test_warm_start(make_engine: Any, stir: Any, tmp_path: Path, format: str) -> None:
    engine = make_engine()
    stir(engine)
    export(extract_lora(engine.module, "default", version=1), format, tmp_path / "lora", architecture="qwen_image")
    again = make_engine(
        model={
            "lora_adapter_path": str(tmp_path / "lora"),
            "lora_alpha": 2,
            "policy_state_adapters": ["default", "old"],
        }
    )
    assert float((answer(again.module) - answer(engine.module)).abs().max()) <= 2e-5
    with again.use_adapter("old"):
        assert float((answer(again.module) - answer(engine.module)).abs().max()) <= 2e-5
    with pytest.raises(EngineError, match="lora_rank=4"):
        make_engine(model={"lora_adapter_path": str(tmp_path / "lora"), "lora_rank": 2})
    with pytest.raises(EngineError, match="do not pair up"):
        make_engine(model={"lora_adapter_path": str(tmp_path / "lora"), "target_modules": "attention"})


def test_first_adapters_depend_on_seed_and_name_alone(make_engine: Any) -> None:
    one, two, other = (
        make_engine(),
        make_engine(model={"target_modules": "attention"}),
        make_engine(model={"lora_seed": 1}),
    )
    shared = [n for n in two.trainable if ".lora_A." in n]
    assert shared
    for name in shared:
        assert torch.equal(one.trainable[name], two.trainable[name])
        assert not torch.equal(one.trainable[name], other.trainable[name])
        assert float(one.trainable[name].detach().std()) == pytest.approx(0.25, rel=0.2)  # 1 / rank
    kaiming = make_engine(model={"lora_init_weights": "kaiming"}).trainable[shared[0]]
    assert float(kaiming.detach().abs().max()) <= kaiming.shape[1] ** -0.5
    assert all(float(p.detach().abs().max()) == 0.0 for n, p in one.trainable.items() if ".lora_B." in n)


def test_random_weights_need_no_files(make_engine: Any, tiny_qwen: Path) -> None:
    shape = {"num_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2, "axes_dims_rope": [4, 6, 6]}
    model = {"architecture": "qwen_image", "transformer_config": {**shape, "joint_attention_dim": 64}}
    engines = [make_engine(path="", model={**model, "lora_seed": seed}) for seed in (0, 0, 1)]
    answers = [answer(e.module) for e in engines]
    assert torch.isfinite(answers[0]).all()
    assert torch.equal(answers[0], answers[1])
    assert not torch.equal(answers[0], answers[2])


def test_fp32_adapters_over_a_bf16_base(make_engine: Any, make_batch: Any, stir: Any) -> None:
    from diffusion_losses import DiffusionLossConfig
    from fsdp_diffusers_engine import DiffusionLoss

    engine, data = make_engine(engine={"model_dtype": "bf16"}), make_batch(count=2)
    stir(engine)
    assert {p.dtype for p in engine.trainable.values()} == {torch.float32}
    assert {p.dtype for n, p in engine.module.named_parameters() if "lora_" not in n} == {torch.bfloat16}
    seen = set()
    for child in engine.module.modules():
        if type(child).__name__ == "AdaptedLinear":
            child.register_forward_hook(lambda _m, args, out: seen.update({args[0].dtype, out.dtype}))
    data["old_log_probs"] = torch.zeros(2, 2)
    engine.forward_backward(data, DiffusionLoss(DiffusionLossConfig(clip_ratio=9.0)))
    assert seen == {torch.bfloat16}
    assert {p.grad.dtype for p in engine.trainable.values() if p.grad is not None} == {torch.float32}
    assert engine.step()["actor/grad_norm"] > 0


def test_a_missing_shard_is_named(make_engine: Any, tiny_qwen: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model = stock(tiny_qwen)
    model.save_pretrained(folder / "transformer", max_shard_size="100KB")
    (folder / "model_index.json").write_text((tiny_qwen / "model_index.json").read_text())
    whole = make_engine(path=folder)
    assert torch.equal(answer(whole.module), answer(model))
    files = sorted((folder / "transformer").glob("*.safetensors"))
    assert len(files) > 1
    files[1].unlink()
    with pytest.raises(EngineError, match=files[1].name):
        make_engine(path=folder)
    index = folder / "transformer" / "diffusion_pytorch_model.safetensors.index.json"
    index.unlink()
    with pytest.raises(EngineError, match="safetensors"):
        make_engine(path=folder)
    assert json.loads((folder / "model_index.json").read_text())


@pytest.mark.parametrize("sharding", ["replicate", "shard"])
def test_weights_that_do_not_fit_the_config_are_refused(
    make_engine: Any, tiny_qwen: Path, tmp_path: Path, sharding: str
) -> None:
    from safetensors.torch import load_file, save_file

    def build(name: str) -> Any:
        return make_engine(path=tmp_path / name, engine={"sharding": sharding})

    for name in ("shape", "missing"):
        shutil.copytree(tiny_qwen, tmp_path / name)
    config = tmp_path / "shape" / "transformer" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"joint_attention_dim": 32}))
    with pytest.raises(EngineError, match="txt_"):
        build("shape")
    file = tmp_path / "missing" / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    del tensors["transformer_blocks.1.attn.to_k.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(EngineError, match=r"transformer_blocks\.1\.attn\.to_k\.weight"):
        build("missing")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def test_random_weights_do_not_hang_on_the_default_dtype() -> None:
    """An engine loads under its own default dtype and must hold what the trainer drew."""
    source = RandomSource(0, torch.device("cpu"))
    whole = tuple(slice(None) for _ in range(2))
    ours = source.read("blocks.0.weight", (8, 8), whole)
    torch.set_default_dtype(torch.bfloat16)
    try:
        theirs = source.read("blocks.0.weight", (8, 8), whole)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(ours, theirs)
