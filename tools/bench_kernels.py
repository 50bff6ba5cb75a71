"""Parts of `bench_gpu.py` that measure single operations: what the card can do, attention, the products of layers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from bench_common import CPU, Report, device, timed
from bench_model import Size


def ceiling(size: Size, _: Path, report: Report) -> None:
    """What the card can do: the measure of everything else."""
    import torch

    side, dtype = (256, torch.float32) if CPU else (8192, torch.bfloat16)
    a, b = (torch.randn(side, side, device=device(), dtype=dtype) for _ in range(2))
    seconds, _ = timed(lambda: [a @ b for _ in range(10)])
    exact = a[:64].double() @ b[:, :64].double()
    off = float(((a @ b)[:64, :64].double() - exact).norm() / exact.norm())
    big = torch.randn((1 << 20) if CPU else (1 << 31), device=device(), dtype=dtype)
    into = torch.empty_like(big)
    copy, _ = timed(lambda: into.copy_(big))
    name = "CPU" if CPU else torch.cuda.get_device_name()
    memory = 0.0 if CPU else torch.cuda.get_device_properties(0).total_memory / 1e9
    rate, bytes_ = 20 * side**3 / seconds / 1e12, 2 * big.numel() * big.element_size()
    report("card", name=name, torch=torch.__version__, memory_gb=memory)
    report("matmul", tflops=rate, off_by=off, good=off < 1e-2)
    report("copy", gb_per_s=bytes_ / copy / 1e9, good=bool((into == big).all()))


def attention(size: Size, _: Path, report: Report) -> None:
    """One attention of a block, forward and backward, by each kernel that there is."""
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    rows, heads, wide = (1, 2, 16) if size.small else (8, 24, 128)
    dtype = torch.float32 if CPU else torch.bfloat16

    def native(backend: Any, copies: bool = False, mask: Any = None) -> Callable[..., Any]:
        def call(q: Any, k: Any, v: Any) -> Any:
            q, k, v = (x.transpose(1, 2).contiguous() if copies else x.transpose(1, 2) for x in (q, k, v))
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)

        return call

    def fa3() -> Callable[..., Any]:
        from fa3_fwd_interface import flash_attn_func

        def call(q: Any, k: Any, v: Any) -> Any:
            out = flash_attn_func(q, k, v)
            return out[0] if isinstance(out, tuple) else out

        return call

    def fa4() -> Callable[..., Any]:
        from torch.nn.attention import activate_flash_attention_impl

        activate_flash_attention_impl("FA4")
        return native(SDPBackend.FLASH_ATTENTION)

    def ten(call: Callable[..., Any], *given: Any) -> None:
        for _ in range(10):
            call(*given)

    def there_and_back(call: Callable[..., Any], g: Any, *given: Any) -> None:
        torch.autograd.grad(call(*given), given, g)

    for tokens in (20,) if size.small else (1024 + 75, 1024 + 6, 1024 + 128):
        draw = torch.Generator(device()).manual_seed(0)
        q, k, v, g = (
            torch.randn(rows, tokens, heads, wide, generator=draw, device=device(), dtype=dtype) for _ in range(4)
        )
        mask = torch.ones(rows, 1, 1, tokens, dtype=torch.bool, device=device())
        kernels: dict[str, Callable[[], Callable[..., Any]]] = {
            "flash of torch": lambda: native(SDPBackend.MATH if CPU else SDPBackend.FLASH_ATTENTION),
        }
        if not CPU:
            kernels |= {
                "cuDNN": lambda: native(SDPBackend.CUDNN_ATTENTION),
                "cuDNN, inputs copied": lambda: native(SDPBackend.CUDNN_ATTENTION, True),
                "with a mask": partial(native, SDPBackend.EFFICIENT_ATTENTION, mask=mask),
                "FA3, forward alone": fa3,
                "FA4": fa4,
            }
        with sdpa_kernel(SDPBackend.MATH):
            exact = native(SDPBackend.MATH)(*(x[:1].double() for x in (q, k, v)))
        work = 4e-12 * rows * heads * wide * tokens * tokens
        for name, make in kernels.items():
            with report.section(f"{name}, {tokens} tokens", optional=name.startswith("FA")):
                call = make()
                with torch.no_grad():
                    off = float((call(q, k, v)[:1].double() - exact).norm() / exact.norm())
                    seconds, first = timed(partial(ten, call, q, k, v))
                values = {"forward_ms": seconds * 100, "forward_tflops": 10 * work / seconds, "first_s": first}
                if "alone" not in name:
                    given = [x.detach().requires_grad_() for x in (q, k, v)]
                    whole, _ = timed(partial(ten, partial(there_and_back, call, g), *given))
                    back = whole - seconds
                    values |= {"backward_ms": back * 100, "backward_tflops": 25 * work / back}
                report(f"{name}, {tokens} tokens", **values, off_by=off, good=off < 2e-2)
        with contextlib.suppress(Exception):
            from torch.nn.attention import restore_flash_attention_impl

            restore_flash_attention_impl()


def _linear_then_gelu(x: Any, weight: Any, bias: Any) -> Any:
    import torch.nn.functional as F

    return F.gelu(F.linear(x, weight, bias), approximate="tanh")


def products(small: bool, report: Report) -> None:
    """The products of a block's layers, 16 rows: in bf16, with GELU inside, in fp8 with a scale a row and with one in all."""
    import torch
    import torch.nn.functional as F
    from omni_rollout.fp8 import rounded

    rows, dtype = (64, torch.bfloat16) if small else (16 * 1024, torch.bfloat16)
    for width, out in ((64, 64),) if small else ((3072, 3072), (3072, 12288), (12288, 3072)):
        x, w = (torch.randn(n, width, device=device(), dtype=dtype) for n in (rows, out))
        bias = torch.randn(out, device=device(), dtype=dtype)
        low, scale = rounded(x)
        wide, scales = rounded(w)
        one = torch.ones((), device=device())
        kinds: dict[str, Callable[[], Any]] = {
            "bf16": partial(F.linear, x, w, bias),
            "bf16, then GELU": partial(_linear_then_gelu, x, w, bias),
            "bf16, GELU inside": partial(torch._addmm_activation, bias, x, w.t(), use_gelu=True),
        }
        for fast in () if CPU else (True, False):
            options: dict[str, Any] = {"bias": bias, "out_dtype": dtype, "use_fast_accum": fast}
            for name, by in (("a scale a row", (scale, scales.t())), ("one scale", (one, one))):
                kinds[f"fp8, {name}, fast sum {fast}"] = partial(torch._scaled_mm, low, wide.t(), *by, **options)
        rates = dict[str, float]()
        for name, call in kinds.items():
            seconds, _ = timed(lambda call=call: [call() for _ in range(10)])  # type: ignore[misc]
            rates[name] = round(2e-11 * rows * width * out / seconds, 3)
        report(f"products, {width} to {out}", tflops_of=rates)


