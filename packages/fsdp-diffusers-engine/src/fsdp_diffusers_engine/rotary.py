"""Rotary embeddings that the compiler can take in: it has no complex numbers, so it runs diffusers' form as it is, in fp32, between
the kernels that it makes; and it writes halves of pairs apart from the norm before them. Outside of compiled code nothing changes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def let_compile() -> None:
    """Let compiled blocks of Qwen-Image, Z-Image and Wan turn their queries and keys by real numbers."""
    from diffusers.models.transformers import transformer_qwenimage, transformer_wan, transformer_z_image

    qwen: Any = transformer_qwenimage.QwenDoubleStreamAttnProcessor2_0
    z_image: Any = transformer_z_image.ZSingleStreamAttnProcessor
    wan: Any = transformer_wan.WanAttnProcessor
    if getattr(qwen.__call__, "__name__", "") == "compiled_qwen":
        return
    stock_qwen: Any = qwen.__call__
    stock_z_image: Any = z_image.__call__
    stock_wan: Any = wan.__call__
    complex_form: Any = transformer_qwenimage.ROPE_PER_DEVICE["cuda"]

    def rotate(x: Tensor, freqs: Tensor) -> Tensor:
        return rotated(x, freqs) if torch.compiler.is_compiling() else complex_form(x, freqs)

    # diffusers reads the names of these arguments.
    def compiled_qwen(
        self: Any,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Any = None,
        encoder_hidden_states_mask: Any = None,
        attention_mask: Any = None,
        image_rotary_emb: Any = None,
    ) -> tuple[Tensor, Tensor]:
        given = hidden_states, encoder_hidden_states, encoder_hidden_states_mask
        if torch.compiler.is_compiling() and takes_joined_heads(self, attn, hidden_states):
            return attend_jointly(self, attn, *given, image_rotary_emb)
        return stock_qwen(self, attn, *given, attention_mask, image_rotary_emb)  # type: ignore[no-any-return]

    def compiled_z_image(
        self: Any,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Any = None,
        attention_mask: Any = None,
        freqs_cis: Any = None,
    ) -> Tensor:
        if torch.compiler.is_compiling() and freqs_cis is not None:
            return attend(self, attn, hidden_states, attention_mask, freqs_cis)
        given = hidden_states, encoder_hidden_states, attention_mask, freqs_cis
        return stock_z_image(self, attn, *given)  # type: ignore[no-any-return]

    def compiled_wan(
        self: Any,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Any = None,
        attention_mask: Any = None,
        rotary_emb: Any = None,
    ) -> Tensor:
        if torch.compiler.is_compiling() and rotary_emb is not None and not attn.fused_projections:
            return attend_wan(self, attn, hidden_states, attention_mask, rotary_emb)
        given = hidden_states, encoder_hidden_states, attention_mask, rotary_emb
        return stock_wan(self, attn, *given)  # type: ignore[no-any-return]

    transformer_qwenimage.ROPE_PER_DEVICE["cuda"] = rotate
    qwen.__call__, z_image.__call__, wan.__call__ = compiled_qwen, compiled_z_image, compiled_wan


def takes_joined_heads(processor: Any, attn: Any, hidden_states: Tensor) -> bool:
    """Whether the kernel is for these numbers: bf16 on a GPU, norms that are not trained, whole sequences, heads of 2, 4, 8, …
    channels."""
    if not hidden_states.is_cuda or processor._parallel_config is not None:
        return False
    norms = (attn.norm_q, attn.norm_k, attn.norm_added_q, attn.norm_added_k)
    weights: list[Any] = [getattr(norm, "weight", None) for norm in norms]
    if any(each is None or each.requires_grad or not _doubled(each.shape[0]) for each in weights):
        return False
    return all(each.dtype == torch.bfloat16 for each in (hidden_states, *weights))


def _doubled(channels: int) -> bool:
    return channels & (channels - 1) == 0  # Triton counts in powers of two only


def attend_jointly(
    processor: Any,
    attn: Any,
    image: Tensor,
    text: Tensor,
    mask: Tensor | None,
    angles: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """What Qwen-Image's stock processor computes, of image [B, S, C] and text [B, T, C]: both, attended."""
    from diffusers.models.attention_dispatch import dispatch_attention_fn
    from model_specs.joined_heads import joined_heads, joined_heads_of_sums

    from .adapted_linear import AdaptedLinear

    image_angle, text_angle = (torch.view_as_real(angle) for angle in angles)

    def heads(of_text: Any, of_image: Any, text_norm: Any, image_norm: Any) -> Tensor:
        rest = text_norm.weight, image_norm.weight, text_angle, image_angle, image_norm.eps
        both = ((of_text, text), (of_image, image))
        if not torch.is_grad_enabled() and all(isinstance(layer, AdaptedLinear) for layer, _ in both):
            parts = [layer.added(x) for layer, x in both]
            if all(len(each) == 1 for each in parts):  # a gradient would keep both of them, instead of their sum
                own = [layer.base_layer(x) for layer, x in both]
                return joined_heads_of_sums(*own, parts[0][0], parts[1][0], *rest)
        return joined_heads(of_text(text), of_image(image), *rest)

    query = heads(attn.add_q_proj, attn.to_q, attn.norm_added_q, attn.norm_q)
    key = heads(attn.add_k_proj, attn.to_k, attn.norm_added_k, attn.norm_k)
    value = torch.cat([attn.add_v_proj(text), attn.to_v(image)], dim=1).view_as(query)
    if mask is not None:
        mask = torch.cat([mask, mask.new_ones(image.shape[:2])], dim=1)[:, None, None, :]
    attended = dispatch_attention_fn(query, key, value, attn_mask=mask, backend=processor._attention_backend)
    attended = attended.flatten(2, 3)
    at_text, at_image = attended[:, : text.shape[1]].contiguous(), attended[:, text.shape[1] :].contiguous()
    return attn.to_out[1](attn.to_out[0](at_image)), attn.to_add_out(at_text)


