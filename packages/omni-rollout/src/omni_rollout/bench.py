"""How fast a backend draws: pictures per second, what its batches looked like, where the time went."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from sde_samplers.settings import SamplerSettings

from .config import Backend, DiffusionRolloutConfig, Dtype, VllmOmniConfig
from .types import GenerationRequest


def bench(
    model: str,
    backend: Backend = "diffusers",
    *,
    samples: int = 96,
    group: int = 16,
    batch: int = 64,
    rounds: int = 3,
    dtype: Dtype = "float32",
    device: str = "cpu",
    settings: SamplerSettings,
) -> dict[str, Any]:
    """Draw `samples` pictures `rounds` times after one warm-up, in groups of `group` samples a prompt.

    Returns plain values, JSON-ready.
    """
    requests = [
        GenerationRequest(
            f"b{i}",
            f"p{i // group}",
            i % group,
            f"number {i // group}",
            seed=0,
            settings=settings,
            negative_prompt=" " if settings.guided else None,
        )
        for i in range(samples)
    ]
    return asyncio.run(_bench(model, backend, requests, batch, rounds, dtype, device))


async def _bench(
    model: str, backend: Backend, requests: list[GenerationRequest], batch: int, rounds: int, dtype: Dtype, device: str
) -> dict[str, Any]:
    start = time.perf_counter()
    target: Any
    if backend == "vllm_omni":
        from .vllm_omni.server import vLLMOmniHttpServer

        config = DiffusionRolloutConfig(
            backend=backend, dtype=dtype, vllm_omni=VllmOmniConfig(max_num_seqs=batch, enforce_eager=device == "cpu")
        )
        target = vLLMOmniHttpServer(config, model)
        await target.launch_server()
    else:
        import torch

        from .diffusers_backend import DiffusersBackend

        target = DiffusersBackend.from_pretrained(
            model, dtype=getattr(torch, dtype), device=device, max_batch_size=batch
        )
    started = time.perf_counter() - start
    await _answer(target.generate(requests))
    before, times = await _answer(target.health()), []
    for _ in range(rounds):
        begin = time.perf_counter()
        await _answer(target.generate(requests))
        times.append(time.perf_counter() - begin)
    after = await _answer(target.health())
    if hasattr(target, "shutdown"):
        await target.shutdown()
    count = rounds * len(requests)
    return {
        "backend": backend,
        "model": model,
        "start_s": round(started, 2),
        "images_per_s": round(count / sum(times), 2),
        "best_round_s": round(min(times), 3),
        "batches": {str(size): n - before.batches.get(size, 0) for size, n in sorted(after.batches.items())},
        "seconds_per_image": {
            phase: round((seconds - before.seconds.get(phase, 0.0)) / count, 5)
            for phase, seconds in after.seconds.items()
            if phase not in ("start", "sync")
        },
    }


async def _answer(answer: Any) -> Any:
    """Of a backend's method, which an engine's server has as a coroutine."""
    return await answer if asyncio.iscoroutine(answer) else answer


def as_text(result: dict[str, Any]) -> str:
    """One value a line."""
    return "\n".join(f"{name:18} {json.dumps(value)}" for name, value in result.items())
