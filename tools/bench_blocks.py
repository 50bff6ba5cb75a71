"""Parts of `bench_gpu.py` that need transformer blocks alone: no folder, no prompts, no pictures.

All blocks of these transformers are equal, so what is won in a block shows on a few of them: a variant is compiled and timed in
20 s instead of minutes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import bench_variants as variants
from bench_common import CPU, Report, apart, device, now, peak_gb, profiled, timed
from bench_kernels import products
from bench_model import Size
from bench_policy import WORKS, Work, free, gradient, gradients, inputs, policy, shrunk, tflop


def precision(size: Size, _: Path, report: Report) -> None:
    """Which gradient is nearer to the true one: that of the blocks as they are, or that of the compiled ones?

    The reference is the same network in fp32 (its weights those of bf16, rounded already).
    """
    import torch

    work = shrunk(WORKS["qwen_image"], size.small)
    for blocks in (2,) if size.small else (6, 20, 60):
        gigabytes = 6 * 0.34 * blocks + 12
        with report.section(f"{blocks} blocks", seconds=30):
            if not CPU and torch.cuda.mem_get_info()[0] / 1e9 < gigabytes:
                report(f"{blocks} blocks", skipped=f"needs {gigabytes:.0f} GB")
                continue
            engine = policy(work, blocks, model_dtype="bf16")
            exact = policy(work, blocks, model_dtype="fp32", use_torch_compile=False)
            own = dict(engine.module.named_parameters())
            with torch.no_grad():
                for name, parameter in exact.module.named_parameters():
                    parameter.copy_(own[name])
            given = inputs(engine, work, 2)
            wanted_v, wanted = gradient(exact, given), gradients(exact)
            del exact
            free()
            with variants.uncompiled(engine):
                eager_v, eager = gradient(engine, given), gradients(engine)
            compiled_v, compiled = gradient(engine, given), gradients(engine)
            last = max(int(n.split("transformer_blocks.")[1].split(".")[0]) for n in wanted)

            def of_block(number: int, found: dict[str, Any]) -> dict[str, Any]:
                return {n: g for n, g in found.items() if f"transformer_blocks.{number}." in n}

            values = {"gradient_each_other": apart(compiled, eager)}
            for how, v, found in (("not_compiled", eager_v, eager), ("compiled", compiled_v, compiled)):
                values[f"gradient_{how}"] = apart(found, wanted)
                values[f"velocity_{how}"] = apart({"v": v}, {"v": wanted_v})
                for block, number in (("first", 0), ("last", last)):
                    values[f"{block}_block_{how}"] = apart(of_block(number, found), of_block(number, wanted))
            good = values["gradient_compiled"] < 1.2 * values["gradient_not_compiled"]
            report(f"{blocks} blocks", **values, good=good)
            del engine, own, eager, compiled, wanted, found
            free()


def changes(size: Size, _: Path, report: Report) -> None:
    """Each change off and on, on some blocks; and where the kernels' time goes."""
    import torch
    from omni_rollout.fp8 import fp8_weights
    from torch._inductor import config as inductor

    work, blocks = shrunk(WORKS["qwen_image"], size.small), 2 if size.small else 12
    start = now()
    engine = policy(work, blocks)
    engine.recompute.count = 0
    given, few = inputs(engine, work, work.batch), inputs(engine, work, work.micro)
    report("start", seconds=now() - start, blocks=blocks)
    wanted: dict[str, Any] = {}
    forward, update = torch.no_grad()(partial(engine.velocity, **given)), partial(gradient, engine, few)

    def measure(what: str, backward: bool = True, exact: float = 0.1) -> None:
        torch._dynamo.reset()
        seconds, first = timed(forward)
        with torch.no_grad():
            velocity = engine.velocity(**few)
        values = {"forward_ms": 1e3 * seconds, "forward_tflops": tflop(engine, work, given) / seconds, "first_s": first}
        off = apart({"v": velocity}, {"v": wanted.setdefault("v", velocity)})
        if backward:
            seconds, first = timed(update)
            found, share = gradients(engine), 2 * tflop(engine, work, few) / seconds
            values |= {"update_ms": 1e3 * seconds, "useful_tflops": share, "update_first_s": first}
            values |= {"gradient_off_by": apart(found, wanted.setdefault("g", found))}
        report(what, **values, velocity_off_by=off, good=off < exact, peak_gb=peak_gb())

    def variant(
        what: str, made: Callable[[], Any], seconds: float = 30, optional: bool = False, **options: Any
    ) -> None:
        with report.section(what, seconds, optional) as go:
            if go:
                with made():
                    measure(what, **options)

    def profile(what: str, run: Callable[[], Any]) -> None:
        run()
        with profiled(report, what):
            run()

    variant("as it ships", contextlib.nullcontext)
    with report.section("profile"):
        profile("forward", forward)
        profile("update", update)
    if not CPU:
        alone: dict[str, Any] = {"seconds": 20, "backward": False}
        variant("off: rows reduced at once, forward", variants.rows_in_pieces, **alone)
        variant("off: heads joined by one kernel, forward", variants.heads_by_the_compiler, **alone)
        variant("off: an adapter's sum inside that kernel, forward", variants.sums_before_heads, **alone)
        variant("off: GELU inside its product, forward", variants.gelu_after_product, **alone)
        variant("off: GELU by one exponential", variants.gelu_by_tanh)
        variant("on: fp8 weights, forward", lambda: fp8_weights(engine.module), **alone, exact=0.3)
        with report.section("profile in fp8"), fp8_weights(engine.module):
            profile("fp8 forward", forward)
    variant("no adapter, forward", lambda: engine.use_adapter("reference"), 15, backward=False, exact=9.0)
    with report.section("products"):
        products(size.small, report)
    if not CPU:
        variant("on: coordinate descent tuning", lambda: inductor.patch(coordinate_descent_tuning=True), 60)
        variant("on: FlashAttention 4", variants.fa4_attention, optional=True)
    variant("off: scale on the small tensor", lambda: variants.scale_on_the_output(engine))
    if not CPU:
        variant("on: torch's flash attention", variants.flash_attention)
        variant("off: compiling", lambda: variants.uncompiled(engine), 20)


