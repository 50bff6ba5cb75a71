"""Parts of `bench_gpu.py` that need transformer blocks alone: no folder, no prompts, no pictures.

All blocks of these transformers are equal, so what is won in a block shows on a few of them: a variant is compiled and timed in
20 s instead of minutes.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from bench_common import CPU, Report, device, now, peak_gb, timed

QWEN = {
    "patch_size": 2, "in_channels": 64, "out_channels": 16, "attention_head_dim": 128, "num_attention_heads": 24,
    "joint_attention_dim": 3584, "axes_dims_rope": [16, 56, 56],
}  # fmt: skip
SD35_MEDIUM = {
    "sample_size": 128, "patch_size": 2, "in_channels": 16, "out_channels": 16, "num_layers": 24, "attention_head_dim": 64,
    "num_attention_heads": 24, "joint_attention_dim": 4096, "caption_projection_dim": 1536, "pooled_projection_dim": 2048,
    "pos_embed_max_size": 384, "dual_attention_layers": list(range(13)), "qk_norm": "rms_norm",
}  # fmt: skip
WAN_5B = {
    "patch_size": [1, 2, 2], "num_attention_heads": 24, "attention_head_dim": 128, "in_channels": 48, "out_channels": 48,
    "text_dim": 4096, "freq_dim": 256, "ffn_dim": 14336, "num_layers": 30, "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads", "eps": 1e-6, "rope_max_seq_len": 1024,
}  # fmt: skip


@dataclass(frozen=True)
class Work:
    """A transformer and what it is asked."""

    architecture: str
    config: dict[str, Any]
    text: tuple[int, int]
    """Tokens of the prompt and of the negative one."""
    width: int
    """Channels of a text token."""
    pooled: int = 0
    vae: dict[str, Any] = field(default_factory=dict)
    height: int = 512
    across: int = 512
    frames: int = 1
    batch: int = 16
    micro: int = 8
    rank: int = 64


WORKS = {
    "qwen_image": Work("qwen_image", {**QWEN, "num_layers": 60}, (75, 6), 3584),
    "sd35_medium": Work("sd3", SD35_MEDIUM, (333, 333), 4096, 2048, {"block_out_channels": [1, 1, 1, 1]}),
    "wan_5b": Work(
        "wan", WAN_5B, (128, 128), 4096, vae={"scale_factor_spatial": 16, "scale_factor_temporal": 4},
        height=480, across=832, frames=33, batch=4, micro=2,
    ),
}  # fmt: skip


def shrunk(work: Work, small: bool) -> Work:
    """For a CPU: the same code on few and narrow blocks."""
    if not small:
        return work
    narrow: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2}
    narrow |= {"axes_dims_rope": [4, 6, 6]} if work.architecture == "qwen_image" else {}
    narrow |= {"caption_projection_dim": 32, "dual_attention_layers": [0]} if work.architecture == "sd3" else {}
    narrow |= {"ffn_dim": 64} if work.architecture == "wan" else {}
    side: dict[str, Any] = {"height": 64, "across": 64, "frames": min(work.frames, 5)}
    return replace(
        work, config={**work.config, **narrow}, text=(9, 9 if work.pooled else 5), batch=2, micro=2, rank=4, **side
    )


def policy(work: Work, blocks: int | None = None, dtype: Any = None, **options: Any) -> Any:
    """The trainer's engine over random weights, its adapter stirred."""
    import torch
    from fsdp_diffusers_engine import (
        DiffusionModelConfig,
        FSDPEngineConfig,
        FSDPOptimizerConfig,
        PPODiffusersFSDPEngine,
    )

    config = {**work.config, "num_layers": blocks or work.config["num_layers"]}
    if work.architecture == "sd3" and blocks:
        config["dual_attention_layers"] = [n for n in config["dual_attention_layers"] if n < blocks]
    model = DiffusionModelConfig(
        path="", architecture=work.architecture, transformer_config=config, lora_rank=work.rank, lora_alpha=2 * work.rank,
        target_modules="attention",
    )  # fmt: skip
    dtype = dtype or ("fp32" if CPU else "bf16")
    engine = PPODiffusersFSDPEngine(model, FSDPEngineConfig(model_dtype=dtype, **options), FSDPOptimizerConfig(lr=1e-4))
    engine.initialize()
    with tempfile.TemporaryDirectory() as made:  # the spec reads sizes from a folder
        for part, values in (("transformer", config), ("vae", work.vae)):
            (Path(made) / part).mkdir()
            (Path(made) / part / "config.json").write_text(json.dumps(values))
        (Path(made) / "model_index.json").write_text("{}")
        spec = type(engine.spec)(made)
        spec.latent_shape(work.height, work.across, work.frames)  # read now, the folder goes
        _ = spec.vae_config, spec.transformer_config, spec.scheduler_config
        engine.spec = spec
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in engine.trainable.items():
            if "lora_B" in name:
                parameter.copy_(1e-3 * torch.randn(parameter.shape, generator=draw))
    return engine


