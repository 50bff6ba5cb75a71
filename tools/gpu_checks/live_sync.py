"""A LoRA of 189 M fp32 parameters from a trainer on the GPU into a live vLLM-Omni engine, phase by phase.

The trainer is the training engine of this repository, the sampler a `vLLMOmniHttpServer` in a process of its own, over one
checkpoint: 60 blocks of Qwen-Image, 768 wide, so that the number of adapted layers (720) and of parameters are those of a
full-size run. A round is extract (with the content hash), send, receive (hash checked), bind (every element read back by
the sampler) and the verified receipt. `shared_memory` has both on one card; in `broadcast` each has its own, and both
are in one NCCL group.

    python live_sync.py [--transport shared_memory|broadcast --blocks 60 --heads 6 --rank 114 --rounds 5]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import os
import shutil
import socket
import tempfile
import time
import traceback
import uuid
from contextlib import AbstractContextManager
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ASSETS = Path(__file__).parents[2] / "packages/ray-trainer/src/ray_trainer/assets/tiny_qwen_image"
CUDA = os.environ.get("GPU_CHECKS_DEVICE", "cuda") == "cuda"
TARGET_S = 1.0


def write_folder(folder: Path, blocks: int, heads: int, head_dim: int) -> Path:
    """The tiny pipeline with a random transformer of this size, in bf16 on a GPU (fp32 elsewhere)."""
    import torch
    from diffusers import QwenImageTransformer2DModel
    from safetensors.torch import load_file, save_file

    dtype = torch.bfloat16 if CUDA else torch.float32
    shutil.copytree(ASSETS, folder, ignore=shutil.ignore_patterns("transformer"))
    for file in folder.rglob("*.safetensors"):
        save_file({k: v.to(dtype) for k, v in load_file(file).items()}, file, metadata={"format": "pt"})
    encoder = folder / "text_encoder" / "config.json"  # names the dtype that the engine loads it in
    encoder.write_text(encoder.read_text().replace('"float32"', f'"{str(dtype).removeprefix("torch.")}"'))
    config = json.loads((ASSETS / "transformer" / "config.json").read_text())
    config |= {"num_layers": blocks, "num_attention_heads": heads, "attention_head_dim": head_dim}
    config["axes_dims_rope"] = [head_dim // 8, head_dim * 7 // 16, head_dim * 7 // 16]
    torch.manual_seed(0)
    with torch.device("cuda" if CUDA else "cpu"):
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        model = QwenImageTransformer2DModel.from_config(config)
        torch.set_default_dtype(default)
    model.save_pretrained(folder / "transformer")
    return folder


def end_of(channel: str, role: str) -> AbstractContextManager[Any]:
    """The "sender" or "receiver" of a channel: `host:port` of a process group, or a name in shared memory."""
    from lora_sync.transport import BroadcastTransport, SharedMemoryTransport, join_group

    device = "cuda" if CUDA else "cpu"
    if ":" not in channel:
        return SharedMemoryTransport(channel, role, device=device, timeout=120)
    group = join_group(channel, int(role == "receiver"), 2, device=device, timeout=120)
    return BroadcastTransport(group=group)


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def sampler(path: str, channel: str, pipe: Connection) -> None:
    """The sampler's process: start the engine, then bind what comes, until None."""
    if CUDA and ":" in channel:  # on the second card, before anything looks at them
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[1]
    try:
        asyncio.run(serve(path, channel, pipe))
    except BaseException:
        pipe.send({"error": traceback.format_exc()})
        raise


async def serve(path: str, channel: str, pipe: Connection) -> None:
    """Answers every "go" with the phases of one sync, as seen from here."""
    from omni_rollout.config import DiffusionRolloutConfig, VllmOmniConfig
    from omni_rollout.types import GenerationRequest
    from omni_rollout.vllm_omni.server import vLLMOmniHttpServer
    from sde_samplers import SamplerSettings

    settings = VllmOmniConfig(enforce_eager=True, enable_sleep_mode=False)
    config = DiffusionRolloutConfig(dtype="bfloat16" if CUDA else "float32", vllm_omni=settings)
    spent = watched()
    server = vLLMOmniHttpServer(config, path)
    started = await server.launch_server()
    drawn = SamplerSettings(64, 64, num_inference_steps=2, kind="flow_sde", noise_level=0.7, window=(0,))
    request = GenerationRequest("r", "u", 0, "one red circle", seed=1, settings=drawn)

    async def latents(number: int) -> Any:
        samples = await server.generate([request.replace(request_id=f"r{number}")])
        return samples["final_latents"][0].float()

    pipe.send({"started_s": started})
    with end_of(channel, "receiver") as transport:
        before, number = await latents(0), 0
        pipe.send({"sampled": list(before.shape)})
        while pipe.recv() is not None:
            number += 1
            start = time.perf_counter()
            payload = transport.receive(timeout=60)
            received = time.perf_counter()
            receipt = await server.update_lora(payload)  # type: ignore[arg-type]
            bound = time.perf_counter()
            del payload
            phases = {"receive_s": received - start, "bind_s": bound - received, **spent}
            pipe.send({"receipt": asdict(receipt), "phases": phases})
            after = await latents(number)
            pipe.send({"sample_moved": float((after - before).abs().max())})
            before = after
    await server.shutdown()


