"""What one card shows: compiled blocks against eager ones, a bitwise resume, activations on the host.

python one_card.py
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.utils
import torch.distributed as dist
from common import CUDA, Weights, apart, batch_of, build, copies, gradient_of, now, report, update
from fsdp_diffusers_engine import gather_outputs
from lora_sync import extract_lora


def graphs() -> int:
    """Graphs that Dynamo has made so far."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def trained(dtype: str, steps: int = 3, **options: Any) -> tuple[Weights, list[float], list[int]]:
    """(first gradient, milliseconds per update, graphs after each update) of some updates, each with a forward-only pass
    before it, as in training."""
    engine = build(dtype, **options)
    data, first, times, made = batch_of(engine), Weights(), list[float](), list[int]()
    for _ in range(steps):
        start = now()
        with engine.eval_mode():
            scores = gather_outputs(engine.forward_backward_batch(data, None, forward_only=True))["log_probs"]
        data["old_log_probs"] = scores.cpu()
        gradient = gradient_of(engine, data)
        engine.step()
        times.append(1e3 * (now() - start))
        made.append(graphs())
        first = first or gradient
    return first, times, made


def compiled() -> None:
    """Repeated blocks, compiled and not: the same gradient within the dtype's noise, and no graph after the first step."""
    exact, exact_ms, _ = trained("fp32")
    rounded, eager_ms, _ = trained("bf16")
    noise = apart(rounded, exact)
    for dtype, plain, plain_ms in (("bf16", rounded, eager_ms), ("fp32", exact, exact_ms)):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        found, times, made = trained(dtype, use_torch_compile=True)
        distance, from_exact = apart(found, plain), apart(found, exact)
        good = distance <= 1e-4 if dtype == "fp32" else distance <= 1.5 * noise and from_exact <= 1.2 * noise
        report(
            f"compiled blocks against eager ones, {dtype}; the noise is eager bf16 against fp32",
            good,
            gradient_apart=distance,
            noise=noise,
            from_eager_fp32=from_exact,
            first_step_s=times[0] / 1e3,
            step_ms=min(times[1:]),
            eager_ms=min(plain_ms[1:]),
        )
        report(f"compiled blocks, {dtype}: graphs after each of three steps", made[0] == made[-1] > 0, graphs=made)


def resume() -> None:
    """Save, load into a new engine, next step, whole and as one shard: bitwise where kernels are reproducible.

    `noise` is how far two engines that load the same checkpoint are apart: without reproducible kernels, a difference has
    to be read against it, and is not judged.
    """
    for sharding, exact in (("replicate", False), ("replicate", True), ("shard", True)):
        options = {"sharding": sharding, "ema_decay": 0.9, "full_determinism": exact}
        with tempfile.TemporaryDirectory() as scratch:
            engine = build("bf16", **options)
            update(engine, batch_of(engine, seed=1))
            engine.save_checkpoint(Path(scratch) / "step_1", global_step=1)
            expected = update(engine, batch_of(engine, seed=2))
            loaded = []
            for _ in range(2):
                again = build("bf16", **options)
                again.load_checkpoint(Path(scratch) / "step_1")
                loaded.append(update(again, batch_of(again, seed=2)))
        gradient, step = (apart(f, e) for f, e in zip(loaded[0], expected, strict=True))
        noise, step_noise = (apart(a, b) for a, b in zip(*loaded, strict=True))
        name = "save, load, next step, " + ("one shard" if sharding == "shard" else "whole")
        report(
            name + (", full determinism" if exact else ", default kernels"),
            gradient == 0.0 and step == 0.0 if exact else None,
            gradient_apart=gradient,
            step_apart=step,
            noise=noise,
            step_noise=step_noise,
        )
    dist.destroy_process_group()


def offloaded() -> None:
    """Activations on the host, with and without recomputed blocks: the same gradient, bit by bit, with reproducible
    kernels; what it saves on the card.

    `noise` is how far the same engine is from itself on the same batch.
    """
    for checkpointing in (True, False):
        found, peaks, noise = [], [], 0.0
        for offload in (False, True):
            engine = build("bf16", checkpointing=checkpointing, activation_offload=offload, full_determinism=True)
            data = batch_of(engine)
            if CUDA:
                torch.cuda.reset_peak_memory_stats()
            found.append(gradient_of(engine, data))
            peaks.append(torch.cuda.max_memory_allocated() / 1e6 if CUDA else 0.0)
            noise = max(noise, apart(gradient_of(engine, data), found[-1]))
            del engine
        distance = apart(found[1], found[0])
        report(
            f"activation offload, {'with' if checkpointing else 'without'} checkpointing",
            distance == 0.0,
            gradient_apart=distance,
            noise=noise,
            peak_mb=peaks[1],
            peak_without_mb=peaks[0],
        )


def to_the_host() -> None:
    """An adapter off the card, in one go, is the adapter; a payload that was pickled has arrived whole."""
    import pickle

    engine = build("bf16")
    start = now()
    payload = extract_lora(engine.module, version=1, device="cpu")
    seconds = now() - start
    same = payload.hash == extract_lora(engine.module, version=1).hash
    live = copies({n.replace(".default.", "."): p for n, p in engine.trainable.items()})
    same &= all(torch.equal(payload.tensors[n], t) for n, t in live.items())
    arrived = pickle.loads(pickle.dumps(extract_lora(engine.module, version=1), protocol=5)).check()
    same &= arrived.hash == payload.hash and all(t.device.type == "cpu" for t in arrived.tensors.values())
    report("an adapter from the card to the host", same, megabytes=payload.nbytes / 1e6, seconds=seconds)


if __name__ == "__main__":
    torch.backends.cudnn.allow_tf32 = False
    if not CUDA:  # no compiler of kernels is needed to see what Dynamo makes of the blocks
        torch.nn.Module.compile = functools.partialmethod(torch.nn.Module.compile, backend="eager")  # type: ignore
    to_the_host()
    compiled()  # before the first engine that asks for reproducible kernels: that holds for the whole process
    resume()
    offloaded()