def inputs(engine: Any, work: Work, rows: int) -> dict[str, Any]:
    """Arguments of `engine.velocity`."""
    import torch
    from model_specs import PromptEmbeds
    from sde_samplers.settings import SamplerSettings

    draw = torch.Generator().manual_seed(2)
    settings = SamplerSettings(work.height, work.across, 10, num_frames=work.frames, true_cfg_scale=4.0)

    def normal(*shape: int) -> Any:
        """Numbers that bf16 holds exactly, as the noise level below: networks of both dtypes then see the same."""
        return torch.randn(rows, *shape, generator=draw).bfloat16().float().to(device())

    def prompt(tokens: int) -> Any:
        embeds, pooled = normal(tokens, work.width), normal(work.pooled) if work.pooled else None
        return PromptEmbeds(embeds, torch.ones(rows, tokens, dtype=torch.bool, device=device()), pooled)

    shape = engine.spec.latent_shape(work.height, work.across, work.frames)
    return {
        "latents": normal(*shape), "sigma": torch.full((rows,), 0.6875, device=device()),
        "cond": prompt(work.text[0]), "negative": prompt(work.text[1]), "settings": settings,
    }  # fmt: skip


def tflop(engine: Any, work: Work, given: dict[str, Any]) -> float:
    """Of one guided velocity: both passes."""
    rows, config = len(given["latents"]), dict(engine.module.config)
    return sum(float(engine.spec.flops(config, rows, given["settings"], text)) for text in work.text) / 1e12


def gradient(engine: Any, given: dict[str, Any], velocity: Callable[..., Any] | None = None) -> Any:
    """One forward and backward of a random linear functional of the velocity; gradients stay in the parameters."""
    import torch

    for parameter in engine.trainable.values():
        parameter.grad = None
    v = (velocity or engine.velocity)(**given)
    probe = torch.randn(v.shape, generator=torch.Generator().manual_seed(3)).to(v.device)
    (v * probe).sum().backward()
    return v.detach()


def gradients(engine: Any) -> dict[str, Any]:
    """Of all trained tensors, fp32."""
    return {name: p.grad.detach().float().clone() for name, p in engine.trainable.items() if p.grad is not None}


def apart(found: dict[str, Any], wanted: dict[str, Any]) -> float:
    """Norm of the difference over the norm of `wanted`."""
    off = sum(float((found[n] - wanted[n]).double().square().sum()) for n in wanted)
    return math.sqrt(off / max(sum(float(w.double().square().sum()) for w in wanted.values()), 1e-300))


def free() -> None:
    """Give back what nobody holds."""
    import torch

    gc.collect()
    if not CPU:
        torch.cuda.empty_cache()


@contextlib.contextmanager
def uncompiled(engine: Any) -> Iterator[None]:
    """Blocks as they are without the compiler."""
    kept = [block._compiled_call_impl for block in engine.blocks]
    for block in engine.blocks:
        block._compiled_call_impl = None
    try:
        yield
    finally:
        for block, call in zip(engine.blocks, kept, strict=True):
            block._compiled_call_impl = call


# ----------------------------------------------------------------------------------------------------------- attention


def attention(small: bool, report: Report) -> None:
    """One attention of a block, forward and backward, by each kernel that there is."""
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    rows, heads, wide = (1, 2, 16) if small else (8, 24, 128)
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

    for tokens in (20,) if small else (1024 + 75, 1024 + 6, 1024 + 128):
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
                    values |= {
                        "backward_ms": (whole - seconds) * 100,
                        "backward_tflops": 25 * work / (whole - seconds),
                    }
                report(f"{name}, {tokens} tokens", **values, off_by=off, good=off < 2e-2)
        with contextlib.suppress(Exception):
            from torch.nn.attention import restore_flash_attention_impl

            restore_flash_attention_impl()