def lora_products(size: Size, _: Path, report: Report) -> None:
    """An engine's layers of 16 rows with an adapter: its product added to the layer's as it ships, or the layer's added to it."""
    for name, parts in (("qkv", 3), ("out", 1)):
        _lora_layer(name, parts, size.small, report)


def _lora_layer(name: str, parts: int, small: bool, report: Report) -> None:
    """A layer that joins `parts` projections, each with an adapter of its own."""
    import torch
    from omni_rollout.vllm_omni.lora_product import add_lora

    tokens, wide, rank, dtype = (32, 24, 4, torch.float32) if small else (16 * 1099, 3072, 64, torch.bfloat16)
    out = parts * wide
    x, weight, bias, a, b = (
        torch.randn(shape, device=device(), dtype=dtype) * 0.05
        for shape in ((tokens, wide), (out, wide), (out,), (parts * rank, wide), (out, rank))
    )
    each = [(slice(n * rank, (n + 1) * rank), slice(n * wide, (n + 1) * wide)) for n in range(parts)]

    def alone() -> Any:
        return torch.nn.functional.linear(x, weight, bias)

    def added() -> Any:
        y = alone()
        add_lora(y, x, a, b, [wide] * parts)
        return y

    def first() -> Any:
        low, y = x @ a.t(), x.new_empty(tokens, out)
        for rows, columns in each:
            torch.addmm(bias[columns], low[:, rows], b[columns].t(), out=y[:, columns])
        return y.addmm_(x, weight.t())

    few = x[:256].double()
    wanted = few @ weight.double().t() + bias.double()
    for rows, columns in each:
        wanted[:, columns] += few @ a[rows].double().t() @ b[columns].double().t()
    for what, run in (("no adapter", alone), ("as it ships", added), ("the layer's added", first)):
        seconds, _ = timed(lambda run=run: [run() for _ in range(20)], 5)  # type: ignore[misc]
        off = float((run()[:256].double() - wanted).norm() / wanted.norm())
        report(f"{name}, {what}", ms=50 * seconds, off_by=off, good=what == "no adapter" or off < 1e-2)
