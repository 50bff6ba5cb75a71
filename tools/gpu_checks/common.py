"""What the parts of `tools/check_engine_gpu.py` share: results as JSON lines, a random Qwen-Image, batches, distances."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from typing import Any

import torch
from diffusion_losses import DiffusionLossConfig
from fsdp_diffusers_engine import (
    DiffusionLoss,
    DiffusionModelConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    PPODiffusersFSDPEngine,
)
from lora_sync.layers import copy_into, full
from sde_samplers import SamplerSettings
from tensordict import TensorDict
from torch import Tensor

CUDA = os.environ.get("GPU_CHECKS_DEVICE", "cuda") == "cuda"
DEVICE = "cuda" if CUDA else "cpu"
Weights = dict[str, Tensor]

# On a card blocks of a real width, so that kernels are those of real runs; elsewhere a few channels.
MODEL: dict[str, Any] = (
    {"num_layers": 4, "num_attention_heads": 8}
    if CUDA
    else {
        "num_layers": 2,
        "num_attention_heads": 2,
        "attention_head_dim": 32,
        "joint_attention_dim": 64,
        "axes_dims_rope": [8, 12, 12],
    }
)
PIXELS = 256 if CUDA else 64
LOSS = DiffusionLossConfig(clip_ratio=9.0, ref_kl_coef=0.5)


def report(name: str, ok: bool | None, **figures: Any) -> None:
    """One result as a JSON line; `ok` is None for what is only measured."""
    rounded = {k: float(f"{v:.4g}") if isinstance(v, float) and math.isfinite(v) else v for k, v in figures.items()}
    print(json.dumps({"check": name, "ok": ok, **rounded}), flush=True)


def build(dtype: str = "fp32", *, checkpointing: bool = True, **engine: Any) -> PPODiffusersFSDPEngine:
    """An engine over the random model, LoRA r16 on all layers, its adapter moved off zero, equal on any number of ranks."""
    made = PPODiffusersFSDPEngine(
        DiffusionModelConfig(
            architecture="qwen_image",
            transformer_config=MODEL,
            lora_rank=16,
            lora_alpha=32,
            enable_gradient_checkpointing=checkpointing,
        ),
        FSDPEngineConfig(**{"device": None if CUDA else "cpu", "model_dtype": dtype, **engine}),
        FSDPOptimizerConfig(lr=1e-4),
    )
    made.initialize()
    draw = torch.Generator().manual_seed(1)
    for parameter in made.trainable.values():
        push = 0.02 * torch.randn(parameter.shape, generator=draw)
        copy_into(parameter, full(parameter).cpu() + push)
    return made


def batch_of(engine: PPODiffusersFSDPEngine, samples: int = 8, micro: int = 4, seed: int = 0) -> TensorDict:
    """Random transitions, equal everywhere; this rank's share of them."""
    draw = torch.Generator().manual_seed(seed)
    channels: int = engine.module.config["joint_attention_dim"]  # type: ignore[index, assignment]
    latents = torch.randn(samples, 1, *engine.spec.latent_shape(PIXELS, PIXELS), generator=draw)
    data = TensorDict(
        {
            "latents": latents,
            "next_latents": latents + 0.05 * torch.randn(latents.shape, generator=draw),
            "step_index": torch.zeros(samples, 1, dtype=torch.int64),
            "sigmas": torch.linspace(1, 0, 6).expand(samples, -1),
            "advantages": torch.randn(samples, generator=draw),
            "old_log_probs": torch.zeros(samples, 1),
            "prompt_embeds": torch.randn(samples, 32, channels, generator=draw),
            "prompt_embeds_mask": torch.ones(samples, 32, dtype=torch.bool),
        },
        batch_size=[samples],
    )
    data.set_non_tensor("settings", SamplerSettings(PIXELS, PIXELS, 5, kind="flow_sde", noise_level=0.7, window=(0,)))
    data.set_non_tensor("micro_batch_size", micro)
    return data[engine.layout.dp_rank :: engine.layout.dp_size]


def copies(tensors: Mapping[str, Tensor]) -> Weights:
    """Whole tensors, on the CPU, fp32."""
    return {name: full(tensor).to("cpu", torch.float32, copy=True) for name, tensor in tensors.items()}


def gradient_of(engine: PPODiffusersFSDPEngine, data: TensorDict) -> Weights:
    """Gradient of the loss on `data`; it stays in the engine. What has none counts as zero, as in compiled blocks."""
    engine.optimizer_zero_grad()
    engine.forward_backward(data, DiffusionLoss(LOSS))
    return copies({n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in engine.trainable.items()})


def update(engine: PPODiffusersFSDPEngine, data: TensorDict) -> tuple[Weights, Weights]:
    """(gradient, change of the weights) of one optimizer step."""
    before = copies(engine.trainable)
    gradient = gradient_of(engine, data)
    engine.step()
    return gradient, {name: tensor - before[name] for name, tensor in copies(engine.trainable).items()}


def apart(found: Weights, other: Weights) -> float:
    """L2 distance over all tensors, as a share of `other`'s norm."""
    distance = sum(float((found[n] - other[n]).double().square().sum()) for n in other)
    return (distance / sum(float(t.double().square().sum()) for t in other.values())) ** 0.5


def now() -> float:
    """Host clock after the card has finished."""
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()