# ----------------------------------------------------------------------------------------------------------- precision


def precision(small: bool, report: Report) -> None:
    """Which gradient is nearer to the true one: that of the blocks as they are, or that of the compiled ones?

    The reference is the same network in fp32 (its weights those of bf16, rounded already).
    """
    import torch

    work = shrunk(WORKS["qwen_image"], small)
    for blocks in (2,) if small else (6, 20, 60):
        gigabytes = 6 * 0.34 * blocks + 12
        with report.section(f"{blocks} blocks", seconds=30):
            if not CPU and torch.cuda.mem_get_info()[0] / 1e9 < gigabytes:
                report(f"{blocks} blocks", skipped=f"needs {gigabytes:.0f} GB")
                continue
            engine = policy(work, blocks, dtype="bf16", use_torch_compile=not CPU)
            exact = policy(work, blocks, dtype="fp32", use_torch_compile=False)
            own = dict(engine.module.named_parameters())
            with torch.no_grad():
                for name, parameter in exact.module.named_parameters():
                    parameter.copy_(own[name])
            given = inputs(engine, work, 2)
            wanted_v, wanted = gradient(exact, given), gradients(exact)
            del exact
            free()
            with uncompiled(engine):
                eager_v, eager = gradient(engine, given), gradients(engine)
            compiled_v, compiled = gradient(engine, given), gradients(engine)
            last = max(int(n.split("transformer_blocks.")[1].split(".")[0]) for n in wanted)

            def at(name: str, number: int) -> bool:
                return f"transformer_blocks.{number}." in name

            def some(found: dict[str, Any], number: int) -> dict[str, Any]:
                return {n: g for n, g in found.items() if at(n, number)}

            report(
                f"{blocks} blocks", gradient_not_compiled=apart(eager, wanted), gradient_compiled=apart(compiled, wanted),
                gradient_each_other=apart(compiled, eager), velocity_not_compiled=apart({"v": eager_v}, {"v": wanted_v}),
                velocity_compiled=apart({"v": compiled_v}, {"v": wanted_v}),
                first_block_not_compiled=apart(some(eager, 0), some(wanted, 0)),
                first_block_compiled=apart(some(compiled, 0), some(wanted, 0)),
                last_block_not_compiled=apart(some(eager, last), some(wanted, last)),
                last_block_compiled=apart(some(compiled, last), some(wanted, last)),
                good=apart(compiled, wanted) < 1.2 * apart(eager, wanted),
            )  # fmt: skip
            del engine, own, eager, compiled, wanted
            free()


# ------------------------------------------------------------------------------------------------------------- changes


@contextlib.contextmanager
def scale_on_the_output(engine: Any) -> Iterator[None]:
    """The adapter's scale on what B gives."""
    import torch.nn.functional as F
    from fsdp_diffusers_engine.adapted_linear import AdaptedLinear

    class Before(AdaptedLinear):
        def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
            y = self.base_layer(x)
            for name in self.active_adapters:
                a: Any = self.lora_A[name].weight
                b: Any = self.lora_B[name].weight
                y = y + F.linear(F.linear(x, a.to(x.dtype)), b.to(x.dtype)) * self.scaling[name]
            return y

    layers = [m for m in engine.module.modules() if type(m) is AdaptedLinear]
    for layer in layers:
        layer.__class__ = Before
    try:
        yield
    finally:
        for layer in layers:
            layer.__class__ = AdaptedLinear


@contextlib.contextmanager
def flash_attention() -> Iterator[None]:
    """Torch's own flash attention in place of cuDNN's, which torch takes where it can."""
    import torch

    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


@contextlib.contextmanager
def fa4_attention() -> Iterator[None]:
    """FlashAttention 4 behind torch's own attention."""
    from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

    activate_flash_attention_impl("FA4")
    try:
        yield
    finally:
        restore_flash_attention_impl()


