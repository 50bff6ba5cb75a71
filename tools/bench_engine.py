"""Parts of `bench_gpu.py`: a vLLM-Omni engine alone on a card, and weights that another process uses where they lie."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from bench_common import CPU, Report, device, now, profiled
from bench_model import Size, make_payload, requests

PIPELINE = "bench_pipeline.RandomQwenImage"


@contextlib.asynccontextmanager
async def serving(size: Size, folder: Path, report: Report, name: str = "", **settings: Any) -> AsyncIterator[Any]:
    """An engine over random weights, with a function that draws and reports: (server, draw, round numbers)."""
    import torch
    from omni_rollout.config import DiffusionRolloutConfig, VllmOmniConfig
    from omni_rollout.vllm_omni.server import vLLMOmniHttpServer

    own = {"custom_pipeline_args": {"pipeline_class": PIPELINE}, **settings.pop("engine_kwargs", {})}
    config = DiffusionRolloutConfig(
        backend="vllm_omni", dtype="float32" if CPU else "bfloat16",
        vllm_omni=VllmOmniConfig(
            max_num_seqs=size.batch, enforce_eager=CPU, engine_kwargs=own, request_batch_max_wait_ms=100.0, **settings
        ),
    )  # fmt: skip
    # Cards are named: it is as beside a trainer, and will sleep.
    cards = "" if CPU else os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    server = vLLMOmniHttpServer(config, str(folder), cuda_visible_devices=cards)
    report(f"start{name}", seconds=await server.launch_server())
    rounds = iter(range(1, 1000))

    async def draw(what: str, count: int = 2 * size.batch, steps: int | None = None) -> Any:
        """Draw twice, report the second."""
        times = list[float]()
        for _ in range(2):
            before, start = (await server.health()).batches, time.perf_counter()
            samples = await server.generate(requests(size, count, next(rounds), steps))
            times.append(time.perf_counter() - start)
            sizes = since(before, (await server.health()).batches)
        first, seconds = times
        finite = all(bool(t.isfinite().all()) for t in samples.values() if torch.is_tensor(t) and t.is_floating_point())
        speed = {"images_per_s": count / seconds, "first_s": first, "seconds": seconds}
        report(what + name, **speed, batches=sizes, good=finite)
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


async def profile(size: Size, report: Report, server: Any, number: int) -> None:
    """Where a batch's time goes in an engine, which draws in this process."""
    with report.section("profile"), profiled(report, "rollout"):
        await server.generate(requests(size, size.batch, number))


def engine(size: Size, folder: Path, report: Report) -> None:
    """A vLLM-Omni engine alone on the card."""
    asyncio.run(_engine(size, folder, report))


async def _engine(size: Size, folder: Path, report: Report) -> None:
    import torch

    async with serving(size, folder, report) as (server, draw, rounds):
        base = await draw("rollout, no adapter", size.batch)
        for version in (1, 2, 3):
            await sync(size, folder, report, server, version)
        samples = await draw("rollout, adapter on")
        moved = float((samples["final_latents"][: size.batch] - base["final_latents"]).abs().max())
        report("adapter moves the samples", by=moved, good=moved > 0)
        torch.save(samples.cpu().to_dict(), folder / "engine_samples.pt")
        await profile(size, report, server, next(rounds))
        weights = await server.weights_sum()
        for turn in ("first", "second"):
            with report.section(f"sleep and wake, {turn}"):
                start = time.perf_counter()
                await server.sleep()
                middle = time.perf_counter()
                await server.wake_up()
                times = {"sleep_s": middle - start, "wake_s": time.perf_counter() - middle}
                report(f"sleep and wake, {turn}", **times, good=await server.weights_sum() == weights)
        await draw("rollout after waking", size.batch)
        with report.section("rollout, adapter on, requests one by one", 40) as go:
            if go:

                async def late(request: Any, number: int) -> Any:
                    await asyncio.sleep(0.004 * number)
                    return await server.generate([request])

                wanted = requests(size, 2 * size.batch, next(rounds))
                before, start = (await server.health()).batches, time.perf_counter()
                await asyncio.gather(*(late(request, i) for i, request in enumerate(wanted)))
                seconds, sizes = time.perf_counter() - start, since(before, (await server.health()).batches)
                speed = {"images_per_s": len(wanted) / seconds, "seconds": seconds}
                report("rollout, adapter on, requests one by one", **speed, batches=sizes)
        with report.section("rollout, half the steps", 30) as go:
            if go:
                await draw("rollout, adapter on, half the steps", size.batch, size.steps // 2)


def engine_attention(size: Size, folder: Path, report: Report) -> None:
    """The engine with other attention kernels, one after the other."""
    for kernel in ("TORCH_SDPA",) if CPU else ("CUDNN_ATTN", "FLASH_ATTN"):
        with report.section(kernel, 60) as go:
            if go:
                os.environ.pop("DIFFUSION_ATTENTION_BACKEND", None)
                asyncio.run(_variant(size, folder, report, f", {kernel}", rollout_attn_backend=kernel))


def engine_blocks(size: Size, folder: Path, report: Report) -> None:
    """The engine with its blocks compiled as they come."""
    here = "omni_rollout.vllm_omni"
    with patch(f"{here}.denoise.tune_compiler"), patch(f"{here}.pipelines.qwen_attention.let_compile"):
        asyncio.run(_variant(size, folder, report, ", blocks as they come"))


def engine_fp8(size: Size, folder: Path, report: Report) -> None:
    """The engine with its weights in fp8."""
    options = {} if CPU else {"engine_kwargs": {"quantization": "fp8"}}
    asyncio.run(_variant(size, folder, report, ", fp8", **options))


async def _variant(size: Size, folder: Path, report: Report, name: str, **settings: Any) -> None:
    import torch

    async with serving(size, folder, report, name, **settings) as (server, draw, rounds):
        await sync(size, folder, report, server, 3)
        samples = await draw("rollout, adapter on")
        torch.save(samples.cpu().to_dict(), folder / f"engine_samples{name.replace(', ', '_')}.pt")
        if name.startswith((", fp8", ", blocks")):
            await profile(size, report, server, next(rounds))


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
    import torch
    from lora_sync.one_copy import Layout, lend

    dtype, width, count = (torch.float32, 64, 3) if CPU else (torch.bfloat16, 3072, 60)

    def attention() -> torch.nn.ModuleDict:
        return torch.nn.ModuleDict(
            {f"to_{x}": torch.nn.Linear(width, width, device=device(), dtype=dtype) for x in "qkv"}
        )

    module = torch.nn.ModuleList(torch.nn.ModuleDict({"attn": attention()}) for _ in range(count))
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
