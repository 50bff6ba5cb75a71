"""How fast an adapter travels, beside the memory-copy bandwidth of the same run.

    python tools/bench_lora_sync.py                    # two processes, shared memory, this host
    python tools/bench_lora_sync.py --nccl             # two ranks, torch.distributed broadcast (two GPUs)
    python tools/bench_lora_sync.py --device cuda      # shared memory between two processes of one GPU

The adapter is that of Qwen-Image with rank 64 on all attention projections: 60 blocks × 8 layers, 189 M float32 parameters,
755 MB. A round is a whole sync: hash at the sender, send, receive, hash at the receiver, bind, hash of what the module
holds, receipt back and verified; a round without hashes sends and receives.
"Extra memory" is how far the resident memory of each process rises over what it was before the first round.
Prints a table, and one JSON line at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import multiprocessing
import os
import resource
import statistics
import time
import uuid
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from lora_sync import LoRAPayload, LoRAReceipt, apply_lora, extract_lora, verify
from lora_sync.transport import BroadcastTransport, SharedMemoryTransport, Transport
from torch import nn

LAYERS = tuple(f"attn.{x}" for x in ("to_q", "to_k", "to_v", "to_out", "add_q", "add_k", "add_v", "to_add_out"))


class Layer(nn.Module):
    """The attributes of PEFT's LoRA layer that a sync reads, around a base that takes no memory."""

    def __init__(self, width: int, rank: int, device: torch.device) -> None:
        super().__init__()
        self.base_layer = nn.Linear(width, width, device="meta")
        self.lora_A = nn.ModuleDict({"default": nn.Linear(width, rank, bias=False, device=device)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, width, bias=False, device=device)})
        self.r, self.lora_alpha, self.scaling = {"default": rank}, {"default": float(rank)}, {"default": 1.0}


def adapter(blocks: int, width: int, rank: int, device: torch.device) -> nn.Module:
    """A module whose only weights are the adapter's."""
    root = nn.Module()
    root.transformer_blocks = nn.ModuleList()
    for _ in range(blocks):
        block = nn.Module()
        block.attn = nn.Module()
        for name in LAYERS:
            block.attn.add_module(name.removeprefix("attn."), Layer(width, rank, device))
        root.transformer_blocks.append(block)
    for parameter in root.parameters():
        parameter.requires_grad_(False)
    return root


def adapter_bytes(module: nn.Module) -> int:
    """Bytes of the adapter; the base is on the meta device and has none."""
    return sum(p.numel() * p.element_size() for n, p in module.named_parameters() if "lora_" in n)


def resident(peak: bool = False) -> int:
    """Resident bytes of this process, or their highest value since `reset_peak`."""
    word = "VmHWM" if peak else "VmRSS"
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(word):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reset_peak() -> None:
    with contextlib.suppress(OSError):  # some sandboxes have no such file: the peak is then that of the whole life
        Path("/proc/self/clear_refs").write_text("5")


def trim() -> None:
    """Hand freed memory back to the system, so that the numbers show what is held and not what malloc keeps for later."""
    trimmer = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trimmer is not None:
        trimmer(0)