def sums_before_heads() -> Any:
    """What the adapter adds to queries and keys, added by a kernel of the compiler's."""
    from fsdp_diffusers_engine.joined_heads import joined_heads

    def sums(text: Any, image: Any, text_added: Any, image_added: Any, *others: Any) -> Any:
        return joined_heads(text + text_added, image + image_added, *others)

    return patch("fsdp_diffusers_engine.joined_heads.joined_heads_of_sums", sums)


def gelu_by_tanh() -> Any:
    """GELU as the compiler makes it by itself."""
    import torch.nn.functional as F

    return patch("fsdp_diffusers_engine.gelu.gelu_by_exponential", partial(F.gelu, approximate="tanh"))


@contextlib.contextmanager
def rows_in_pieces() -> Iterator[None]:
    """Reductions of long rows as the compiler makes them by itself."""
    from torch._inductor import config
    from torch._inductor.choices import InductorChoices

    ours: Any = InductorChoices.should_use_persistent_reduction
    InductorChoices.should_use_persistent_reduction = staticmethod(ours.args[0])  # type: ignore[method-assign]
    try:
        with config.patch(force_disable_caches=True):  # whose keys do not know of this
            yield
    finally:
        InductorChoices.should_use_persistent_reduction = staticmethod(ours)  # type: ignore[method-assign]


def heads_by_the_compiler() -> Any:
    """Queries and keys without the kernel that joins them."""
    return patch("fsdp_diffusers_engine.rotary.takes_joined_heads", lambda *_: False)


def no_adapter(engine: Any) -> Any:
    """What the adapter costs at most."""
    return engine.use_adapter("reference")


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
            kinds[f"fp8, a scale a row, fast sum {fast}"] = partial(
                torch._scaled_mm, low, wide.t(), scale, scales.t(), **options
            )
            kinds[f"fp8, one scale, fast sum {fast}"] = partial(torch._scaled_mm, low, wide.t(), one, one, **options)
        rates = dict[str, float]()
        for name, call in kinds.items():
            seconds, _ = timed(lambda call=call: [call() for _ in range(10)])  # type: ignore[misc]
            rates[name] = round(2e-11 * rows * width * out / seconds, 3)
        report(f"products, {width} to {out}", tflops_of=rates)


def changes(small: bool, report: Report) -> None:
    """Each change off and on, on some blocks; and where the kernels' time goes."""
    import torch
    from omni_rollout.fp8 import fp8_weights
    from torch._dynamo import config as dynamo
    from torch._inductor import config as inductor

    work, blocks = shrunk(WORKS["qwen_image"], small), 2 if small else 12
    start = now()
    engine = policy(work, blocks, use_torch_compile=None if not CPU else False)
    engine.recompute.count = 0
    given, few = inputs(engine, work, work.batch), inputs(engine, work, work.micro)
    report("start", seconds=now() - start, blocks=blocks)
    wanted: dict[str, Any] = {}

    def measure(what: str, backward: bool = True, exact: float = 0.1) -> None:
        torch._dynamo.reset()
        values: dict[str, Any] = {}
        with torch.no_grad():
            seconds, first = timed(lambda: engine.velocity(**given))
            velocity = engine.velocity(**few)
        values |= {
            "forward_ms": 1e3 * seconds,
            "forward_tflops": tflop(engine, work, given) / seconds,
            "first_s": first,
        }
        wanted.setdefault("v", velocity)
        off = apart({"v": velocity}, {"v": wanted["v"]})
        if backward:
            seconds, first = timed(lambda: gradient(engine, few))
            found = gradients(engine)
            wanted.setdefault("g", found)
            share = 2 * tflop(engine, work, few) / seconds
            values |= {"update_ms": 1e3 * seconds, "useful_tflops": share, "update_first_s": first}
            values |= {"gradient_off_by": apart(found, wanted["g"])}
        report(what, **values, velocity_off_by=off, good=off < exact, peak_gb=peak_gb())

    def variant(
        what: str, made: Callable[[], Any], seconds: float = 30, optional: bool = False, **options: Any
    ) -> None:
        with report.section(what, seconds, optional) as go:
            if go:
                with made():
                    measure(what, **options)

    variant("as it ships", contextlib.nullcontext)
    with report.section("profile"):
        profile(report, "forward", lambda: _without_gradient(engine, given))
        profile(report, "update", lambda: gradient(engine, few))
    if not CPU:
        variant("off: rows reduced at once, forward", rows_in_pieces, 20, backward=False)
        variant("off: heads joined by one kernel, forward", heads_by_the_compiler, 20, backward=False)
        variant("off: an adapter's sum inside that kernel, forward", sums_before_heads, 20, backward=False)
        variant("off: GELU by one exponential", gelu_by_tanh, 30)
        variant("on: fp8 weights, forward", lambda: fp8_weights(engine.module), 20, backward=False, exact=0.3)
        with report.section("profile in fp8"), fp8_weights(engine.module):
            profile(report, "fp8 forward", lambda: _without_gradient(engine, given))
    variant("no adapter, forward", lambda: no_adapter(engine), 15, backward=False, exact=9.0)
    with report.section("products"):
        products(small, report)
    if not CPU:
        variant("on: coordinate descent tuning", lambda: inductor.patch(coordinate_descent_tuning=True), 60)
        variant("on: static shapes", lambda: dynamo.patch(automatic_dynamic_shapes=False))
        variant("on: FlashAttention 4", fa4_attention, optional=True)
    variant("off: scale on the small tensor", lambda: scale_on_the_output(engine))
    if not CPU:
        variant("on: torch's flash attention", flash_attention)
        variant("off: compiling", lambda: uncompiled(engine), 20)


