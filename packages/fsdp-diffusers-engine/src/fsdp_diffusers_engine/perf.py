"""Model FLOPs utilisation: operations that the mathematics needs, per second, over what the device can do."""

from __future__ import annotations

import time
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from .forwards import Rows
from .peaks import tabled_peak

if TYPE_CHECKING:
    from model_specs import Sampling

    from .engine import DiffusersFSDPEngine


def peak_flops(device: torch.device, dtype: torch.dtype, override_tflops: float | None = None) -> float:
    """Operations per second of one device in `dtype`: the override, the table (bf16), or a measured matrix product."""
    if override_tflops is not None:
        return override_tflops * 1e12
    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        name = torch.cuda.get_device_name(device)
        if (known := tabled_peak(name)) is not None:
            return known * 1e12
    return measured_flops(device.type, device.index or 0, dtype)


@lru_cache(maxsize=8)
def measured_flops(kind: str, index: int, dtype: torch.dtype) -> float:
    """Operations per second of a large square matrix product on device `index` of `kind`."""
    device = torch.device(kind, index) if kind != "cpu" else torch.device("cpu")
    size = 8192 if kind == "cuda" else 768
    a = torch.randn(size, size, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(4):
        if kind == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        torch.mm(a, a)
        if kind == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2.0 * size**3 / best


def training_flops(engine: DiffusersFSDPEngine, rows: Rows, settings: Sampling, text_tokens: int) -> float:
    """Operations of an update that forwarded `rows`: one forward each, and a backward for those with a gradient.

    What activation checkpointing computes a second time is a cost and not work, so it is not counted.
    """
    from model_specs.flops import training_flops as with_backward

    one: float = engine.spec.flops(engine.module.config, 1, settings, text_tokens)  # type: ignore[arg-type]
    return with_backward(one * rows.with_grad, full=not engine.lora) + one * rows.without_grad


def mfu(engine: DiffusersFSDPEngine, flops: float, seconds: float) -> float:
    """Share of the peak of this process's devices; with sequence parallelism the ranks share the samples."""
    config = engine.engine_config
    from .precision import dtype_of

    dtype = dtype_of(config.model_dtype, "model_dtype")
    if config.mixed_precision is not None:
        dtype = dtype_of(config.mixed_precision.param_dtype, "mixed_precision.param_dtype")
    return flops / seconds / (engine.layout.sp_size * peak_flops(engine.device, dtype, config.peak_tflops))
