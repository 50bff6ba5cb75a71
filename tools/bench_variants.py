"""What the part `changes` of `bench_gpu.py` turns off or on: contexts in which blocks are as without it, or with it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch


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
    from model_specs.joined_heads import joined_heads

    def sums(text: Any, image: Any, text_added: Any, image_added: Any, *others: Any) -> Any:
        return joined_heads(text + text_added, image + image_added, *others)

    return patch("model_specs.joined_heads.joined_heads_of_sums", sums)


def gelu_after_product() -> Any:
    """GELU as a kernel of its own, where a block samples too."""
    return patch("fsdp_diffusers_engine.gelu.takes_product", lambda *_: False)


@contextlib.contextmanager
def gelu_by_tanh() -> Iterator[None]:
    """GELU as the compiler makes it by itself."""
    import torch
    from torch._inductor import decomposition

    table: Any = decomposition.decompositions
    names = torch.ops.aten.gelu.default, torch.ops.aten.gelu_backward.default
    stock = {name: table[name].args[0] for name in names}
    with gelu_after_product(), patch.dict(table, stock), _compiled_anew():
        decomposition.fast_random_decomps.cache_clear()
        yield
    decomposition.fast_random_decomps.cache_clear()


@contextlib.contextmanager
def rows_in_pieces() -> Iterator[None]:
    """Reductions of long rows as the compiler makes them by itself."""
    from torch._inductor.choices import InductorChoices

    ours: Any = InductorChoices.should_use_persistent_reduction
    InductorChoices.should_use_persistent_reduction = staticmethod(ours.args[0])  # type: ignore[method-assign]
    try:
        with _compiled_anew():
            yield
    finally:
        InductorChoices.should_use_persistent_reduction = staticmethod(ours)  # type: ignore[method-assign]


def _compiled_anew() -> Any:
    """Without the graphs that are kept, whose keys do not know of what was changed."""
    from torch._inductor import config

    return config.patch(force_disable_caches=True)


def heads_by_the_compiler() -> Any:
    """Queries and keys without the kernel that joins them."""
    return patch("fsdp_diffusers_engine.rotary.takes_joined_heads", lambda *_: False)