def _without_gradient(engine: Any, given: dict[str, Any]) -> None:
    import torch

    with torch.no_grad():
        engine.velocity(**given)


def profile(report: Report, what: str, run: Callable[[], Any]) -> None:
    """Time of the kernels by kind, and the largest of them."""
    run()
    start = now()
    with traced() as kernels:
        run()
        wall = now() - start
    report_kernels(report, what, wall, kernels)


@contextlib.contextmanager
def traced() -> Iterator[list[tuple[float, int, str]]]:
    """A list that afterwards holds the kernels of this process: milliseconds, calls, name."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as trace

    kernels: list[tuple[float, int, str]] = []
    with trace(activities=[ProfilerActivity.CPU if CPU else ProfilerActivity.CUDA]) as found:
        yield kernels
    for row in found.key_averages():
        spent = float(row.self_cpu_time_total if CPU else row.self_device_time_total) / 1e3
        if spent > 0:
            kernels.append((round(spent, 3), row.count, row.key[:70]))


def report_kernels(report: Report, what: str, wall: float, kernels: list[tuple[float, int, str]], **more: Any) -> None:
    """Milliseconds by kind, and the largest kernels."""
    kinds: dict[str, float] = {}
    for spent, _, name in kernels:
        kinds[kind_of(name)] = kinds.get(kind_of(name), 0.0) + spent
    kinds = {k: round(v, 2) for k, v in sorted(kinds.items(), key=lambda kv: -kv[1])}
    report(f"profile, {what}", wall_ms=1e3 * wall, kernels_ms=sum(kinds.values()), kinds_ms=kinds, **more)
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


# -------------------------------------------------------------------------------------------------------------- growth


def growth(small: bool, report: Report) -> None:
    """How forward and update grow with batch and resolution. Steps, window and group multiply them: a sample costs
    K guided forwards and W guided updates."""
    import torch

    whole = WORKS["qwen_image"].config["num_layers"]
    work, blocks = shrunk(WORKS["qwen_image"], small), 2 if small else 12
    engine = policy(work, blocks, use_torch_compile=None if not CPU else False)
    engine.recompute.count = 0
    sizes = (
        [(64, [1, 2]), (128, [1])] if small else [(512, [1, 2, 4, 8, 16, 32]), (1024, [1, 2, 4, 8]), (1328, [1, 2, 4])]
    )
    for side, batches in sizes:
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


# --------------------------------------------------------------------------------------------------------- other sizes


def sizes(small: bool, report: Report) -> None:
    """SD3.5 Medium's size and Wan 5B's beside plain diffusers: rollout and update, guided, 10 steps, two of them trained."""
    import torch

    for name in ("sd35_medium", "wan_5b"):
        work = shrunk(WORKS[name], small)
        speed: dict[str, float] = {}
        for kind, measure in (("plain", plain), ("ours", ours)):
            with report.section(f"{name}, {kind}", 40) as go:
                if go:
                    forward, update, values = measure(work)
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


def ours(work: Work) -> tuple[float, float, dict[str, Any]]:
    """(seconds of a guided forward of a batch, of a guided update of a micro-batch, the rest)."""
    import torch

    engine = policy(work, use_torch_compile=None if not CPU else False)
    given, few = inputs(engine, work, work.batch), inputs(engine, work, work.micro)
    with torch.no_grad():
        forward, first = timed(lambda: engine.velocity(**given), 2)
    update, update_first = timed(lambda: gradient(engine, few), 2)
    return forward, update, {
        "parameters": sum(p.numel() for p in engine.module.parameters()),
        "forward_tflops": tflop(engine, work, given) / forward,
        "useful_tflops": 2 * tflop(engine, work, few) / update,
        "recomputed": sorted(set(engine.recompute.chosen.values())),
        "first_s": first + update_first,
    }  # fmt: skip


def plain(work: Work) -> tuple[float, float, dict[str, Any]]:
    """The same of stock diffusers and PEFT: eager, fp32 adapter under autocast, gradient checkpointing."""
    import torch
    from peft.tuners.lora import Linear

    engine = policy(work, use_torch_compile=False)
    for layer in engine.module.modules():
        if isinstance(layer, Linear):
            layer.__class__ = Linear
    engine.module.enable_gradient_checkpointing()
    autocast = torch.autocast(device(), torch.bfloat16, enabled=not CPU)
    given, few = inputs(engine, work, work.batch), inputs(engine, work, work.micro)

    def velocity(**options: Any) -> Any:
        with autocast:
            return engine.velocity(**options)

    with torch.no_grad():
        forward, _ = timed(lambda: velocity(**given), 2)
    update, _ = timed(lambda: gradient(engine, few, velocity), 2)
    return forward, update, {"useful_tflops": 2 * tflop(engine, work, few) / update}


def lora_products(small: bool, report: Report) -> None:
    """An engine's layers of 16 rows with an adapter: its product added to the layer's as it ships, or the layer's added to it."""
    import torch
    from omni_rollout.vllm_omni.lora_product import add_lora

    tokens, wide, rank, dtype = (32, 24, 4, torch.float32) if small else (16 * 1099, 3072, 64, torch.bfloat16)
    for name, parts in (("qkv", 3), ("out", 1)):
        sizes = [wide] * parts
        x, weight, bias, a, b = (
            torch.randn(shape, device=device(), dtype=dtype) * 0.05
            for shape in ((tokens, wide), (sum(sizes), wide), (sum(sizes),), (parts * rank, wide), (sum(sizes), rank))
        )

        def alone(x: Any = x, weight: Any = weight, bias: Any = bias) -> Any:
            return torch.nn.functional.linear(x, weight, bias)

        def added(x: Any = x, a: Any = a, b: Any = b, sizes: Any = sizes, alone: Any = alone) -> Any:
            y = alone()
            add_lora(y, x, a, b, sizes)
            return y

        def first(x: Any = x, w: Any = weight, bias: Any = bias, a: Any = a, b: Any = b, sizes: Any = sizes) -> Any:
            low, y, start = x @ a.t(), x.new_empty(len(x), len(w)), 0
            for part, size in enumerate(sizes):
                columns = slice(start, start + size)
                down = low[:, part * rank : (part + 1) * rank]
                torch.addmm(bias[columns], down, b[columns].t(), out=y[:, columns])
                start += size
            return y.addmm_(x, w.t())

        wanted = alone(x[:256].double(), weight.double(), bias.double())
        for part, size in enumerate(sizes):
            rows = slice(part * rank, (part + 1) * rank)
            wanted[:, part * size : (part + 1) * size] += (
                x[:256].double() @ a[rows].double().t() @ b[part * size : (part + 1) * size].double().t()
            )
        for what, run in (("no adapter", alone), ("as it ships", added), ("the layer's added", first)):
            seconds, _ = timed(lambda run=run: [run() for _ in range(20)], 5)
            off = float((run()[:256].double() - wanted).norm() / wanted.norm())
            report(f"{name}, {what}", ms=50 * seconds, off_by=off, good=what == "no adapter" or off < 1e-2)


PARTS: dict[str, Callable[[bool, Report], None]] = {
    "lora_products": lora_products,
    "attention": attention, "precision": precision, "changes": changes, "growth": growth, "sizes": sizes,
}  # fmt: skip
