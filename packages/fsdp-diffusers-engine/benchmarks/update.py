"""Time and memory of a LoRA update of Qwen-Image with random weights, on one device or under torchrun.

    python benchmarks/update.py --size full --samples 8 --pixels 512 --lora-rank 64          # 20.4 B on one 80 GB card
    torchrun --nproc-per-node 2 benchmarks/update.py --size small --out two.pt               # two ranks …
    python benchmarks/update.py --size small --out one.pt --against two.pt                   # … against one

Prints one JSON line (on rank 0); ``--samples`` are shared out to the ranks. ``--out`` keeps the gradient of the first step
and what the step made of the adapter (which then does not start from zero: half of its gradient would be); ``--against``
compares with such a file: relative distance of the gradients, and of the steps. ``--dtype fp32`` leaves nothing but
the order of sums.
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
    reduce_metrics,
)
from fsdp_diffusers_engine.batch import settings_of
from fsdp_diffusers_engine.perf import measured_flops, mfu, training_flops
from lora_sync.layers import copy_into, full
from sde_samplers import SamplerSettings
from tensordict import TensorDict
from torch import Tensor

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
NUMBERS = {
    "samples": 8,
    "micro-batch": 8,
    "pixels": 64,
    "tokens": 128,
    "window": 1,
    "lora-rank": 16,
    "steps": 4,
    "sequence": 1,
}


def batch_of(engine: PPODiffusersFSDPEngine, args: argparse.Namespace) -> TensorDict:
    """Random transitions of one SDE step or more, equal on all ranks."""
    draw = torch.Generator().manual_seed(0)
    shape = engine.spec.latent_shape(args.pixels, args.pixels)
    channels: int = engine.module.config["joint_attention_dim"]  # type: ignore[index, assignment]
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
    settings = SamplerSettings(
        args.pixels, args.pixels, 10, kind="flow_sde", noise_level=0.7, window=tuple(range(args.window))
    )
    data.set_non_tensor("settings", settings)
    data.set_non_tensor("micro_batch_size", args.micro_batch)
    return data[engine.layout.dp_rank :: engine.layout.dp_size]


def build(args: argparse.Namespace, dtype: Any) -> PPODiffusersFSDPEngine:
    """The engine that the arguments ask for, initialised."""
    engine = PPODiffusersFSDPEngine(
        DiffusionModelConfig(
            architecture="qwen_image",
            transformer_config=SIZES[args.size],
            lora_rank=args.lora_rank,
            lora_alpha=2 * args.lora_rank,
            target_modules=args.targets,
            enable_gradient_checkpointing=not args.no_checkpointing,
        ),
        FSDPEngineConfig(
            model_dtype=dtype,
            ulysses_sequence_parallel_size=args.sequence,
            use_torch_compile=args.compile,
            forward_prefetch=args.prefetch,
            reshard_after_forward=not args.keep_gathered,
        ),
        FSDPOptimizerConfig(lr=1e-4),
    )
    engine.initialize()
    return engine


def push(engine: PPODiffusersFSDPEngine) -> None:
    """Move the adapter off its start, equally on any number of ranks."""
    draw = torch.Generator().manual_seed(1)
    for parameter in engine.trainable.values():
        copy_into(parameter, full(parameter).cpu() + 0.02 * torch.randn(parameter.shape, generator=draw))


def now(cuda: bool) -> float:
    """Host clock after the device has finished."""
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def on_cpu(parameter: Tensor) -> Tensor:
    """A copy of all of it, in fp32."""
    return full(parameter).to("cpu", torch.float32, copy=True)


def distance(found: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """L2 distance over all tensors, as a share of ``other``'s norm."""
    apart = sum(float((found[n] - other[n]).double().square().sum()) for n in other)
    return (apart / sum(float(t.double().square().sum()) for t in other.values())) ** 0.5


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=sorted(SIZES), default="tiny")
    for name, default in NUMBERS.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), help="of the base; bf16 on CUDA, fp32 elsewhere")
    parser.add_argument("--targets", choices=("all-linear", "attention"), default="all-linear")
    parser.add_argument("--reference", action="store_true", help="with the KL's reference forward")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--no-checkpointing", action="store_true")
    parser.add_argument("--prefetch", action="store_true", help="gather the next block early")
    parser.add_argument("--keep-gathered", action="store_true", help="keep blocks gathered from forward to backward")
    parser.add_argument("--out")
    parser.add_argument("--against")
    return parser.parse_args()


