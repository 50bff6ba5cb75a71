"""How fast a backend draws from a model folder: pictures per second, what its batches looked like, where the time went.

    python tools/bench_rollout.py --model FOLDER --backend diffusers|vllm_omni --height 512 --width 512 --steps 10

Draws `--samples` pictures `--rounds` times after one warm-up, `--group` of them for each prompt. Prints a value a line, or one
JSON object with `--json`. `tools/bench_gpu.py` measures a full-size model with random weights, which needs no folder.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from typing import Any

from omni_rollout.config import DiffusionRolloutConfig, VllmOmniConfig
from omni_rollout.types import GenerationRequest
from sde_samplers.settings import SamplerSettings


async def bench(options: argparse.Namespace) -> dict[str, Any]:
    """Plain values, JSON-ready."""
    requests, start = requests_of(options), time.perf_counter()
    target = await open_backend(options)
    started = time.perf_counter() - start
    await _answer(target.generate(requests))
    before, times = await _answer(target.health()), []
    for _ in range(options.rounds):
        begin = time.perf_counter()
        await _answer(target.generate(requests))
        times.append(time.perf_counter() - begin)
    after = await _answer(target.health())
    if hasattr(target, "shutdown"):
        await target.shutdown()
    count = options.rounds * len(requests)
    return {
        "backend": options.backend,
        "model": options.model,
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


def requests_of(options: argparse.Namespace) -> list[GenerationRequest]:
    """`--samples` requests, in groups."""
    settings = SamplerSettings(
        height=options.height,
        width=options.width,
        num_frames=options.frames,
        num_inference_steps=options.steps,
        max_sequence_length=options.max_tokens,
        true_cfg_scale=options.cfg,
        guidance_scale=options.guidance,
        kind="flow_sde",
        noise_level=0.7,
        window=tuple(range(min(2, options.steps - 1))),
    )
    negative = " " if settings.guided else None
    groups = [divmod(i, options.group) for i in range(options.samples)]
    return [
        GenerationRequest(f"b{g}-{i}", f"p{g}", i, f"number {g}", seed=0, settings=settings, negative_prompt=negative)
        for g, i in groups
    ]


async def open_backend(options: argparse.Namespace) -> Any:
    """A `DiffusersBackend`, or a vLLM-Omni server that has started."""
    if options.backend == "vllm_omni":
        from omni_rollout.vllm_omni.server import vLLMOmniHttpServer

        engine = VllmOmniConfig(max_num_seqs=options.batch, enforce_eager=options.device == "cpu")
        config = DiffusionRolloutConfig(backend="vllm_omni", dtype=options.dtype, vllm_omni=engine)
        server = vLLMOmniHttpServer(config, options.model)
        await server.launch_server()
        return server
    import torch
    from omni_rollout.diffusers_backend import DiffusersBackend

    dtype = getattr(torch, options.dtype)
    return DiffusersBackend.from_pretrained(
        options.model, dtype=dtype, device=options.device, max_batch_size=options.batch
    )


async def _answer(answer: Any) -> Any:
    """Of a backend's method, which an engine's server has as a coroutine."""
    return await answer if asyncio.iscoroutine(answer) else answer


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="diffusers pipeline folder")
    parser.add_argument("--backend", choices=("diffusers", "vllm_omni"), default="diffusers")
    for name, value in (("samples", 96), ("group", 16), ("batch", 64), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, value in (("height", 64), ("width", 64), ("steps", 6), ("frames", 1), ("max-tokens", 512)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--cfg", type=float, default=1.0, help="true classifier-free guidance; 1 is off")
    parser.add_argument("--guidance", type=float, default=None, help="embedded guidance of distilled models")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    options = parser.parse_args()
    result = asyncio.run(bench(options))
    if options.json:
        print(json.dumps(result))
    else:
        print("\n".join(f"{name:18} {json.dumps(value)}" for name, value in result.items()))


if __name__ == "__main__":
    main()
