"""The trainer's engine over random weights of any architecture, for parts of `bench_gpu.py` that need no folder and no prompts."""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench_common import CPU, device
from bench_model import trainer_engine

QWEN = {
    "patch_size": 2, "in_channels": 64, "out_channels": 16, "attention_head_dim": 128, "num_attention_heads": 24,
    "joint_attention_dim": 3584, "axes_dims_rope": [16, 56, 56],
}  # fmt: skip
SD35_MEDIUM = {
    "sample_size": 128, "patch_size": 2, "in_channels": 16, "out_channels": 16, "num_layers": 24, "attention_head_dim": 64,
    "num_attention_heads": 24, "joint_attention_dim": 4096, "caption_projection_dim": 1536, "pooled_projection_dim": 2048,
    "pos_embed_max_size": 384, "dual_attention_layers": list(range(13)), "qk_norm": "rms_norm",
}  # fmt: skip
WAN_5B = {
    "patch_size": [1, 2, 2], "num_attention_heads": 24, "attention_head_dim": 128, "in_channels": 48, "out_channels": 48,
    "text_dim": 4096, "freq_dim": 256, "ffn_dim": 14336, "num_layers": 30, "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads", "eps": 1e-6, "rope_max_seq_len": 1024,
}  # fmt: skip


@dataclass(frozen=True)
class Work:
    """A transformer and what it is asked."""

    architecture: str
    config: dict[str, Any]
    text: tuple[int, int]
    """Tokens of the prompt and of the negative one."""
    width: int
    """Channels of a text token."""
    pooled: int = 0
    vae: dict[str, Any] = field(default_factory=dict)
    height: int = 512
    across: int = 512
    frames: int = 1
    batch: int = 16
    micro: int = 8
    rank: int = 64


WORKS = {
    "qwen_image": Work("qwen_image", {**QWEN, "num_layers": 60}, (75, 6), 3584),
    "sd35_medium": Work("sd3", SD35_MEDIUM, (333, 333), 4096, 2048, {"block_out_channels": [1, 1, 1, 1]}),
    "wan_5b": Work(
        "wan", WAN_5B, (128, 128), 4096, vae={"scale_factor_spatial": 16, "scale_factor_temporal": 4},
        height=480, across=832, frames=33, batch=4, micro=2,
    ),
}  # fmt: skip


def shrunk(work: Work, small: bool) -> Work:
    """For a CPU: the same code on few and narrow blocks."""
    if not small:
        return work
    narrow: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2}
    narrow |= {"axes_dims_rope": [4, 6, 6]} if work.architecture == "qwen_image" else {}
    narrow |= {"caption_projection_dim": 32, "dual_attention_layers": [0]} if work.architecture == "sd3" else {}
    narrow |= {"ffn_dim": 64} if work.architecture == "wan" else {}
    side: dict[str, Any] = {"height": 64, "across": 64, "frames": min(work.frames, 5)}
    return replace(
        work, config={**work.config, **narrow}, text=(9, 9 if work.pooled else 5), batch=2, micro=2, rank=4, **side
    )


def policy(work: Work, blocks: int | None = None, **options: Any) -> Any:
    """The trainer's engine over random weights, its adapter stirred."""
    import torch

    config = {**work.config, "num_layers": blocks or work.config["num_layers"]}
    if work.architecture == "sd3" and blocks:
        config["dual_attention_layers"] = [n for n in config["dual_attention_layers"] if n < blocks]
    engine = trainer_engine(config, work.rank, work.architecture, **options)
    with tempfile.TemporaryDirectory() as made:  # the spec reads sizes from a folder
        for part, values in (("transformer", config), ("vae", work.vae)):
            (Path(made) / part).mkdir()
            (Path(made) / part / "config.json").write_text(json.dumps(values))
        (Path(made) / "model_index.json").write_text("{}")
        spec = type(engine.spec)(made)
        spec.latent_shape(work.height, work.across, work.frames)  # read now, the folder goes
        _ = spec.vae_config, spec.transformer_config, spec.scheduler_config
        engine.spec = spec
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in engine.trainable.items():
            if "lora_B" in name:
                parameter.copy_(1e-3 * torch.randn(parameter.shape, generator=draw))
    return engine


def inputs(engine: Any, work: Work, rows: int) -> dict[str, Any]:
    """Arguments of `engine.velocity`."""
    import torch
    from model_specs import PromptEmbeds
    from sde_samplers.settings import SamplerSettings

    draw = torch.Generator().manual_seed(2)
    settings = SamplerSettings(work.height, work.across, 10, num_frames=work.frames, true_cfg_scale=4.0)

    def normal(*shape: int) -> Any:
        """Numbers that bf16 holds exactly, as the noise level below: networks of both dtypes then see the same."""
        return torch.randn(rows, *shape, generator=draw).bfloat16().float().to(device())

    def prompt(tokens: int) -> Any:
        embeds, pooled = normal(tokens, work.width), normal(work.pooled) if work.pooled else None
        return PromptEmbeds(embeds, torch.ones(rows, tokens, dtype=torch.bool, device=device()), pooled)

    shape = engine.spec.latent_shape(work.height, work.across, work.frames)
    return {
        "latents": normal(*shape), "sigma": torch.full((rows,), 0.6875, device=device()),
        "cond": prompt(work.text[0]), "negative": prompt(work.text[1]), "settings": settings,
    }  # fmt: skip


def tflop(engine: Any, work: Work, given: dict[str, Any]) -> float:
    """Of one guided velocity: both passes."""
    rows, config = len(given["latents"]), dict(engine.module.config)
    return sum(float(engine.spec.flops(config, rows, given["settings"], text)) for text in work.text) / 1e12


def gradient(engine: Any, given: dict[str, Any], velocity: Callable[..., Any] | None = None) -> Any:
    """One forward and backward of a random linear functional of the velocity; gradients stay in the parameters."""
    import torch

    for parameter in engine.trainable.values():
        parameter.grad = None
    v = (velocity or engine.velocity)(**given)
    probe = torch.randn(v.shape, generator=torch.Generator().manual_seed(3)).to(v.device)
    (v * probe).sum().backward()
    return v.detach()


def gradients(engine: Any) -> dict[str, Any]:
    """Of all trained tensors, fp32."""
    return {name: p.grad.detach().float().clone() for name, p in engine.trainable.items() if p.grad is not None}


def free() -> None:
    """Give back what nobody holds."""
    import torch

    gc.collect()
    if not CPU:
        torch.cuda.empty_cache()
