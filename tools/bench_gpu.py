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
    engine_attention, engine_blocks, engine_fp8   the same engine with other attention kernels, with its blocks as they come, and
               with fp8 weights
    program    `apps/flowgrpo` itself with shared weights; program_again: a second start, the compiled graphs kept;
               program_two: two cards, twice the samples; program_fp8, program_merged, program_fp8_merged: sampling in fp8,
               with the adapter merged into the weights, both;
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
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bench_blocks as blocks
import bench_engine as engine
import bench_kernels as kernels
import bench_trainer as trainer
from bench_common import CPU, Report
from bench_model import MODELS, Size, make_folder
from bench_program import ASLEEP, AWAKE, program

TOOLS = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Part:
    """A piece of the measurement."""

    run: Callable[[Size, Path, Report], None]
    seconds: float = 285
    """That it may take on a card."""
    folder: bool = True
    """Whether it needs the model's."""
    every_card: bool = False
    """Whether it takes all of `--cards`."""


PARTS = {
    "ceiling": Part(kernels.ceiling, 60, folder=False),
    "attention": Part(kernels.attention, 60, folder=False),
    "changes": Part(blocks.changes, folder=False),
    "precision": Part(blocks.precision, 120, folder=False),
    "plain": Part(trainer.plain, 120),
    "rollouts": Part(trainer.rollouts),
    "trainer": Part(trainer.trainer),
    "one_copy": Part(engine.one_copy, 90),
    "lora_products": Part(kernels.lora_products, 60, folder=False),
    "engine": Part(engine.engine),
    "engine_attention": Part(engine.engine_attention),
    "engine_blocks": Part(engine.engine_blocks),
    "engine_fp8": Part(engine.engine_fp8),
    "program": Part(program()),
    "program_again": Part(program(steps=1), 200),
    "program_two": Part(program(steps=3, workers=2), every_card=True),
    "program_fp8": Part(program("rollout.fp8=true", steps=3), 240),
    "program_merged": Part(program("model.lora.merge=true", steps=3), 240),
    "program_fp8_merged": Part(program("rollout.fp8=true", "model.lora.merge=true", steps=3), 240),
    "program_recomputed": Part(program("algorithm.old_log_probs=trainer", steps=3), 240),
    "program_engine": Part(program(*ASLEEP), 400, every_card=True),
    "program_one_copy": Part(program(*AWAKE, steps=3), 320),
    "program_engine_again": Part(program(*ASLEEP, steps=2), 200),
    "growth": Part(blocks.growth, 240, folder=False),
    "sizes": Part(blocks.sizes, folder=False),
    "ranks": Part(trainer.ranks, every_card=True),
}


def run_part(
    part: str, options: argparse.Namespace, folder: Path, into: Path, log: Path, cards: str | None, seconds: float
) -> subprocess.Popen[bytes]:
    """Start one part in a process group of its own."""
    env = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1" if CPU else "6", **os.environ}
    env["PYTHONPATH"] = f"{TOOLS}:{env.get('PYTHONPATH', '')}"
    env["BENCH_END"] = str(time.time() + seconds)
    if not part.startswith(("engine", "program")):
        env.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    if cards is not None:
        env["CUDA_VISIBLE_DEVICES"] = cards
    command = [sys.executable]
    if part == "ranks":
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}"]
    command += [__file__, "--model", options.model, "--child", part, "--folder", str(folder), "--into", str(into)]
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
    if options.child:
        return child(options)
    end = time.monotonic() + options.limit
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None) as made:
        folder, into = Path(made) / "model", options.out or Path(made) / "results.jsonl"
        if any(PARTS[part].folder for part in options.parts):
            make_folder(MODELS[options.model], folder)
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


def child(options: argparse.Namespace) -> int:
    """Run one part in this process."""
    report = Report(Path(options.into), options.child)
    try:
        PARTS[options.child].run(MODELS[options.model], Path(options.folder), report)
    except Exception as error:
        traceback.print_exc()
        report("failed", good=False, error=f"{type(error).__name__}: {error}"[-900:])
        return 1
    report("done", seconds=time.perf_counter() - _STARTED)
    return 0


def schedule(options: argparse.Namespace, folder: Path, into: Path, logs: Path, end: float) -> list[str]:
    """Run the parts, one at a time on each card; returns what did not end well."""
    waiting, failed = list(options.parts), list[str]()
    free: list[str | None] = list(options.cards or [None])
    every = len(free)
    running: list[tuple[str, subprocess.Popen[bytes], list[str | None], float]] = []
    try:
        while waiting or running:
            whole = bool(waiting) and PARTS[waiting[0]].every_card
            if waiting and time.monotonic() < end and len(free) >= (every if whole else 1):
                part, mine = waiting.pop(0), [free.pop(0) for _ in range(every if whole else 1)]
                cards = None if mine == [None] else ",".join(card or "" for card in mine)
                seconds = min(PARTS[part].seconds, end - time.monotonic())
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
    if isinstance(value, float):
        return f"{value:.4g}"
    return json.dumps(value) if isinstance(value, (dict, list)) else str(value)


_STARTED = time.perf_counter()

if __name__ == "__main__":
    sys.exit(main())