class Copy:
    """One large warm copy on this host, the yardstick."""

    def __init__(self, nbytes: int) -> None:
        self.source, self.target = (torch.ones(nbytes // 4) for _ in range(2))

    def __call__(self) -> float:
        start = time.perf_counter()
        self.target.copy_(self.source)
        return time.perf_counter() - start


def receiver(name: str, pipe: Connection, sizes: tuple[int, int, int], device_name: str) -> None:
    """The sampler's process: receive, bind, answer."""
    device = torch.device(device_name)
    module = adapter(*sizes, device)
    with SharedMemoryTransport(name, "receiver", device=device) as channel:
        before = resident()
        reset_peak()
        pipe.send("ready")
        while (check := pipe.recv()) is not None:
            try:
                message = channel.receive(check=check)
                assert isinstance(message, LoRAPayload)
                receipt = asdict(apply_lora(module, message)) if check else {}
                del message
                if device.type == "cuda":
                    torch.cuda.synchronize()
                pipe.send(receipt)
                trim()  # the adapter that was replaced
            except Exception as error:
                pipe.send(repr(error))
                raise
        pipe.send(resident(peak=True) - before)


def one_round(module: nn.Module, channel: Transport, pipe: Connection, version: int, check: bool, ready: Any) -> float:
    """Seconds of one sync; `ready` is a payload made before, for rounds without hashes."""
    if check:
        pipe.send(True)
        start = time.perf_counter()
        payload = extract_lora(module, version=version, copy=False, device="cpu")  # hashes what the trainer holds now
    else:
        payload = ready
        pipe.send(False)
        start = time.perf_counter()
    channel.send(payload)
    answer = pipe.recv()
    if isinstance(answer, str):
        raise RuntimeError(answer)
    if check:
        verify(payload, LoRAReceipt(**answer))
    return time.perf_counter() - start


def shared_memory(sizes: tuple[int, int, int], rounds: int, device: torch.device) -> dict[str, Any]:
    """Two processes of one host."""
    name = f"bench-{uuid.uuid4().hex[:8]}"
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    module = adapter(*sizes, device)
    nbytes = adapter_bytes(module)
    copy = Copy(nbytes)
    result: dict[str, Any] = {"bytes": nbytes}
    times: dict[str, list[float]] = {"copy": [], "unhashed": [], "hashed": []}
    with SharedMemoryTransport(name, "sender") as channel:
        process = context.Process(target=receiver, args=(name, theirs, sizes, str(device)), daemon=True)
        process.start()
        ours.recv()
        payload = extract_lora(module, version=1, copy=False)
        before = resident()
        reset_peak()
        for number in range(rounds + 1):  # interleaved, so that a busy host slows all three alike
            seconds = (copy(), *(one_round(module, channel, ours, 2, check, payload) for check in (False, True)))
            if number:  # the first round warms up
                for word, value in zip(times, seconds, strict=True):
                    times[word].append(value)
        result["sender_extra_memory"] = (resident(peak=True) - before) / nbytes
        result["receiver_extra_memory"] = _finish(ours) / nbytes
        process.join(30)
    for word, values in times.items():
        result |= {f"{word}_s": min(values), f"{word}_median_s": statistics.median(values)}
        result |= {
            f"{word}_GBps": nbytes / min(values) / 1e9,
            f"{word}_share_of_copy": min(times["copy"]) / min(values),
        }
    return result


def _finish(pipe: Connection) -> int:
    pipe.send(None)
    return int(pipe.recv())


def rank_main(rank: int, store: str, sizes: tuple[int, int, int], rounds: int, backend: str, out: str) -> None:
    """One rank of the broadcast: 0 trains, 1 samples."""
    import torch.distributed as dist

    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, store=dist.FileStore(store, 2), rank=rank, world_size=2)
    module = adapter(*sizes, device)
    channel, times = BroadcastTransport(source=0), []
    for version in range(1, rounds + 2):
        dist.barrier()
        start = time.perf_counter()
        if rank == 0:
            payload = extract_lora(module, version=version, copy=False)
            channel.send(payload)
        else:
            message = channel.receive()
            assert isinstance(message, LoRAPayload)
            verify(message, apply_lora(module, message))
            del message
        if device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        times.append(time.perf_counter() - start)
    if rank == 0:
        nbytes = adapter_bytes(module)
        seconds = statistics.median(times[1:])
        Path(out).write_text(json.dumps({"bytes": nbytes, "hashed_s": seconds, "hashed_GBps": nbytes / seconds / 1e9}))
    dist.destroy_process_group()


def broadcast(sizes: tuple[int, int, int], rounds: int, backend: str) -> dict[str, Any]:
    """Two ranks of one process group."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/out.json"
        torch.multiprocessing.spawn(rank_main, args=(f"{folder}/store", sizes, rounds, backend, out), nprocs=2)
        found: dict[str, Any] = json.loads(Path(out).read_text())
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--blocks", type=int, default=60)
    parser.add_argument("--width", type=int, default=3072)
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--nccl", action="store_true", help="broadcast between two GPUs")
    parser.add_argument("--gloo", action="store_true", help="broadcast between two processes")
    options = parser.parse_args()
    sizes = (options.blocks, options.width, options.rank)
    if options.nccl or options.gloo:
        result = broadcast(sizes, options.rounds, "nccl" if options.nccl else "gloo")
        result["transport"] = "nccl" if options.nccl else "gloo"
    else:
        result = shared_memory(sizes, options.rounds, torch.device(options.device))
        result["transport"] = f"shared memory ({options.device})"
    result |= {"cores": os.cpu_count(), "load": os.getloadavg()[0], "torch": torch.__version__}
    for key, value in result.items():
        print(f"{key:24s} {value:.4g}" if isinstance(value, float) else f"{key:24s} {value}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
