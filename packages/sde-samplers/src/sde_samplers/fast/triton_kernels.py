"""The Triton code of the fused step. Imported only where it runs: it needs triton, which the package does not require.

Layout: a batch of B rows of `elements` contiguous numbers. One program handles BLOCK of them, so it loads x, v and the
noise (or the sample to score) once, writes the new sample once, and leaves one partial sum of (x_u - mean)². Torch adds the
partial sums of a row in a fixed order, so results are the same in every run; atomics would not be.

Compiled without fused multiply-add: the sample then has the bits of the plain torch version.
Coefficients are kernel arguments when the batch shares them, else rows of a table [B, 3] (PER_SAMPLE) with the columns
scale_x, scale_v, std. EVICTION is the cache policy of the loads.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def step_kernel(
    x_ptr,
    v_ptr,
    z_ptr,  # noise when DRAW, else the sample to score
    prev_ptr,  # written when DRAW
    partial_ptr,
    table_ptr,
    scale_x,
    scale_v,
    std,
    elements,
    blocks,
    PER_SAMPLE: tl.constexpr,
    DRAW: tl.constexpr,
    EVICTION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    if PER_SAMPLE:
        scale_x = tl.load(table_ptr + row * 3)
        scale_v = tl.load(table_ptr + row * 3 + 1)
        std = tl.load(table_ptr + row * 3 + 2)
    inside = block * BLOCK + tl.arange(0, BLOCK)
    mask = inside < elements
    at = row * elements + inside
    x = tl.load(x_ptr + at, mask=mask, other=0.0, eviction_policy=EVICTION).to(tl.float32)
    v = tl.load(v_ptr + at, mask=mask, other=0.0, eviction_policy=EVICTION).to(tl.float32)
    z = tl.load(z_ptr + at, mask=mask, other=0.0, eviction_policy=EVICTION).to(tl.float32)
    mean = scale_x * x + scale_v * v
    if DRAW:
        prev = mean + std * z
        tl.store(prev_ptr + at, prev, mask=mask)
    else:
        prev = z
    distance = prev - mean
    tl.store(partial_ptr + row * blocks + block, tl.sum(distance * distance, axis=0))


@triton.jit
def grad_kernel(
    x_ptr,
    v_ptr,
    prev_ptr,
    factor_ptr,  # [B] fp32: gradient of the mean, but for (prev - mean)
    grad_x_ptr,
    grad_v_ptr,
    table_ptr,
    scale_x,
    scale_v,
    elements,
    PER_SAMPLE: tl.constexpr,
    NEEDS_X: tl.constexpr,
    NEEDS_V: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    if PER_SAMPLE:
        scale_x = tl.load(table_ptr + row * 3)
        scale_v = tl.load(table_ptr + row * 3 + 1)
    inside = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = inside < elements
    at = row * elements + inside
    x = tl.load(x_ptr + at, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    v = tl.load(v_ptr + at, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    prev = tl.load(prev_ptr + at, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    grad_mean = tl.load(factor_ptr + row) * (prev - (scale_x * x + scale_v * v))
    if NEEDS_X:
        tl.store(grad_x_ptr + at, (scale_x * grad_mean).to(grad_x_ptr.dtype.element_ty), mask=mask)
    if NEEDS_V:
        tl.store(grad_v_ptr + at, (scale_v * grad_mean).to(grad_v_ptr.dtype.element_ty), mask=mask)
