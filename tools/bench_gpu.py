"""Where the time of a training step goes, at full size, on one card or two. One command, no network, no checkpoint.

    python tools/bench_gpu.py --model qwen_image_20b --out bench.json          # random weights, drawn on the card
    python tools/bench_gpu.py --model qwen_image_20b --parts engine trainer    # some parts
    python tools/bench_gpu.py --model qwen_image_20b --parts ranks --ranks 2   # the update over two cards
    OMNI_ROLLOUT_CPU=1 python tools/bench_gpu.py --model tiny                  # the same code without a GPU

Parts, each in a process of its own with a deadline of less than five minutes; one that fails is reported and does not stop the
others, and within a part a section that fails does not stop the next. Results are written as they come.

    ceiling    a bf16 matrix product and a copy: what the card can do
    attention  one attention of a block by each kernel
    changes    each change off and on, on 12 blocks of full width; where the kernels' time goes
    precision  gradients of the blocks as they are and compiled, each against the same network in fp32
    plain      stock diffusers: eager, fp32 adapter under autocast, all blocks recomputed
    rollouts   the trainer's own rollout: as it is, in fp8, its adapter merged into the weights, both
    trainer    the trainer's own rollout, log-prob replay and update; it also scores the engine's samples
    one_copy   frozen weights of this process, used by another one where they lie
    lora_products   an engine's layers with an adapter, the products in either order
    engine     vLLM-Omni: pictures with and without the adapter, whole batches or one by one, sync, sleep, wake
    engine_attention, engine_fp8   the same engine with other attention kernels, and with fp8 weights
    program    `apps/flowgrpo` itself with shared weights; program_again: a second start, the compiled graphs kept;
               program_two: two cards, twice the samples; program_fp8: sampling in fp8;
               program_recomputed: old log-probs by the trainer; program_engine: with an engine beside it, asleep in
               updates; program_one_copy: an engine that samples with the trainer's own frozen weights;
               program_engine_again: a second start of the former
    growth     forward and update by batch and resolution
    sizes      SD3.5 Medium's size and Wan 5B's, beside plain diffusers
    ranks      the update over --ranks processes, replicated and sharded

Every timing comes after a check: trajectories replay to the log-probs that were recorded, variants give one gradient.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bench_blocks
from bench_blocks import uncompiled
from bench_common import CPU, Report, device, now, peak_gb, timed

ROOT = Path(__file__).resolve().parent.parent
DEADLINES = {
    "ceiling": 60,
    "attention": 60,
    "changes": 285,
    "precision": 120,
    "plain": 120,
    "rollouts": 285,
    "trainer": 285,
    "one_copy": 90,
    "lora_products": 60,
    "engine": 285,
    "engine_attention": 285,
    "engine_fp8": 285,
    "program": 285,
    "program_again": 200,
    "program_two": 285,
    "program_fp8": 240,
    "program_recomputed": 240,
    "program_engine": 400,
    "program_one_copy": 320,
    "program_engine_again": 200,
    "growth": 240,
    "sizes": 285,
    "ranks": 285,
}
"""Seconds that a part may take on a card."""
PARTS = tuple(DEADLINES)
ALL_CARDS = ("ranks", "program_two", "program_engine")
"""Parts that take every card of `--cards`."""


@dataclass(frozen=True)
class Size:
    """A model and what is asked of it."""

    transformer: dict[str, Any]
    pixels: int = 512
    steps: int = 10
    batch: int = 16
    micro: int = 8
    rank: int = 64


FULL = {"attention_head_dim": 128, "axes_dims_rope": [16, 56, 56]}
MODELS = {
    "qwen_image_20b": Size({"num_layers": 60, "num_attention_heads": 24, **FULL}),
    "qwen_image_2b": Size({"num_layers": 24, "num_attention_heads": 12, **FULL}),
    "tiny": Size({"num_layers": 2}, pixels=64, steps=4, batch=4, micro=2, rank=4),
}
PROMPT = (
    "a detailed oil painting of a red cat sitting on a blue chair in front of a wooden table with a green bottle and the "
    "word hello written on a sign, soft light, number "
)


# ------------------------------------------------------------------------------------------------------------- helpers


def make_folder(size: Size, folder: Path) -> Path:
    """A pipeline folder with the transformer's config alone, the tiny text encoder, and a full VAE for the large sizes."""
    import torch
    from ray_trainer.assets import builtin
    from safetensors.torch import load_file, save_file

    dtype, source = torch.float32 if CPU else torch.bfloat16, Path(builtin("models", "tiny_qwen_image"))
    large = size is not MODELS["tiny"]
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("diffusion_pytorch_model*" if large else "nothing"))
    for file in folder.rglob("*.safetensors"):
        save_file({k: v.to(dtype) for k, v in load_file(file).items()}, file, metadata={"format": "pt"})
    for config in (folder / "text_encoder" / "config.json",):
        config.write_text(config.read_text().replace('"float32"', f'"{str(dtype).removeprefix("torch.")}"'))
    config = folder / "transformer" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **size.transformer}))
    # The program reads names and shapes; the numbers come from `transformer_config` and the engine's pipeline.
    write_header(folder / "transformer" / "diffusion_pytorch_model.safetensors", config, "F32" if CPU else "BF16")
    if large:
        from diffusers import AutoencoderKLQwenImage

        shutil.rmtree(folder / "vae")
        torch.manual_seed(0)
        vae: Any = AutoencoderKLQwenImage()
        vae.to(dtype).save_pretrained(folder / "vae")
    return folder