def watched() -> dict[str, float]:
    """Seconds of the parts of the latest bind, where the engine's worker is a thread of this process."""
    import torch
    from omni_rollout.vllm_omni import lora_request, worker_extension
    from vllm_omni.diffusion.lora.manager import DiffusionLoRAManager

    spent: dict[str, float] = {}

    def watch(owner: Any, name: str, word: str) -> None:
        original = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                if CUDA:
                    torch.cuda.synchronize()
                spent[word] = time.perf_counter() - start

        setattr(owner, name, timed)

    watch(lora_request, "make_request", "bind_make_request_s")
    watch(DiffusionLoRAManager, "add_adapter", "bind_add_adapter_s")
    watch(DiffusionLoRAManager, "_bind_adapter_weights", "bind_set_lora_s")
    watch(worker_extension.vLLMOmniColocateWorkerExtension, "bind_lora", "bind_in_worker_s")
    return spent


def answer(pipe: Connection, seconds: float) -> dict[str, Any]:
    """The sampler's next message; its error becomes this process's."""
    if not pipe.poll(seconds):
        raise TimeoutError(f"the sampler said nothing for {seconds} s")
    message: dict[str, Any] = pipe.recv()
    if "error" in message:
        raise RuntimeError(message["error"])
    return message


def main() -> None:
    """Measure, and print one JSON line per result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", choices=("shared_memory", "broadcast"), default="shared_memory")
    parser.add_argument("--blocks", type=int, default=60 if CUDA else 2)
    parser.add_argument("--heads", type=int, default=6 if CUDA else 2)
    parser.add_argument("--head-dim", type=int, default=128 if CUDA else 32)
    parser.add_argument("--rank", type=int, default=114 if CUDA else 4)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gpu_checks_") as scratch:
        folder = write_folder(Path(scratch) / "model", options.blocks, options.heads, options.head_dim)
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        one_card = options.transport == "shared_memory"
        channel = f"sync-{uuid.uuid4().hex[:8]}" if one_card else free_address()
        process = multiprocessing.get_context("spawn").Process(target=sampler, args=(str(folder), channel, theirs))
        process.start()
        try:
            measure(folder, channel, ours, options)
        finally:
            process.join(20)
            if process.is_alive():
                process.kill()


def measure(folder: Path, channel: str, pipe: Connection, options: argparse.Namespace) -> None:
    """The trainer's side."""
    import torch
    from common import now, report
    from fsdp_diffusers_engine import DiffusionModelConfig, FSDPEngineConfig, PPODiffusersFSDPEngine
    from lora_sync import LoRAReceipt, extract_lora, verify

    engine = PPODiffusersFSDPEngine(
        DiffusionModelConfig(path=str(folder), lora_rank=options.rank, lora_alpha=2 * options.rank),
        FSDPEngineConfig(device="cuda" if CUDA else "cpu", model_dtype="bf16" if CUDA else "fp32"),
    )
    engine.initialize()
    parameters = sum(p.numel() for p in engine.trainable.values())
    draw = torch.Generator(engine.device).manual_seed(0)
    started = answer(pipe, 150.0)["started_s"]
    to_host = "cpu" if options.transport == "shared_memory" else None
    with end_of(channel, "sender") as transport:
        answer(pipe, 60.0)
        rounds: list[dict[str, float]] = []
        for version in range(1, options.rounds + 2):
            with torch.no_grad():
                for parameter in engine.trainable.values():
                    noise = torch.randn(parameter.shape, generator=draw, device=parameter.device)
                    parameter.add_(noise, alpha=0.02)
            gc.collect()
            pipe.send("go")
            start = now()
            payload = extract_lora(engine.module, version=version, copy=False, device=to_host)
            extracted = now()
            transport.send(payload)
            sent = time.perf_counter()
            there = answer(pipe, 60.0)
            receipt = verify(payload, LoRAReceipt(**there["receipt"]), previous_version=version - 1)
            end = time.perf_counter()
            moved = answer(pipe, 60.0)["sample_moved"]
            rounds.append(
                {
                    "total_s": end - start,
                    "extract_s": extracted - start,
                    "send_s": sent - extracted,
                    **there["phases"],
                    "sample_moved": moved,
                }
            )
        pipe.send(None)
    warm = sorted(rounds[1:], key=lambda r: r["total_s"])
    middle = warm[len(warm) // 2]
    report(
        f"a LoRA from the trainer into a live vLLM-Omni engine, verified, {options.transport}",
        middle["total_s"] < TARGET_S and all(r["sample_moved"] > 0 for r in rounds),
        parameters=parameters,
        modules=receipt.modules_bound,
        megabytes=parameters * 4 / 1e6,
        target_s=TARGET_S,
        first_total_s=rounds[0]["total_s"],
        best_s=warm[0]["total_s"],
        worst_s=warm[-1]["total_s"],
        engine_start_s=started,
        **middle,
    )


if __name__ == "__main__":
    main()
