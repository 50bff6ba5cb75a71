"""Two ranks on two cards (NCCL; gloo on a CPU) against one process, and what happens when one of them fails.

    python ranks.py            # starts both ranks

Each rank is a process of its own. Rank 0 first computes alone what both then compute together.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import CUDA, Weights, apart, batch_of, build, now, report, update
from fsdp_diffusers_engine import DiffusionLoss
from lora_sync import extract_lora
from lora_sync.layers import adapter_parameters

WORLD = 2
DEADLINE_S = 90.0 if CUDA else 250.0
# Largest distance as a share of the norm: (gradient, change of the weights in AdamW's first step).
BOUNDS = {"fp32": (1e-5, 1e-4), "bf16": (2e-2, 5e-2)}


def join(store: Path, rank: int, timeout_s: float) -> None:
    """One process group of both ranks."""
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if CUDA else "gloo",
        store=dist.FileStore(str(store), WORLD),
        rank=rank,
        world_size=WORLD,
        timeout=datetime.timedelta(seconds=timeout_s),
    )


def alone(folder: Path) -> dict[str, tuple[Weights, Weights]]:
    """Rank 0's part before it joins: the updates in one process, and bf16 in other micro-batches (the noise)."""
    found = {}
    for dtype in ("fp32", "bf16"):
        engine = build(dtype, sharding="replicate")
        found[dtype] = update(engine, batch_of(engine))
        if dtype == "fp32":
            found["after"] = update(engine, batch_of(engine, seed=2))
        else:
            again = build(dtype, sharding="replicate")
            found["noise"] = update(again, batch_of(again, micro=8))
        del engine
    return found


def compare(name: str, found: tuple[Weights, Weights], single: Any, dtype: str, **figures: Any) -> None:
    """Rank 0 reports how far two ranks are from one; both ranks hold the whole tensors."""
    gradient, step = (apart(f, s) for f, s in zip(found, single, strict=True))
    bounds = BOUNDS[dtype]
    report(name, gradient <= bounds[0] and step <= bounds[1], gradient_apart=gradient, step_apart=step, **figures)


def together(rank: int, folder: Path, single: dict[str, tuple[Weights, Weights]]) -> None:
    """Updates of both ranks; the checkpoint that one process loads later."""
    for dtype in ("fp32", "bf16"):
        start = now()
        engine = build(dtype)
        found = update(engine, batch_of(engine))
        if dtype == "fp32":
            engine.save_checkpoint(folder / "saved_by_2", global_step=1)
            after = update(engine, batch_of(engine, seed=2))
            filled = rank_coded_fill(engine.module, rank)
            every = torch.tensor([1.0 if filled else 0.0], device=engine.device)
            dist.all_reduce(every)
        if rank == 0:
            noise = {}
            if dtype == "bf16":
                parts = zip(single["noise"], single["bf16"], strict=True)
                noise = dict(zip(("noise_gradient", "noise_step"), (apart(n, s) for n, s in parts), strict=True))
            compare(f"two ranks against one, {dtype}", found, single[dtype], dtype, seconds=now() - start, **noise)
            if dtype == "fp32":
                compare("two ranks against one, fp32, the step after", after, single["after"], dtype)
                report("adapters gathered from two ranks: every element from its shard", float(every) == WORLD)
        del engine
    start = now()
    engine = build("fp32", ulysses_sequence_parallel_size=WORLD)
    found = update(engine, batch_of(engine))
    if rank == 0:
        compare(
            "two ranks that share tokens (Ulysses) against one, fp32", found, single["fp32"], "fp32", s=now() - start
        )


@torch.no_grad()
def rank_coded_fill(module: torch.nn.Module, rank: int) -> bool:
    """Each rank writes rank * 10⁶ + running index into its shards; the gathered tensors must show exactly that."""
    for parameter in adapter_parameters(module, "default").values():
        shard: Any = parameter.to_local()  # type: ignore[attr-defined]
        numbers = torch.arange(shard.numel(), dtype=torch.float32, device=shard.device)
        shard.copy_((rank * 1e6 + numbers % 1e6).reshape(shard.shape))
    good = True
    for tensor in extract_lora(module, version=1).tensors.values():
        parts = torch.arange(tensor.shape[0]).chunk(WORLD)  # FSDP2 cuts the first dimension like torch.chunk
        wanted = [
            owner * 1e6 + (torch.arange(len(rows) * tensor.shape[1]) % 1_000_000).float().reshape(len(rows), -1)
            for owner, rows in enumerate(parts)
        ]
        good &= torch.equal(tensor.cpu(), torch.cat(wanted))
    return good


def resharded(folder: Path, single: dict[str, tuple[Weights, Weights]]) -> None:
    """One process goes on from what two saved."""
    engine = build("fp32", sharding="replicate")
    engine.load_checkpoint(folder / "saved_by_2")
    found = update(engine, batch_of(engine, seed=2))
    compare("a checkpoint of two ranks goes on in one process, fp32", found, single["after"], "fp32")


def failing(rank: int) -> None:
    """Rank 1's loss raises in its second micro-batch; rank 0 is in a collective by then."""
    engine = build("fp32")
    calls = [0]

    def loss(model_output: Any, data: Any, dp_group: Any) -> Any:
        calls[0] += 1
        if rank == 1 and calls[0] == 2:
            raise ZeroDivisionError("the reward of sample 3 was empty")
        return DiffusionLoss("flow_grpo")(model_output, data, dp_group)

    start = time.monotonic()
    name, text = "none", ""
    try:
        engine.forward_backward(batch_of(engine, micro=2), loss)
        engine.optimizer_step()
    except Exception as error:
        name, text = type(error).__name__, str(error)
    seconds = time.monotonic() - start
    if rank == 0:
        ok = name == "RankError" and "the reward of sample 3 was empty" in text and "rank 1" in text and seconds < 30.0
        report("a rank that fails ends the other with its traceback", ok, error=name, seconds=seconds, text=text[-300:])
    else:
        report("the failing rank raises its own error", name == "ZeroDivisionError", error=name, seconds=seconds)


def rank_main(rank: int, folder: Path) -> None:
    """All of one rank."""
    torch.backends.cudnn.allow_tf32 = False
    if CUDA:
        os.environ["LOCAL_RANK"] = str(rank)
        torch.cuda.set_device(rank)
    single = alone(folder) if rank == 0 else {}
    join(folder / "first", rank, 90.0)
    together(rank, folder, single)
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        resharded(folder, single)
    join(folder / "second", rank, 60.0 if CUDA else 8.0)
    failing(rank)
    sys.stdout.flush()
    os._exit(0)  # the aborted group has nothing to tear down, and must not be waited for


def main() -> None:
    """Start both ranks, wait, and say how each ended."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        commands = [[sys.executable, __file__, str(rank), folder] for rank in range(WORLD)]
        processes = [subprocess.Popen(command) for command in commands]
        codes: list[int | None] = []
        for process in processes:
            try:
                codes.append(process.wait(max(1.0, DEADLINE_S - (time.monotonic() - start))))
            except subprocess.TimeoutExpired:
                process.kill()
                codes.append(None)
    print(json.dumps({"check": "both ranks ended by themselves", "ok": codes == [0, 0], "codes": codes}), flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        rank_main(int(sys.argv[1]), Path(sys.argv[2]))
    else:
        main()