def write_header(file: Path, config: Path, dtype: str) -> None:
    """A safetensors file whose data is a hole: it takes no room."""
    import torch
    from diffusers import QwenImageTransformer2DModel

    with torch.device("meta"):
        module = QwenImageTransformer2DModel.from_config(json.loads(config.read_text()))
    header, end = dict[str, Any](), 0
    for name, tensor in module.state_dict().items():
        start, end = end, end + tensor.numel() * (4 if dtype == "F32" else 2)
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        out.truncate(8 + len(text) + end)


def requests(size: Size, count: int, round_: int = 0, **changes: Any) -> list[Any]:
    """`count` samples of one prompt each `size.batch`."""
    from omni_rollout.types import GenerationRequest
    from sde_samplers.settings import SamplerSettings

    settings = SamplerSettings(
        size.pixels, size.pixels, changes.pop("steps", size.steps), true_cfg_scale=4.0, max_sequence_length=256,
        kind="flow_sde", noise_level=0.7, window=(0, 1),
    )  # fmt: skip
    return [
        GenerationRequest(
            f"{round_}-{i}", f"p{i // size.batch}", i % size.batch, f"{PROMPT}{i // size.batch}", seed=round_,
            settings=settings, negative_prompt=" ", **changes,
        )
        for i in range(count)
    ]  # fmt: skip


def make_payload(size: Size, folder: Path, version: int) -> Any:
    """An adapter on the attention layers as it is after some optimizer steps, the same for engine and trainer."""
    import torch
    from diffusers import QwenImageTransformer2DModel
    from lora_sync import LoRAPayload
    from model_specs import get_spec

    with torch.device("meta"):
        module = QwenImageTransformer2DModel.from_config(json.loads((folder / "transformer/config.json").read_text()))
    draw, tensors = torch.Generator(device()).manual_seed(version), dict[str, Any]()
    for name, child in module.named_modules():
        if isinstance(child, torch.nn.Linear) and name.endswith(get_spec("qwen_image").attention_targets):
            a = torch.randn(size.rank, child.in_features, generator=draw, device=device()) / size.rank
            b = torch.randn(child.out_features, size.rank, generator=draw, device=device()) * 1e-3
            tensors |= {f"{name}.lora_A.weight": a.cpu(), f"{name}.lora_B.weight": b.cpu()}
    return LoRAPayload.build(tensors, alphas=2.0 * size.rank, version=version)


def drawn_with(size: Size, **options: Any) -> Any:
    """How the samples of a batch were drawn."""
    from sde_samplers.settings import SamplerSettings

    return SamplerSettings(size.pixels, size.pixels, 10, kind="flow_sde", noise_level=0.7, **options)


def training_batch(samples: Any, size: Size, old: Any) -> Any:
    """A rollout's samples as an update takes them."""
    import torch

    data = samples.exclude("responses", "final_latents")
    data["advantages"] = torch.randn(len(samples), generator=torch.Generator().manual_seed(0))
    data["old_log_probs"] = old
    data.set_non_tensor("settings", drawn_with(size, true_cfg_scale=4.0))
    data.set_non_tensor("micro_batch_size", size.micro)
    return data


# --------------------------------------------------------------------------------------------------------------- parts


def ceiling(size: Size, folder: Path, report: Report) -> None:
    """What the card can do: the measure of everything else."""
    import torch

    side, dtype = (256, torch.float32) if CPU else (8192, torch.bfloat16)
    a, b = (torch.randn(side, side, device=device(), dtype=dtype) for _ in range(2))
    seconds, _ = timed(lambda: [a @ b for _ in range(10)])
    exact = a[:64].double() @ b[:, :64].double()
    off = float(((a @ b)[:64, :64].double() - exact).norm() / exact.norm())
    big = torch.randn((1 << 20) if CPU else (1 << 31), device=device(), dtype=dtype)
    copy, into = 0.0, torch.empty_like(big)
    copy, _ = timed(lambda: into.copy_(big))
    name = "CPU" if CPU else torch.cuda.get_device_name()
    memory = 0.0 if CPU else torch.cuda.get_device_properties(0).total_memory / 1e9
    rate, bytes_ = 20 * side**3 / seconds / 1e12, 2 * big.numel() * big.element_size()
    report("card", name=name, torch=torch.__version__, memory_gb=memory)
    report("matmul", tflops=rate, off_by=off, good=off < 1e-2)
    report("copy", gb_per_s=bytes_ / copy / 1e9, good=bool((into == big).all()))


def tflop(size: Size, folder: Path, batch: int, text: int) -> float:
    """Of one forward."""
    from model_specs import get_spec_for

    config = json.loads((folder / "transformer/config.json").read_text())
    return get_spec_for(str(folder)).flops(config, batch, drawn_with(size), text) / 1e12