def growth(size: Size, _: Path, report: Report) -> None:
    """How forward and update grow with batch and resolution. Steps, window and group multiply them: a sample costs
    K guided forwards and W guided updates."""
    import torch

    whole = WORKS["qwen_image"].config["num_layers"]
    work, blocks = shrunk(WORKS["qwen_image"], size.small), 2 if size.small else 12
    engine = policy(work, blocks)
    engine.recompute.count = 0
    large = [(512, [1, 2, 4, 8, 16, 32]), (1024, [1, 2, 4, 8]), (1328, [1, 2, 4])]
    for side, batches in [(64, [1, 2]), (128, [1])] if size.small else large:
        for rows in batches:
            with report.section(f"{side}², batch {rows}", 15) as go:
                if not go:
                    continue
                at = replace(work, height=side, across=side)
                given = inputs(engine, at, rows)
                with torch.no_grad():
                    forward, _ = timed(lambda given=given: engine.velocity(**given), 2)
                amount, values = tflop(engine, at, given), {}
                if rows * side * side <= 16 * 512 * 512:
                    update, _ = timed(lambda given=given: gradient(engine, given), 2)
                    values = {"update_s_an_image": update / rows * whole / blocks, "useful_tflops": 2 * amount / update}
                report(
                    f"{side}², batch {rows}", forward_s_an_image=forward / rows * whole / blocks,
                    forward_tflops=amount / forward, **values, peak_gb=peak_gb(),
                )  # fmt: skip


def sizes(size: Size, _: Path, report: Report) -> None:
    """SD3.5 Medium's size and Wan 5B's beside plain diffusers: rollout and update, guided, 10 steps, two of them trained."""
    import torch

    for name in ("sd35_medium", "wan_5b"):
        work = shrunk(WORKS[name], size.small)
        speed: dict[str, float] = {}
        for kind, measure in (("plain", plain), ("ours", ours)):
            with report.section(f"{name}, {kind}", 40) as go:
                if go:
                    forward, update, values = measure(work, report)
                    step = 10 * forward / work.batch + 2 * update / work.micro
                    speed[kind] = 1 / step
                    report(
                        f"{name}, {kind}", rollout_images_per_s=work.batch / (10 * forward), update_s=update,
                        step_images_per_s=1 / step, **values, peak_gb=peak_gb(),
                    )  # fmt: skip
            free()
            torch._dynamo.reset()
        if len(speed) == 2:
            report(f"{name}, ours over plain", times=speed["ours"] / speed["plain"])


def ours(work: Work, report: Report) -> tuple[float, float, dict[str, Any]]:
    """(seconds of a guided forward of a batch, of a guided update of a micro-batch, the rest); and where the time goes."""
    import torch

    engine = policy(work)
    found = passes(engine, work, engine.velocity)
    with torch.no_grad(), profiled(report, f"{work.architecture}, forward"):
        engine.velocity(**inputs(engine, work, work.batch))
    with profiled(report, f"{work.architecture}, update"):
        gradient(engine, inputs(engine, work, work.micro))
    return found


def times_of_tokens(_: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments of Wan's transformer as diffusers' own pipeline gives them for the 5B: a timestep for each token."""
    x, timestep, *others = given
    return x, timestep[:, None].expand(-1, x[0, 0].numel() // 4), *others


def plain(work: Work, _: Report) -> tuple[float, float, dict[str, Any]]:
    """The same of stock diffusers and PEFT: eager, fp32 adapter under autocast, gradient checkpointing."""
    import torch
    from peft.tuners.lora import Linear

    engine = policy(work, use_torch_compile=False)
    for layer in engine.module.modules():
        if isinstance(layer, Linear):
            layer.__class__ = Linear
    engine.module.enable_gradient_checkpointing()
    if work.architecture == "wan":
        engine.module.register_forward_pre_hook(times_of_tokens)
    return passes(engine, work, torch.autocast(device(), torch.bfloat16, enabled=not CPU)(engine.velocity))


def passes(engine: Any, work: Work, velocity: Callable[..., Any]) -> tuple[float, float, dict[str, Any]]:
    """What `ours` and `plain` return."""
    import torch

    given, few = inputs(engine, work, work.batch), inputs(engine, work, work.micro)
    forward, first = timed(torch.no_grad()(partial(velocity, **given)), 2)
    update, update_first = timed(partial(gradient, engine, few, velocity), 2)
    return forward, update, {
        "parameters": sum(p.numel() for p in engine.module.parameters()),
        "forward_tflops": tflop(engine, work, given) / forward,
        "useful_tflops": 2 * tflop(engine, work, few) / update,
        "recomputed": sorted(set(engine.recompute.chosen.values())),
        "first_s": first + update_first,
    }  # fmt: skip