def main() -> None:
    """Run the update ``--steps`` times and report the fastest."""
    args = arguments()
    cuda = torch.cuda.is_available()
    if "RANK" in os.environ:
        if cuda:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    start = time.perf_counter()
    engine = build(args, args.dtype or ("bf16" if cuda else "fp32"))
    comparing = bool(args.out or args.against)
    if comparing:
        push(engine)
    built = now(cuda) - start
    weights_gb = torch.cuda.memory_allocated() / 1e9 if cuda else None
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    data = batch_of(engine, args)
    forward = []
    for _ in range(3):
        start = now(cuda)
        with engine.eval_mode():
            scores = gather_outputs(engine.forward_backward_batch(data, None, forward_only=True))
        forward.append(now(cuda) - start)
    data["old_log_probs"] = scores["log_probs"].cpu()
    loss = DiffusionLoss(DiffusionLossConfig(clip_ratio=1.0, ref_kl_coef=0.1 if args.reference else 0.0))
    both, seconds, kept, ratio = [], [], {}, 0.0
    for step in range(args.steps):
        start = now(cuda)
        engine.forwards.take()
        metrics = reduce_metrics(engine.forward_backward(data, loss))
        rows = engine.forwards.take()
        middle = now(cuda)
        if step == 0:
            ratio = max(metrics["actor/ratio_max"] - 1, 1 - metrics["actor/ratio_min"])
            if comparing:
                # The last block's text output is read by nobody: its adapters have no gradient, or zeros.
                grads = {n: p.grad if p.grad is not None else torch.zeros_like(p) for n, p in engine.trainable.items()}
                kept = {f"gradient.{n}": on_cpu(g) for n, g in grads.items()}
                before = {n: on_cpu(p) for n, p in engine.trainable.items()}
        resumed = now(cuda)
        norm = engine.step()["actor/grad_norm"]
        seconds.append(now(cuda) - resumed + middle - start)
        both.append(middle - start)
        if step == 0:
            first_norm = norm
            if comparing:
                kept |= {f"step.{n}": on_cpu(p) - before[n] for n, p in engine.trainable.items()}
    flops = training_flops(engine, rows, settings_of(data), args.tokens)
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "torch": torch.__version__,
        "ranks": engine.layout.world_size,
        "settings": {k: v for k, v in vars(args).items() if v not in (None, False)},
        "parameters": sum(p.numel() for n, p in engine.module.named_parameters() if "lora_" not in n),
        "adapter": sum(p.numel() for p in engine.trainable.values()),
        "image_tokens": engine.spec.latent_shape(args.pixels, args.pixels)[0],
        "build_s": round(built, 1),
        "forward_ms": round(1e3 * min(forward), 2),
        "forward_backward_ms": round(1e3 * min(both), 2),
        "step_ms": round(1e3 * min(seconds), 2),
        "first_forward_s": round(forward[0], 1),
        "first_step_s": round(seconds[0], 1),
        "tflop": round(flops / 1e12, 1),
        "mfu": round(mfu(engine, flops, min(seconds)), 4),
        "grad_norm": first_norm,
        "first_ratio_off_by": ratio,
    }
    if cuda:
        report["weights_gb"] = round(weights_gb or 0.0, 2)
        report["peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
        report["reserved_gb"] = round(torch.cuda.max_memory_reserved() / 1e9, 2)
        report["matmul_tflops"] = round(measured_flops("cuda", torch.cuda.current_device(), torch.bfloat16) / 1e12)
        of_matmul = flops / min(both) / engine.layout.sp_size / 1e12 / report["matmul_tflops"]
        report["forward_backward_of_matmul"] = round(of_matmul, 4)
    if args.against:
        other = torch.load(args.against, weights_only=True)
        for part in ("gradient", "step"):
            theirs = {n: t for n, t in other.items() if n.startswith(part)}
            report[f"{part}_apart"] = distance({n: kept[n] for n in theirs}, theirs)
    if engine.layout.rank == 0:
        if args.out:
            torch.save(kept, args.out)
        print(json.dumps(report), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