def attend(processor: Any, attn: Any, tokens: Tensor, mask: Tensor | None, freqs: Tensor) -> Tensor:
    """What Z-Image's stock processor computes, of tokens [B, S, C], which `freqs` [B, S, D/2] turn."""
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    query, key, value = (
        project(tokens).unflatten(-1, (attn.heads, -1)) for project in (attn.to_q, attn.to_k, attn.to_v)
    )
    query = query if attn.norm_q is None else attn.norm_q(query)
    key = key if attn.norm_k is None else attn.norm_k(key)
    if mask is not None and mask.ndim == 2:
        mask = mask[:, None, None, :]
    kernel = {"backend": processor._attention_backend, "parallel_config": processor._parallel_config}
    attended = dispatch_attention_fn(rotated(query, freqs), rotated(key, freqs), value, attn_mask=mask, **kernel)
    for layer in attn.to_out:
        attended = layer(attended if attended.ndim == 3 else attended.flatten(2))
    return attended


def attend_wan(processor: Any, attn: Any, tokens: Tensor, mask: Tensor | None, angles: tuple[Tensor, Tensor]) -> Tensor:
    """What Wan's stock processor computes, of tokens [B, S, C] among themselves."""
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    from .adapted_linear import AdaptedLinear

    cos, sin = angles
    pairs = torch.stack([cos[0, :, 0, ::2], sin[0, :, 0, ::2]], dim=-1)

    def heads(project: Any, norm: Any) -> Tensor:
        added = project.added(tokens) if isinstance(project, AdaptedLinear) else []
        if len(added) > 1 or not takes_turned_heads(processor, attn, norm, tokens):
            return turned(norm(project(tokens)).unflatten(-1, (attn.heads, -1)), cos, sin)
        from model_specs.joined_heads import turned_heads

        own = project.base_layer(tokens) if added else project(tokens)
        return turned_heads(own, added[0] if added else None, norm.weight, pairs, norm.eps)

    query, key = heads(attn.to_q, attn.norm_q), heads(attn.to_k, attn.norm_k)
    value = attn.to_v(tokens).unflatten(-1, (attn.heads, -1))
    kernel = {"backend": processor._attention_backend, "parallel_config": processor._parallel_config}
    attended = dispatch_attention_fn(query, key, value, attn_mask=mask, **kernel).flatten(2, 3)
    for layer in attn.to_out:
        attended = layer(attended)
    return attended


def takes_turned_heads(processor: Any, attn: Any, norm: Any, tokens: Tensor) -> bool:
    """Whether the kernel is for these numbers: bf16 on a GPU, nothing differentiated, whole sequences, heads of 2, 4, 8, …
    channels."""
    whole = tokens.is_cuda and processor._parallel_config is None and _doubled(norm.weight.shape[0] // attn.heads)
    return whole and not torch.is_grad_enabled() and tokens.dtype == norm.weight.dtype == torch.bfloat16


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x` [B, S, H, D], its pairs of neighbouring channels turned in fp32, each channel by itself: so the compiler does it where it
    norms. `cos`, `sin` [1, S, 1, D] hold each pair's angle twice."""
    neighbour = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    sign = 2 * (torch.arange(x.shape[-1], device=x.device) % 2) - 1
    return (x.float() * cos + neighbour.float() * (sign * sin)).type_as(x)


def rotated(x: Tensor, freqs: Tensor) -> Tensor:
    """Pairs of neighbouring channels turned as complex numbers, by real arithmetic in fp32.

    Args:
        x: [B, S, H, D]. freqs: unit complex numbers [S, D/2] or [B, S, D/2].
    """
    cos, sin = torch.view_as_real(freqs).unsqueeze(-3).unbind(-1)  # […, S, 1, D/2]
    real, imaginary = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([real * cos - imaginary * sin, real * sin + imaginary * cos], dim=-1).flatten(-2).type_as(x)
