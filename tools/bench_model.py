"""Qwen-Image at several sizes for `bench_gpu.py`: a folder without weights, requests, an adapter, the trainer's engine."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_common import CPU, device


@dataclass(frozen=True)
class Size:
    """A model and what is asked of it."""

    transformer: dict[str, Any]
    pixels: int = 512
    steps: int = 10
    batch: int = 16
    micro: int = 8
    rank: int = 64
    small: bool = False
    """For a CPU."""


FULL = {"attention_head_dim": 128, "axes_dims_rope": [16, 56, 56]}
MODELS = {
    "qwen_image_20b": Size({"num_layers": 60, "num_attention_heads": 24, **FULL}),
    "qwen_image_2b": Size({"num_layers": 24, "num_attention_heads": 12, **FULL}),
    "tiny": Size({"num_layers": 2}, pixels=64, steps=4, batch=4, micro=2, rank=4, small=True),
}
PROMPT = (
    "a detailed oil painting of a red cat sitting on a blue chair in front of a wooden table with a green bottle and the "
    "word hello written on a sign, soft light, number "
)


def make_folder(size: Size, folder: Path) -> Path:
    """A pipeline folder with the transformer's config alone, the tiny text encoder, and a full VAE for the large sizes."""
    import torch
    from diffusers import AutoencoderKLQwenImage
    from ray_trainer.assets import builtin
    from safetensors.torch import load_file, save_file

    dtype, source = torch.float32 if CPU else torch.bfloat16, Path(builtin("models", "tiny_qwen_image"))
    left_out = "nothing" if size.small else "diffusion_pytorch_model*"
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns(left_out))
    for file in folder.rglob("*.safetensors"):
        save_file({k: v.to(dtype) for k, v in load_file(file).items()}, file, metadata={"format": "pt"})
    encoder = folder / "text_encoder" / "config.json"
    encoder.write_text(encoder.read_text().replace('"float32"', f'"{str(dtype).removeprefix("torch.")}"'))
    config = folder / "transformer" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **size.transformer}))
    # The program reads names and shapes; the numbers come from `transformer_config` and the engine's pipeline.
    write_header(folder / "transformer" / "diffusion_pytorch_model.safetensors", empty_transformer(folder))
    if not size.small:
        shutil.rmtree(folder / "vae")
        torch.manual_seed(0)
        vae: Any = AutoencoderKLQwenImage()
        vae.to(dtype).save_pretrained(folder / "vae")
    return folder


def transformer_config(folder: Path) -> dict[str, Any]:
    """Of a folder that `make_folder` made."""
    config: dict[str, Any] = json.loads((folder / "transformer" / "config.json").read_text())
    return config


def empty_transformer(folder: Path) -> Any:
    """The folder's transformer on the meta device."""
    import torch
    from diffusers import QwenImageTransformer2DModel

    with torch.device("meta"):
        return QwenImageTransformer2DModel.from_config(transformer_config(folder))


def write_header(file: Path, module: Any) -> None:
    """A safetensors file of a module whose data is a hole: it takes no room."""
    header, end = dict[str, Any](), 0
    dtype, width = ("F32", 4) if CPU else ("BF16", 2)
    for name, tensor in module.state_dict().items():
        start, end = end, end + tensor.numel() * width
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        out.truncate(8 + len(text) + end)


def drawn_with(size: Size, steps: int = 10, **options: Any) -> Any:
    """How samples are drawn."""
    from sde_samplers.settings import SamplerSettings

    return SamplerSettings(size.pixels, size.pixels, steps, kind="flow_sde", noise_level=0.7, **options)


def requests(size: Size, count: int, round_: int = 0, steps: int | None = None) -> list[Any]:
    """`count` samples of one prompt each `size.batch`."""
    from omni_rollout.types import GenerationRequest

    options = {"true_cfg_scale": 4.0, "max_sequence_length": 256, "window": (0, 1)}
    settings = drawn_with(size, steps or size.steps, **options)
    return [
        GenerationRequest(
            f"{round_}-{i}", f"p{i // size.batch}", i % size.batch, f"{PROMPT}{i // size.batch}", seed=round_,
            settings=settings, negative_prompt=" ",
        )
        for i in range(count)
    ]  # fmt: skip


def make_payload(size: Size, folder: Path, version: int) -> Any:
    """An adapter on the attention layers as it is after some optimizer steps, the same for engine and trainer."""
    import torch
    from lora_sync import LoRAPayload
    from model_specs import get_spec

    draw, tensors = torch.Generator(device()).manual_seed(version), dict[str, Any]()
    for name, child in empty_transformer(folder).named_modules():
        if isinstance(child, torch.nn.Linear) and name.endswith(get_spec("qwen_image").attention_targets):
            a = torch.randn(size.rank, child.in_features, generator=draw, device=device()) / size.rank
            b = torch.randn(child.out_features, size.rank, generator=draw, device=device()) * 1e-3
            tensors |= {f"{name}.lora_A.weight": a.cpu(), f"{name}.lora_B.weight": b.cpu()}
    return LoRAPayload.build(tensors, alphas=2.0 * size.rank, version=version)


def training_batch(samples: Any, size: Size, old: Any) -> Any:
    """A rollout's samples as an update takes them."""
    import torch

    data = samples.exclude("responses", "final_latents")
    data["advantages"] = torch.randn(len(samples), generator=torch.Generator().manual_seed(0))
    data["old_log_probs"] = old
    data.set_non_tensor("settings", drawn_with(size, true_cfg_scale=4.0))
    data.set_non_tensor("micro_batch_size", size.micro)
    return data


def tflop(size: Size, folder: Path, batch: int, text: int) -> float:
    """Of one forward."""
    from model_specs import get_spec_for

    return get_spec_for(str(folder)).flops(transformer_config(folder), batch, drawn_with(size), text) / 1e12


def trainer_engine(
    config: dict[str, Any], rank: int, architecture: str = "qwen_image", path: Path | str = "", **options: Any
) -> Any:
    """The trainer's engine with random weights, drawn where it computes."""
    from fsdp_diffusers_engine import (
        DiffusionModelConfig,
        FSDPEngineConfig,
        FSDPOptimizerConfig,
        PPODiffusersFSDPEngine,
    )

    model = DiffusionModelConfig(
        path=str(path), architecture=architecture, transformer_config=config, lora_rank=rank, lora_alpha=2 * rank,
        target_modules="attention",
    )  # fmt: skip
    options = {"model_dtype": "fp32" if CPU else "bf16", "device": "cpu" if CPU else None, **options}
    engine = PPODiffusersFSDPEngine(model, FSDPEngineConfig(**options), FSDPOptimizerConfig(lr=1e-4))
    engine.initialize()
    return engine