def plain(size: Size, folder: Path, report: Report) -> None:
    """Stock diffusers and PEFT, as a script would use them."""
    import torch
    from diffusers import QwenImageTransformer2DModel
    from fsdp_diffusers_engine.loading import RandomSource
    from model_specs import get_spec
    from peft import LoraConfig

    config = json.loads((folder / "transformer/config.json").read_text())
    with torch.device("meta"):
        module = QwenImageTransformer2DModel.from_config(config)
    dtype = torch.float32 if CPU else torch.bfloat16
    module, source = module.to(dtype).to_empty(device=device()), RandomSource(0, torch.device(device()))
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(source.read(name, tuple(p.shape), tuple(slice(None) for _ in p.shape)))
    module.pos_embed.__init__(theta=10000, axes_dim=config["axes_dims_rope"], scale_rope=True)
    module.requires_grad_(False)
    targets = list(get_spec("qwen_image").attention_targets)
    module.add_adapter(LoraConfig(r=size.rank, lora_alpha=2 * size.rank, target_modules=targets))
    for p in module.parameters():
        if p.requires_grad:
            p.data = p.data.float()
    text, tokens = 75, (size.pixels // 16) ** 2

    def inputs(rows: int) -> dict[str, Any]:
        def draw(*shape: int) -> Any:
            return torch.randn(rows, *shape, device=device(), dtype=dtype)

        return {
            "hidden_states": draw(tokens, 64), "encoder_hidden_states": draw(text, config["joint_attention_dim"]),
            "timestep": torch.full((rows,), 0.5, device=device(), dtype=dtype), "return_dict": False,
            "encoder_hidden_states_mask": torch.ones(rows, text, device=device(), dtype=torch.bool),
            "img_shapes": [[(1, size.pixels // 16, size.pixels // 16)]] * rows,
        }  # fmt: skip

    autocast = torch.autocast(device(), torch.bfloat16, enabled=not CPU)
    batch = inputs(size.batch)
    with torch.no_grad(), autocast:
        good = bool(module(**batch)[0].isfinite().all())
        forward, _ = timed(lambda: module(**batch))
    report("forward", seconds=forward, tflops=tflop(size, folder, size.batch, text) / forward, good=good)
    report("rollout", images_per_s=size.batch / (2 * size.steps * forward), note="forwards alone")
    module.enable_gradient_checkpointing()
    module.train()
    batch = inputs(size.micro)

    def update() -> None:
        with autocast:
            loss = module(**batch)[0].float().square().mean()
        loss.backward()

    seconds, _ = timed(update)
    report(
        "update", seconds=seconds, useful_tflops=2 * tflop(size, folder, size.micro, text) / seconds, peak_gb=peak_gb()
    )
    report(
        "step",
        images_per_s=1 / (2 * size.steps * forward / size.batch + 4 * seconds / size.micro),
        note="rollout + update",
    )


BORROWER = """
import pickle, sys, time
loans = pickle.load(open(sys.argv[1], "rb"))
start = time.perf_counter()
tensors = {name: loan.open() for name, loan in loans.items()}
opened = time.perf_counter() - start
sums = [float(tensor.double().sum()) for tensor in tensors.values()]
next(iter(tensors.values())).fill_(7.0)
assert float(next(iter(tensors.values())).float().mean()) == 7.0
print(opened, sum(sums))
"""


def one_copy(size: Size, folder: Path, report: Report) -> None:
    """Lend linear layers, three of them as one, as an engine holds them, and read and write them from a second process."""
    import pickle

    import torch
    from lora_sync.one_copy import Layout, lend

    dtype, width, count = (torch.float32, 64, 3) if CPU else (torch.bfloat16, 3072, 60)

    def attention() -> torch.nn.ModuleDict:
        return torch.nn.ModuleDict(
            {f"to_{x}": torch.nn.Linear(width, width, device=device(), dtype=dtype) for x in "qkv"}
        )

    blocks = [torch.nn.ModuleDict({"attn": attention()}) for _ in range(count)]
    module = torch.nn.ModuleList(blocks)
    before = float(sum(p.detach().double().sum() for p in module.parameters()))
    rows = {"weight": (3 * width, width), "bias": (3 * width,)}
    wanted = {f"{i}.attn.to_qkv.{kind}": Layout(dtype, shape) for i in range(count) for kind, shape in rows.items()}
    start = now()
    loans = lend(module, wanted, "qwen_image")
    lent = now() - start
    file = folder / "loans"
    file.write_bytes(pickle.dumps(loans))
    done = subprocess.run([sys.executable, "-c", BORROWER, str(file)], capture_output=True, text=True, timeout=80)
    if done.returncode:
        raise RuntimeError(done.stderr[-600:])
    opened, found = map(float, done.stdout.split())
    changed = bool((module.get_parameter("0.attn.to_v.weight") == 7.0).all())
    held = sum(p.nbytes for p in module.parameters()) / 1e9
    good = changed and len(loans) == len(wanted) and abs(found - before) <= 1e-6 * max(abs(before), 1.0)
    report("one copy", gb=held, lend_s=lent, open_s=opened, tensors=len(loans), good=good)


def engine(size: Size, folder: Path, report: Report) -> None:
    """A vLLM-Omni engine alone on the card."""
    asyncio.run(_engine(size, folder, report))


async def _engine(size: Size, folder: Path, report: Report) -> None:
    import torch

    async with serving(size, folder, report) as (server, draw, rounds):
        base = await draw("rollout, no adapter", count=size.batch, repeat=1)
        for version in (1, 2, 3):
            await sync(size, folder, report, server, version)
        samples = await draw("rollout, adapter on")
        moved = float((samples["final_latents"][: size.batch] - base["final_latents"]).abs().max())
        report("adapter moves the samples", by=moved, good=moved > 0)
        torch.save({"samples": samples.cpu().to_dict(), "payload": 3}, folder / "engine_samples.pt")
        await profiled(size, report, server, next(rounds))
        weights = await server.weights_sum()
        for turn in ("first", "second"):
            with report.section(f"sleep and wake, {turn}"):
                start = time.perf_counter()
                await server.sleep()
                middle = time.perf_counter()
                await server.wake_up()
                times = {"sleep_s": middle - start, "wake_s": time.perf_counter() - middle}
                report(f"sleep and wake, {turn}", **times, good=await server.weights_sum() == weights)
        await draw("rollout after waking", count=size.batch, repeat=1)
        with report.section("rollout, adapter on, requests one by one", 40) as go:
            if go:

                async def late(request: Any, number: int) -> Any:
                    await asyncio.sleep(0.004 * number)
                    return await server.generate([request])

                wanted = requests(size, 2 * size.batch, next(rounds))
                before, start = (await server.health()).batches, time.perf_counter()
                await asyncio.gather(*(late(request, i) for i, request in enumerate(wanted)))
                seconds, sizes = time.perf_counter() - start, since(before, (await server.health()).batches)
                report(
                    "rollout, adapter on, requests one by one",
                    images_per_s=len(wanted) / seconds,
                    seconds=seconds,
                    batches=sizes,
                )
        with report.section("rollout, half the steps", 30) as go:
            if go:
                await draw("rollout, adapter on, half the steps", count=size.batch, steps=size.steps // 2, repeat=1)


async def profiled(size: Size, report: Report, server: Any, number: int) -> None:
    """Where a batch's time goes in an engine, which draws in this process."""
    import torch

    with report.section("profile"):
        with bench_blocks.traced() as kernels:
            start = time.perf_counter()
            await server.generate(requests(size, size.batch, number))
            wall = time.perf_counter() - start
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        bench_blocks.report_kernels(report, "rollout", wall, kernels, graphs=graphs)


@contextlib.asynccontextmanager
async def serving(size: Size, folder: Path, report: Report, name: str = "", **settings: Any) -> AsyncIterator[Any]:
    """An engine over random weights, with a function that draws and reports: (server, draw, round numbers)."""
    import torch
    from omni_rollout.config import DiffusionRolloutConfig, VllmOmniConfig
    from omni_rollout.vllm_omni.server import vLLMOmniHttpServer

    own = {"custom_pipeline_args": {"pipeline_class": "bench_pipeline.RandomQwenImage"}}
    own |= settings.pop("engine_kwargs", {})
    config = DiffusionRolloutConfig(
        backend="vllm_omni", dtype="float32" if CPU else "bfloat16",
        vllm_omni=VllmOmniConfig(
            max_num_seqs=size.batch, enforce_eager=CPU, engine_kwargs=own, request_batch_max_wait_ms=100.0, **settings
        ),
    )  # fmt: skip
    cards = (
        "" if CPU else os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    )  # named: it is as beside a trainer, and will sleep
    server = vLLMOmniHttpServer(config, str(folder), cuda_visible_devices=cards)
    report(f"start{name}", seconds=await server.launch_server())
    rounds = iter(range(1, 1000))

    async def draw(what: str, count: int = 2 * size.batch, repeat: int = 1, **changes: Any) -> Any:
        first, times = 0.0, list[float]()
        for number in range(repeat + 1):
            before, start = (await server.health()).batches, time.perf_counter()
            samples = await server.generate(requests(size, count, next(rounds), **changes))
            seconds = time.perf_counter() - start
            first, times = (seconds, times) if number == 0 else (first, [*times, seconds])
            sizes = since(before, (await server.health()).batches)
        best = sorted(times)[len(times) // 2]
        finite = all(bool(t.isfinite().all()) for t in samples.values() if torch.is_tensor(t) and t.is_floating_point())
        report(what + name, images_per_s=count / best, first_s=first, seconds=best, batches=sizes, good=finite)
        return samples

    try:
        yield server, draw, rounds
    finally:
        await server.shutdown()


def since(before: dict[int, int], after: dict[int, int]) -> dict[str, int]:
    """Batches by size that were drawn between two reports."""
    return {str(k): v - before.get(k, 0) for k, v in after.items() if v != before.get(k, 0)}


async def sync(size: Size, folder: Path, report: Report, server: Any, version: int) -> None:
    """Send an adapter and prove that it arrived."""
    from lora_sync import verify

    payload = make_payload(size, folder, version)
    start = time.perf_counter()
    verify(payload, await server.update_lora(payload))
    report("sync", seconds=time.perf_counter() - start, tensors=len(payload.tensors), good=True)


def engine_attention(size: Size, folder: Path, report: Report) -> None:
    """The engine with other attention kernels, one after the other."""
    for kernel in ("TORCH_SDPA",) if CPU else ("CUDNN_ATTN", "FLASH_ATTN"):
        with report.section(kernel, 60) as go:
            if go:
                os.environ.pop("DIFFUSION_ATTENTION_BACKEND", None)
                asyncio.run(_variant(size, folder, report, f", {kernel}", rollout_attn_backend=kernel))


def engine_fp8(size: Size, folder: Path, report: Report) -> None:
    """The engine with its weights in fp8."""
    options = {} if CPU else {"engine_kwargs": {"quantization": "fp8"}}
    asyncio.run(_variant(size, folder, report, ", fp8", **options))


async def _variant(size: Size, folder: Path, report: Report, name: str, **settings: Any) -> None:
    import torch

    async with serving(size, folder, report, name, **settings) as (server, draw, _):
        await sync(size, folder, report, server, 3)
        samples = await draw("rollout, adapter on")
        torch.save({"samples": samples.cpu().to_dict()}, folder / f"engine_samples{name.replace(', ', '_')}.pt")
        if "fp8" in name:
            await profiled(size, report, server, 999)


def build_engine(size: Size, folder: Path, **options: Any) -> Any:
    """The trainer's engine with random weights drawn on the card."""
    from fsdp_diffusers_engine import (
        DiffusionModelConfig,
        FSDPEngineConfig,
        FSDPOptimizerConfig,
        PPODiffusersFSDPEngine,
    )

    config = json.loads((folder / "transformer/config.json").read_text())
    model = DiffusionModelConfig(
        path=str(folder), architecture="qwen_image", transformer_config=config, lora_rank=size.rank, lora_alpha=2 * size.rank,
        target_modules="attention",
    )  # fmt: skip
    engine = PPODiffusersFSDPEngine(
        model, FSDPEngineConfig(model_dtype="fp32" if CPU else "bf16", **options), FSDPOptimizerConfig(lr=1e-4)
    )
    engine.initialize()
    return engine


@dataclass
class Own:
    """The trainer's engine and the backend that samples with its weights."""

    size: Size
    engine: Any
    backend: Any
    report: Report
    rounds: Iterator[int]

    @classmethod
    def build(cls, size: Size, folder: Path, report: Report) -> Own:
        """Random weights, an adapter that is not zero."""
        import torch
        from lora_sync import apply_lora
        from omni_rollout.diffusers_backend import DiffusersBackend

        start = now()
        engine = build_engine(size, folder)
        report("start", seconds=now() - start, weights_gb=peak_gb())
        apply_lora(engine.module, make_payload(size, folder, 3), "default")
        spec, dtype = engine.spec, torch.float32 if CPU else torch.bfloat16
        parts = (
            spec.load_encoder(folder, dtype, device()),
            spec.load_vae(folder, dtype, device()),
            spec.load_scheduler(folder),
        )
        backend = DiffusersBackend(
            spec, engine.module, *parts, max_batch_size=size.batch, device=device(), adapter_ctx=engine.use_adapter
        )
        return cls(size, engine, backend, report, iter(range(1, 1000)))

    def replay(self, samples: Any) -> Any:
        """The trainer's log-probs of samples."""
        from fsdp_diffusers_engine import gather_outputs

        with self.engine.eval_mode():
            return gather_outputs(self.engine.forward_backward_batch(samples, None, forward_only=True))[
                "log_probs"
            ].cpu()

    def floor(self, samples: Any, most: float = 5e-3) -> dict[str, Any]:
        """How far the trainer's log-probs are from those of who drew; the share of the samples that corrected weights leave."""
        off = (
            self.replay(training_batch(samples, self.size, samples["rollout_log_probs"])) - samples["rollout_log_probs"]
        )
        weights = off.double().exp()
        return {
            "largest_log_prob_gap": float(off.abs().max()),
            "mean_log_prob_gap": float(off.abs().mean()),
            "effective_share": float(weights.sum() ** 2 / weights.square().sum() / weights.numel()),
            "good": bool(off.abs().max() < most),
        }

    def rollout(self, what: str) -> Any:
        """Draw a batch twice and report the second; its samples."""

        def draw() -> tuple[Any, float]:
            start = now()
            with self.engine.eval_mode():
                samples = self.backend.generate(requests(self.size, self.size.batch, next(self.rounds)))
            return samples, now() - start

        _, first = draw()
        before = dict(self.backend.health().seconds)
        samples, seconds = draw()
        phases = {f"{k}_s": v - before[k] for k, v in self.backend.health().seconds.items() if k != "sync"}
        phases["others_s"] = seconds - sum(phases.values())
        speed = {"images_per_s": self.size.batch / seconds, "first_s": first, "seconds": seconds}
        self.report(what, **speed, **phases, peak_gb=peak_gb())
        return samples


def rollouts(size: Size, folder: Path, report: Report) -> None:
    """The trainer's own rollout in each way that there is, and how far its log-probs are from the trainer's."""
    own = Own.build(size, folder, report)
    for fp8, merged in ((False, False), (True, False), (True, True), (False, True)):
        what = f"rollout{', fp8' if fp8 else ''}{', adapter merged' if merged else ''}"
        with report.section(what, 30) as go:
            if not go or (CPU and fp8):
                continue
            if merged:
                own.engine.model_config.lora.merge = True
                named, _ = own.engine.get_per_tensor_param(layered_summon=True, adapter_name="default")
                start = now()
                own.backend.hold_weights(named, next(own.rounds), fold=True)
                report(f"merging{', fp8' if fp8 else ''}", seconds=now() - start)
            own.backend.fp8 = fp8
            samples = own.rollout(what)
            report(f"log-prob floor, {what}", **own.floor(samples, 0.1 if fp8 or merged else 5e-3))
            own.backend._weights._folded.clear()


def trainer(size: Size, folder: Path, report: Report) -> None:
    """The trainer's own rollout, replay and update on one set of weights."""
    import torch
    from diffusion_losses import DiffusionLossConfig
    from fsdp_diffusers_engine import DiffusionLoss
    from lora_sync import apply_lora

    own = Own.build(size, folder, report)
    engine, replay, rollout, floor = own.engine, own.replay, own.rollout, own.floor
    samples = rollout("rollout")
    data = training_batch(samples, size, samples["rollout_log_probs"])
    report("log-prob floor of the own rollout", **floor(samples))
    seconds, _ = timed(lambda: replay(data), 1)
    texts = samples["prompt_embeds"].shape[1], samples["negative_prompt_embeds"].shape[1]
    work = 2 * sum(tflop(size, folder, len(samples), text) for text in texts)  # two trained steps
    report("replay", seconds=seconds, tflops=work / seconds, images_per_s=len(samples) / seconds)

    loss = DiffusionLoss(DiffusionLossConfig(clip_ratio=1.0))
    names = [name for name in engine.trainable if ".to_q." in name and "lora_B" in name][:8]
    wanted: dict[str, Any] = {}

    def update(what: str, batch: Any = data, recompute: int | None = None, repeat: int = 2) -> None:
        engine.recompute.chosen.clear()
        engine.recompute.count = recompute
        engine.optimizer_zero_grad()
        peak_gb()

        def step() -> None:
            engine.optimizer_zero_grad()
            engine.forward_backward(batch, loss)

        try:
            seconds, first = timed(step, repeat)
        except torch.cuda.OutOfMemoryError as error:
            engine.optimizer_zero_grad()
            torch.cuda.empty_cache()
            report(what, failed=str(error)[:120])
            return
        found = {name: engine.trainable[name].grad.clone() for name in names}
        wanted.update({} if wanted else found)
        apart = sum(float((found[n] - wanted[n]).square().sum()) for n in names)
        off = (apart / max(sum(float(wanted[n].square().sum()) for n in names), 1e-30)) ** 0.5
        chosen = sorted(set(engine.recompute.chosen.values())) if recompute is None else [recompute]
        share = {"useful_tflops": 2 * work * len(batch) / len(samples) / seconds, "peak_gb": peak_gb()}
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        values = {"recomputed": chosen, "gradient_off_by": off, "graphs": graphs}
        report(what, seconds=seconds, first_s=first, good=off < 0.15, **values, **share)

    update("update, as many recomputed as memory asks")
    start = now()
    engine.step()
    report("optimizer step", seconds=now() - start)
    apply_lora(engine.module, make_payload(size, folder, 3), "default")
    for file in sorted(folder.glob("engine_samples*.pt")):
        name = file.stem.removeprefix("engine_samples").replace("_", ", ", 1)
        with report.section(f"log-prob floor of the engine's rollout{name}"):
            from tensordict import TensorDict

            theirs = TensorDict(torch.load(file)["samples"], batch_size=[2 * size.batch])[: size.batch]
            report(f"log-prob floor of the engine's rollout{name}", **floor(theirs, 0.1 if "fp8" in name else 5e-3))
    with report.section("update, all recomputed", 60) as go:
        if go:
            update("update, all recomputed", recompute=len(engine.blocks), repeat=1)
    with report.section("update, all recomputed, masked attention", 60) as go:
        if go:
            masked = data.clone()
            pad = torch.nn.functional.pad
            masked["prompt_embeds"] = pad(data["prompt_embeds"], (0, 0, 0, 1))
            masked["prompt_embeds_mask"] = pad(data["prompt_embeds_mask"], (0, 1))
            masked["prompt_embeds_mask"][:: size.micro, -1] = True  # one longer row in each micro-batch
            update("update, all recomputed, masked attention", masked, recompute=len(engine.blocks), repeat=1)
    with report.section("not compiled", 75) as go, uncompiled(engine):
        if go:
            update("update, not compiled, all recomputed", recompute=len(engine.blocks), repeat=1)
            rollout("rollout, not compiled")


def ranks(size: Size, folder: Path, report: Report) -> None:
    """The update over several processes; each of them runs this, rank 0 reports."""
    import torch
    import torch.distributed as dist
    from diffusion_losses import DiffusionLossConfig
    from fsdp_diffusers_engine import DiffusionLoss
    from fsdp_diffusers_engine.sharding import Layout, average_gradients
    from tensordict import TensorDict

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if not CPU:
        torch.cuda.set_device(rank)
    dist.init_process_group("gloo" if CPU else "cpu:gloo,cuda:nccl")
    waiting = dist.new_group(backend="gloo")  # waits on the host: the card stays free
    draw = torch.Generator().manual_seed(0)
    tokens, text = (size.pixels // 16) ** 2, 75
    channels = json.loads((folder / "transformer/config.json").read_text())["joint_attention_dim"]
    count = 2 * size.micro * world
    latents = torch.randn(count, 1, tokens, 64, generator=draw)
    data = TensorDict(
        {
            "latents": latents, "next_latents": latents + 0.05 * torch.randn(latents.shape, generator=draw),
            "step_index": torch.zeros(count, 1, dtype=torch.long), "sigmas": torch.linspace(1, 0, 11).expand(count, -1),
            "advantages": torch.randn(count, generator=draw), "old_log_probs": torch.zeros(count, 1),
            "prompt_embeds": torch.randn(count, text, channels, generator=draw),
            "prompt_embeds_mask": torch.ones(count, text, dtype=torch.bool),
        },
        batch_size=[count],
    )  # fmt: skip
    data.set_non_tensor("settings", drawn_with(size))
    data.set_non_tensor("micro_batch_size", size.micro)
    loss = DiffusionLoss(DiffusionLossConfig(clip_ratio=1e9))
    for what, sharding in (("replicated", "replicate"), ("sharded", "shard")):
        engine = build_engine(size, folder, sharding=sharding)
        part = data[engine.layout.dp_rank :: world]
        found: list[float] = []

        def step(engine: Any = engine, part: Any = part, found: list[float] = found) -> None:
            engine.forward_backward(part, loss)
            found.append(engine.step()["actor/grad_norm"])

        seconds, first = timed(step, 5)
        parameters = list(engine.trainable.values())
        shares: dict[str, float] = {}
        if not engine.layout.sharded:  # the exchange; this rank's own work, beside the other ranks' and while they wait
            engine.forward_backward(part, loss)
            shares = {"exchange_gb": sum(p.numel() * p.element_size() for p in parameters) / 1e9}
            shares["exchange_s"], _ = timed(lambda e=engine, p=parameters: average_gradients(p, e.layout))  # type: ignore[misc]
            whole, engine.layout = engine.layout, Layout()
            shares["own_work_s"], _ = timed(step)
            dist.barrier(waiting)
            if rank == 0:
                shares["own_work_alone_s"], _ = timed(step)
            dist.barrier(waiting)
            engine.layout = whole
        if not CPU:
            shares["alloc_retries"] = torch.cuda.memory_stats()["num_alloc_retries"]
        work = 2 * tflop(size, folder, count, text)
        chosen = sorted(set(engine.recompute.chosen.values()))
        if rank == 0:
            values = {"seconds": seconds, "first_s": first, "useful_tflops_each": work / seconds / world, **shares}
            report(f"update, {what}", ranks=world, **values, recomputed=chosen, grad_norm=found[0], peak_gb=peak_gb())
        del engine
        if not CPU:
            torch.cuda.empty_cache()
    dist.destroy_process_group()


def program_command(size: Size, folder: Path, work: Path, *keys: str) -> list[str]:
    """`apps/flowgrpo` with the folder's model, its prompts and its run in `work`."""
    (work / "train.jsonl").write_text("".join(json.dumps({"prompt": PROMPT + str(i)}) + "\n" for i in range(16)))
    (work / "val.jsonl").write_text(json.dumps({"prompt": PROMPT + "99"}) + "\n")
    config = json.loads((folder / "transformer/config.json").read_text())
    pixels, batch = size.pixels, size.batch
    return [
        sys.executable, str(ROOT / "apps/flowgrpo"), "recipe=tiny_flow_grpo", f"model.path={folder}",
        "model.architecture=qwen_image", f"model.lora_rank={size.rank}", f"model.lora_alpha={2 * size.rank}",
        "model.target_modules=attention", "model.enable_gradient_checkpointing=true",
        f"model.transformer_config={json.dumps(config).replace(' ', '')}",
        f"actor.fsdp_config.model_dtype={'fp32' if CPU else 'bf16'}", f"rollout.dtype={'float32' if CPU else 'bfloat16'}",
        "actor.diffusion_loss.ref_kl_coef=0", f"actor.ppo_mini_batch_size={batch}",
        f"actor.ppo_micro_batch_size_per_gpu={size.micro}", f"rollout.pipeline.height={pixels}",
        f"rollout.pipeline.width={pixels}", f"rollout.pipeline.num_inference_steps={size.steps}",
        "rollout.pipeline.true_cfg_scale=4.0", "rollout.pipeline.max_sequence_length=256",
        "rollout.algo.sde_window_size=2", f"rollout.algo.sde_window_range=[0,{size.steps // 2}]", f"rollout.n={batch}",
        f"rollout.max_batch_size={batch}", "data.prompts_per_step=2", f"data.train_file={work}/train.jsonl",
        f"data.val_file={work}/val.jsonl", "data.val_max_prompts=1", "rollout.val_kwargs.n=1",
        f"rollout.val_kwargs.pipeline.height={pixels}", f"rollout.val_kwargs.pipeline.width={pixels}",
        "rollout.val_kwargs.pipeline.num_inference_steps=2", "reward.name=jpeg_compressibility", "reward.num_workers=2",
        "trainer.total_steps=4", "trainer.val_before_train=false", "trainer.val_every=0", "trainer.save_every=0",
        f"trainer.run_dir={work}/run", "trainer.on_existing=delete", "ray.object_store_mb=2048", *keys,
    ]  # fmt: skip


def program(size: Size, folder: Path, report: Report, *keys: str) -> None:
    """Four steps of `apps/flowgrpo`, told by its own metrics."""
    with tempfile.TemporaryDirectory() as made:
        work = Path(made)
        command = program_command(size, folder, work, *keys)
        start = time.perf_counter()
        running = subprocess.Popen(command)  # its words go to this part's log as they come
        metrics, told = work / "run" / "metrics.jsonl", 0
        while True:  # a step is reported when it is done, so that a run cut short still says what it measured
            ended = running.poll() is not None
            lines = metrics.read_text().splitlines(keepends=True)[told:] if metrics.exists() else []
            for line in (each for each in lines if each.endswith("\n")):
                row = json.loads(line)
                shown = ("time/", "perf/", "sync/", "forwards/")
                kept = {k: v for k, v in row.items() if k.startswith(shown) or k == "actor/rollout_log_prob_diff_max"}
                report(f"step {row.get('step')}", after=time.perf_counter() - start, **kept)
                told += 1
            if ended:
                break
            time.sleep(0.2)
        if running.returncode:
            raise RuntimeError(f"exit {running.returncode}; this part's log says why")
        report("whole run", seconds=time.perf_counter() - start)


def program_again(size: Size, folder: Path, report: Report) -> None:
    """The second start on a machine: what was compiled is there."""
    program(size, folder, report, "trainer.total_steps=1")


def program_two(size: Size, folder: Path, report: Report) -> None:
    """Two cards and twice the samples: a step should take as long as `program`'s."""
    keys = ("trainer.num_workers=2", "data.prompts_per_step=4", f"actor.ppo_mini_batch_size={2 * size.batch}")
    program(size, folder, report, *keys, "trainer.total_steps=3")


def program_fp8(size: Size, folder: Path, report: Report) -> None:
    """Three steps that sample in fp8."""
    program(size, folder, report, "trainer.total_steps=3", "rollout.fp8=true")


def program_recomputed(size: Size, folder: Path, report: Report) -> None:
    """Three steps whose old log-probs are the trainer's own."""
    program(size, folder, report, "trainer.total_steps=3", "algorithm.old_log_probs=trainer")


def program_engine(
    size: Size, folder: Path, report: Report, *keys: str, sleep: str = "rollout.vllm_omni.enable_sleep_mode=true"
) -> None:
    """The same with a vLLM-Omni engine: on a card of its own where there are two, else asleep during updates."""
    own = "rollout.vllm_omni.engine_kwargs={custom_pipeline_args: {pipeline_class: bench_pipeline.RandomQwenImage}}"
    eager = f"rollout.vllm_omni.enforce_eager={str(CPU).lower()}"
    program(size, folder, report, "rollout.backend=vllm_omni", own, eager, sleep, *keys)


def program_one_copy(size: Size, folder: Path, report: Report) -> None:
    """An engine that never sleeps and borrows the trainer's frozen weights."""
    program_engine(size, folder, report, "trainer.total_steps=3", sleep="rollout.vllm_omni.enable_sleep_mode=false")


def program_engine_again(size: Size, folder: Path, report: Report) -> None:
    """The second start on a machine, with an engine that sleeps."""
    program_engine(size, folder, report, "trainer.total_steps=2")


# ---------------------------------------------------------------------------------------------------------- the parent


def run_part(
    part: str, options: argparse.Namespace, folder: Path, into: Path, log: Path, cards: str | None, seconds: float
) -> subprocess.Popen[bytes]:
    """Start one part in a process group of its own."""
    env = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1" if CPU else "6", **os.environ}
    env["PYTHONPATH"] = f"{ROOT / 'tools'}:{env.get('PYTHONPATH', '')}"
    env["BENCH_END"] = str(time.time() + seconds)
    if not part.startswith(("engine", "program")):
        env.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    if cards is not None:
        env["CUDA_VISIBLE_DEVICES"] = cards
    command = [
        sys.executable,
        __file__,
        "--model",
        options.model,
        "--child",
        part,
        "--folder",
        str(folder),
        "--into",
        str(into),
    ]
    if part == "ranks":
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}", *command[1:]
        ]  # fmt: skip
    with log.open("wb") as out:
        return subprocess.Popen(command, env=env, stdout=out, stderr=out, start_new_session=True)


def main() -> int:
    """Run the parts and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["ceiling", "plain", "trainer"])
    parser.add_argument("--cards", nargs="+", help="run parts side by side, one at a time on each of these, e.g. 0 1")
    parser.add_argument("--ranks", type=int, default=2, help="processes of the part `ranks`")
    parser.add_argument("--limit", type=float, default=570.0, help="seconds for all parts together")
    parser.add_argument("--out", type=Path, help="file for the results, as JSON lines")
    parser.add_argument("--logs", type=Path, help="folder for the parts' own output")
    for hidden in ("--child", "--folder", "--into"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    size = MODELS[options.model]
    if options.child:
        report = Report(Path(options.into), options.child)
        try:
            if options.child in bench_blocks.PARTS:
                bench_blocks.PARTS[options.child](options.model == "tiny", report)
            else:
                globals()[options.child](size, Path(options.folder), report)
        except Exception as error:
            traceback.print_exc()
            report("failed", good=False, error=f"{type(error).__name__}: {error}"[-900:])
            return 1
        report("done", seconds=time.perf_counter() - _STARTED)
        return 0
    end = time.monotonic() + options.limit
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None) as made:
        folder, into = Path(made) / "model", options.out or Path(made) / "results.jsonl"
        if set(options.parts) - {"ceiling", *bench_blocks.PARTS}:
            make_folder(size, folder)
        logs = options.logs or Path(made)
        logs.mkdir(parents=True, exist_ok=True)
        into.unlink(missing_ok=True)
        into.touch()
        failed = schedule(options, folder, into, logs, end)
        rows = [json.loads(line) for line in into.read_text().splitlines()]
    print(table(rows))
    failed += [f"{row['part']}: {row['what']}" for row in rows if row.get("good") is False]
    print(f"failed: {', '.join(failed)}" if failed else "all good")
    return 1 if failed else 0


def schedule(options: argparse.Namespace, folder: Path, into: Path, logs: Path, end: float) -> list[str]:
    """Run the parts, one at a time on each card; returns what did not end well."""
    waiting, failed = list(options.parts), list[str]()
    free: list[str | None] = list(options.cards or [None])
    every = len(free)
    running: list[tuple[str, subprocess.Popen[bytes], list[str | None], float]] = []
    try:
        while waiting or running:
            whole = bool(waiting) and waiting[0] in ALL_CARDS
            if waiting and time.monotonic() < end and len(free) >= (every if whole else 1):
                part, mine = waiting.pop(0), [free.pop(0) for _ in range(every if whole else 1)]
                cards = None if mine == [None] else ",".join(card or "" for card in mine)
                seconds = min(DEADLINES[part], end - time.monotonic())
                process = run_part(part, options, folder, into, logs / f"{part}.log", cards, seconds)
                running.append((part, process, mine, time.monotonic() + seconds))
            elif waiting and not running:
                failed += [f"{part}: not started" for part in waiting]
                break
            for entry in list(running):
                part, process, mine, limit = entry
                late = time.monotonic() > limit
                if process.poll() is None and not late:
                    continue
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                running.remove(entry)
                free += mine
                if late or process.returncode:
                    failed.append(f"{part}: {'out of time' if late else f'exit {process.returncode}'}")
                    print(f"-- {part}\n{(logs / f'{part}.log').read_text(errors='replace')[-1500:]}", flush=True)
            time.sleep(0.2)
    finally:
        for _, process, _, _ in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return failed


def table(rows: list[dict[str, Any]]) -> str:
    """One line a result; speeds also as a share of the ceiling that was measured in the same run."""
    top = next((row["tflops"] for row in rows if row["what"] == "matmul"), None)
    lines = []
    for row in rows:
        row = dict(row)
        part, what = row.pop("part"), row.pop("what")
        for key in ("tflops", "useful_tflops", "useful_tflops_each"):
            if top and key in row and part != "ceiling":
                row[key.replace("tflops", "share")] = round(row[key] / top, 3)
        lines.append(f"{part:8} {what:45} " + "  ".join(f"{k}={_short(v)}" for k, v in row.items()))
    return "\n".join(lines)


def _short(value: Any) -> str:
    return (
        f"{value:.4g}"
        if isinstance(value, float)
        else json.dumps(value)
        if isinstance(value, (dict, list))
        else str(value)
    )


_STARTED = time.perf_counter()

if __name__ == "__main__":
    sys.exit(main())
