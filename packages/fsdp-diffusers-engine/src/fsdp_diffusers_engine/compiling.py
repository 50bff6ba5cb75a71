"""Compiling the repeated blocks of a transformer, and keeping what was compiled for the next run."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

_GRAPHS = 64


def compile_blocks(blocks: Sequence[nn.Module]) -> None:
    """Compile each block in place; equal blocks share their graphs.

    With and without gradients, adapters and text mask, the first block and the others, two micro-batch sizes: more
    graphs than Dynamo's limit of 8. At the limit it goes on uncompiled, and a checkpointed block that was compiled in
    forward and is recomputed uncompiled fails. So the limit is raised, for this process.
    """
    import torch._dynamo

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _GRAPHS)
    keep_graphs()
    _rotate_without_complex_numbers()
    _join_heads_without_gradient()
    _reduce_rows_at_once()
    for block in blocks:
        block.compile()


_ROW = 16384


def whole_rows(stock: Callable[[Any, bool], bool], features: Any, cooperative_reduction: bool) -> bool:
    """Whether the compiler makes one pass of a reduction: rows of up to 16,384 numbers stay in registers (its own limit is 1,024),
    so that norms, and the rounding of a row to fp8, read their row once."""
    from torch._inductor.runtime.hints import ReductionHint

    short = features.reduction_numel.is_Integer and 1024 < int(features.reduction_numel) <= _ROW
    inner = features.get_reduction_hint() == ReductionHint.INNER
    return (short and inner and not cooperative_reduction) or stock(features, cooperative_reduction)


def _reduce_rows_at_once() -> None:
    from torch._inductor.choices import InductorChoices

    stock = InductorChoices.should_use_persistent_reduction
    if not isinstance(stock, partial):
        InductorChoices.should_use_persistent_reduction = staticmethod(partial(whole_rows, stock))  # type: ignore[method-assign]


def keep_graphs() -> None:
    """Keep what is compiled in the user's cache folder: torch's own default lies in /tmp, which a restart empties. A folder that
    was set by `TORCHINDUCTOR_CACHE_DIR` stays."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    if os.environ.get("TORCHINDUCTOR_CACHE_DIR") in (None, default_cache_dir()):
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache / "fsdp-diffusers-engine" / "rows")


def _rotate_without_complex_numbers() -> None:
    """Let Qwen-Image's rotary embedding be compiled: the compiler has no complex numbers, so it runs diffusers' form as
    it is, in fp32, between the kernels that it makes. Outside of compiled code nothing changes."""
    from diffusers.models.transformers.transformer_qwenimage import ROPE_PER_DEVICE

    if getattr(ROPE_PER_DEVICE["cuda"], "__name__", "") != "rotate":
        complex_form: Any = ROPE_PER_DEVICE["cuda"]

        def rotate(x: Tensor, freqs: Tensor) -> Tensor:
            if torch.compiler.is_compiling():
                return rotated(x, freqs)
            return complex_form(x, freqs)  # type: ignore[no-any-return]

        ROPE_PER_DEVICE["cuda"] = rotate


def _join_heads_without_gradient() -> None:
    """Let compiled blocks of Qwen-Image on a GPU make their queries and keys by `joined_heads` where no gradient is asked for."""
    from diffusers.models.transformers import transformer_qwenimage as theirs

    attention = theirs.QwenDoubleStreamAttnProcessor2_0
    if getattr(attention.__call__, "__name__", "") == "joined":
        return
    stock: Any = attention.__call__

    def joined(
        self: Any,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Any = None,
        encoder_hidden_states_mask: Any = None,
        attention_mask: Any = None,
        image_rotary_emb: Any = None,
    ) -> tuple[Tensor, Tensor]:  # diffusers reads these names
        given = hidden_states, encoder_hidden_states, encoder_hidden_states_mask
        if torch.compiler.is_compiling() and takes_joined_heads(self, attn, hidden_states):
            return attend(self, attn, *given, image_rotary_emb)
        return stock(self, attn, *given, attention_mask, image_rotary_emb)  # type: ignore[no-any-return]

    attention.__call__ = joined


def takes_joined_heads(processor: Any, attn: Any, hidden_states: Tensor) -> bool:
    """Whether the kernel is for these numbers: bf16 on a GPU, no gradient, whole sequences."""
    if torch.is_grad_enabled() or not hidden_states.is_cuda or processor._parallel_config is not None:
        return False
    norms = (attn.norm_q, attn.norm_k, attn.norm_added_q, attn.norm_added_k)
    weights = [getattr(norm, "weight", None) for norm in norms]
    return all(each is not None and each.dtype == torch.bfloat16 for each in (hidden_states, *weights))


def attend(
    processor: Any,
    attn: Any,
    image: Tensor,
    text: Tensor,
    mask: Tensor | None,
    angles: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """What the stock processor computes, of image [B, S, C] and text [B, T, C]: both, attended."""
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    from .joined_heads import joined_heads

    image_angle, text_angle = (torch.view_as_real(angle) for angle in angles)

    def heads(of_text: Any, of_image: Any, text_norm: Any, image_norm: Any) -> Tensor:
        given = of_text(text), of_image(image), text_norm.weight, image_norm.weight
        return joined_heads(*given, text_angle, image_angle, image_norm.eps)

    query = heads(attn.add_q_proj, attn.to_q, attn.norm_added_q, attn.norm_q)
    key = heads(attn.add_k_proj, attn.to_k, attn.norm_added_k, attn.norm_k)
    value = torch.cat([attn.add_v_proj(text), attn.to_v(image)], dim=1).view_as(query)
    if mask is not None:
        mask = torch.cat([mask, mask.new_ones(image.shape[:2])], dim=1)[:, None, None, :]
    attended = dispatch_attention_fn(query, key, value, attn_mask=mask, backend=processor._attention_backend)
    attended = attended.flatten(2, 3)
    at_text, at_image = attended[:, : text.shape[1]].contiguous(), attended[:, text.shape[1] :].contiguous()
    return attn.to_out[1](attn.to_out[0](at_image)), attn.to_add_out(at_text)


def rotated(x: Tensor, freqs: Tensor) -> Tensor:
    """Pairs of neighbouring channels turned as complex numbers, by real arithmetic in fp32.

    Args:
        x: [B, S, H, D]. freqs: unit complex numbers [S, D/2].
    """
    cos, sin = torch.view_as_real(freqs).unsqueeze(1).unbind(-1)  # [S, 1, D/2]
    real, imaginary = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([real * cos - imaginary * sin, real * sin + imaginary * cos], dim=-1).flatten(-2).type_as(x)
