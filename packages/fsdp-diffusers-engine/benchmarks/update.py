"""Time and memory of a LoRA update of Qwen-Image with random weights, on one device or under torchrun.

    python benchmarks/update.py --size full --samples 8 --pixels 512 --lora-rank 64          # 20.4 B on one 80 GB card
    torchrun --nproc-per-node 2 benchmarks/update.py --size small --out two.pt               # two ranks …
    python benchmarks/update.py --size small --out one.pt --against two.pt                   # … against one

Prints one JSON line (on rank 0). ``--out`` keeps gradient and adapter after the first step; ``--against`` compares with
such a file: relative distance of the gradients, which for two processes against one is the rounding of bf16.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from diffusion_losses import DiffusionLossConfig
from fsdp_diffusers_engine import (
    DiffusionLoss,
    DiffusionModelConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    PPODiffusersFSDPEngine,
    gather_outputs,
)
from fsdp_diffusers_engine.batch import sampling_meta
from fsdp_diffusers_engine.loading import whole
from fsdp_diffusers_engine.perf import mfu, training_flops
from tensordict import TensorDict

SIZES: dict[str, dict[str, Any]] = {
    "full": {"num_layers": 60, "guidance_embeds": False},
    "small": {"num_layers": 6, "num_attention_heads": 8},
    "tiny": {
        "num_layers": 2,
        "attention_head_dim": 32,
        "num_attention_heads": 2,
        "joint_attention_dim": 64,
        "axes_dims_rope": [8, 12, 12],
    },
}


def batch_of(engine: PPODiffusersFSDPEngine, args: argparse.Namespace) -> TensorDict:
    """Random transitions of one SDE step or more, equal on all ranks."""
    draw = torch.Generator().manual_seed(0)
    shape = engine.spec.latent_shape(args.pixels, args.pixels)
    channels = engine.module.config["joint_attention_dim"]  # type: ignore[index]
    latents = torch.randn(args.samples, args.window, *shape, generator=draw)
    data = TensorDict(
        {
            "latents": latents,
            "next_latents": latents + 0.05 * torch.randn(latents.shape, generator=draw),
            "step_index": torch.arange(args.window).expand(args.samples, -1),
            "sigmas": torch.linspace(1, 0, 11).expand(args.samples, -1),
            "advantages": torch.randn(args.samples, generator=draw),
            "prompt_embeds": torch.randn(args.samples, args.tokens, channels, generator=draw),
            "prompt_embeds_mask": torch.ones(args.samples, args.tokens, dtype=torch.bool),
        },
        batch_size=[args.samples],
    )
    settings = {"height": args.pixels, "width": args.pixels, "kind": "flow_sde", "noise_level": 0.7}
    for key, value in {**settings, "micro_batch_size": args.micro_batch}.items():
        data.set_non_tensor(key, value)
    return data[engine.layout.dp_rank :: engine.layout.dp_size]


def main() -> None:
    """Run the update ``--steps`` times and report the fastest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=sorted(SIZES), default="tiny")
    for name, default in (("samples", 8), ("micro-batch", 8), ("pixels", 64), ("tokens", 128), ("window", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("lora-rank", 16), ("steps", 4), ("sequence", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--reference", action="store_true", help="with the KL's reference forward")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--no-checkpointing", action="store_true")
    parser.add_argument("--out")
    parser.add_argument("--against")
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    if "RANK" in os.environ:
        if cuda:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    engine = PPODiffusersFSDPEngine(
        DiffusionModelConfig(
            architecture="qwen_image",
            transformer_config=SIZES[args.size],
            lora_rank=args.lora_rank,
            lora_alpha=2 * args.lora_rank,
            enable_gradient_checkpointing=not args.no_checkpointing,
        ),
        FSDPEngineConfig(
            model_dtype="bf16" if cuda else "fp32",
            ulysses_sequence_parallel_size=args.sequence,
            use_torch_compile=args.compile,
        ),
        FSDPOptimizerConfig(lr=1e-4),
    )
    start = time.perf_counter()
    engine.initialize()
    built = time.perf_counter() - start
    data = batch_of(engine, args)
    with engine.eval_mode():
        data["old_log_probs"] = gather_outputs(engine.forward_backward_batch(data, None, forward_only=True))[
            "log_probs"
        ].cpu()
    loss = DiffusionLoss(DiffusionLossConfig(clip_ratio=1.0, ref_kl_coef=0.1 if args.reference else 0.0))
    seconds, first = [], {}
    for step in range(args.steps):
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        engine.forward_backward(data, loss)
        if step == 0:
            first = {n: whole(p.grad).float().cpu() for n, p in engine.trainable.items() if p.grad is not None}
        norm = engine.step()["actor/grad_norm"]
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    flops = training_flops(
        engine, len(data), args.window, sampling_meta(data), args.tokens, extra_forwards=int(args.reference)
    )
    report = {
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "ranks": engine.layout.world_size,
        "parameters": sum(p.numel() for n, p in engine.module.named_parameters() if "lora_" not in n),
        "adapter": sum(p.numel() for p in engine.trainable.values()),
        "build_s": round(built, 1),
        "step_s": round(min(seconds), 4),
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2) if cuda else None,
        "mfu": round(mfu(engine, flops, min(seconds)), 4),
        "grad_norm": norm,
    }
    if args.against:
        other = torch.load(args.against, weights_only=True)
        apart = sum(float((first[n] - other[n]).square().sum()) for n in first) ** 0.5
        report["gradient_apart"] = apart / sum(float(g.square().sum()) for g in other.values()) ** 0.5
    if engine.layout.rank == 0:
        if args.out:
            torch.save(first, args.out)
        print(json.dumps(report))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
