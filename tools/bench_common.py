"""What the parts of `bench_gpu.py` share: results as they come, sections that cannot take each other down, clocks, a profile."""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

CPU = os.environ.get("OMNI_ROLLOUT_CPU") == "1"


class Report:
    """One line of JSON per result, kept whatever becomes of the process."""

    def __init__(self, path: Path, part: str) -> None:
        self.path, self.part = path, part

    def __call__(self, what: str, **values: Any) -> None:
        rounded = {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in values.items()}
        with self.path.open("a") as file:
            file.write(json.dumps({"part": self.part, "what": what, **rounded}) + "\n")

    @contextlib.contextmanager
    def section(self, what: str, seconds: float = 0.0, optional: bool = False) -> Iterator[bool]:
        """A piece of a part: what fails in it is reported and the part goes on. False inside, and a line in the report,
        where fewer than `seconds` are left; the block must ask. An `optional` one may fail: a library is not there."""
        enough = seconds_left() > seconds
        if not enough:
            self(what, skipped=f"{seconds_left():.0f} s left, it takes {seconds:.0f}")
        try:
            yield enough
        except Exception as error:
            traceback.print_exc()
            self(what, failed=f"{type(error).__name__}: {error}"[:400], **({} if optional else {"good": False}))
            if not CPU:
                import torch

                torch.cuda.empty_cache()


def seconds_left() -> float:
    """Until this part is ended."""
    return float(os.environ.get("BENCH_END", "inf")) - time.time()


def device() -> str:
    """Where this runs."""
    return "cpu" if CPU else "cuda"


def now() -> float:
    """Host clock once the device has finished."""
    import torch

    if not CPU:
        torch.cuda.synchronize()
    return time.perf_counter()


def timed(work: Callable[[], Any], repeat: int = 3) -> tuple[float, float]:
    """(median, first) seconds of `repeat` runs after one; the one holds loading and compiling."""
    start = now()
    work()
    first, times = now() - start, []
    for _ in range(repeat):
        start = now()
        work()
        times.append(now() - start)
    return statistics.median(times), first


def peak_gb() -> float:
    """Most memory that was allocated since the last call."""
    import torch

    if CPU:
        return 0.0
    peak = torch.cuda.max_memory_allocated() / 1e9
    torch.cuda.reset_peak_memory_stats()
    return peak


def apart(found: dict[str, Any], wanted: dict[str, Any]) -> float:
    """Norm of the difference over the norm of `wanted`."""
    off = sum(float((found[n] - wanted[n]).double().square().sum()) for n in wanted)
    return math.sqrt(off / max(sum(float(w.double().square().sum()) for w in wanted.values()), 1e-300))


@contextlib.contextmanager
def profiled(report: Report, what: str) -> Iterator[None]:
    """Report the kernels that this process runs inside: milliseconds by kind, and the largest of them."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU if CPU else ProfilerActivity.CUDA]) as found:
        start = now()
        yield
        wall = now() - start
    kinds, kernels = dict[str, float](), list[tuple[float, int, str]]()
    for row in found.key_averages():
        name, spent = row.key[:70], float(row.self_cpu_time_total if CPU else row.self_device_time_total) / 1e3
        if spent > 0:
            kinds[kind_of(name)] = kinds.get(kind_of(name), 0.0) + spent
            kernels.append((round(spent, 3), row.count, name))
    by_kind = {k: round(v, 2) for k, v in sorted(kinds.items(), key=lambda kv: -kv[1])}
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    report(f"profile, {what}", wall_ms=1e3 * wall, kernels_ms=sum(kinds.values()), kinds_ms=by_kind, graphs=graphs)
    report(f"kernels, {what}", largest=sorted(kernels, reverse=True)[:24])


def kind_of(kernel: str) -> str:
    """What a kernel is for, by its name."""
    name = kernel.lower()
    if any(word in name for word in ("flash", "fmha", "cudnn_generated", "attention", "sdpa")):
        return "attention backward" if "bwd" in name or "backward" in name else "attention forward"
    if any(word in name for word in ("gemm", "nvjet", "cutlass", "addmm", "aten::mm", "splitk", "cublas")):
        return "matrix products"
    if "triton" in name:
        return "compiled kernels"
    if "memcpy" in name or "memset" in name or "copy" in name:
        return "copies"
    return "other"
