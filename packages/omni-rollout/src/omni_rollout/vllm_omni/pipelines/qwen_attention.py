"""Qwen-Image's attention in an engine, its queries and keys by the kernel that the trainer's compiled blocks use."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from vllm_omni.diffusion.attention.backends.abstract import AttentionMetadata
from vllm_omni.diffusion.models.qwen_image.qwen_image_transformer import QwenImageCrossAttention


def let_compile(transformer: nn.Module) -> None:
    """Let the blocks of this transformer use it where they are compiled."""
    for module in transformer.modules():
        if type(module) is QwenImageCrossAttention:
            module.__class__ = JoinedAttention


class JoinedAttention(QwenImageCrossAttention):
    """The engine's own layer; in a compiled graph another way to the same numbers, rounded once less."""

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        vid_freqs: Tensor,
        txt_freqs: Tensor,
        hidden_states_mask: Tensor | None = None,
        encoder_hidden_states_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Image [B, S, C] and text [B, T, C], attended; unit complex angles [S, D/2] and [T, D/2]; masks [B, S], [B, T]."""
        if not torch.compiler.is_compiling() or hidden_states_mask is not None or not takes_joined_heads(self):
            given = hidden_states, encoder_hidden_states, vid_freqs, txt_freqs
            return super().forward(*given, hidden_states_mask, encoder_hidden_states_mask)  # type: ignore[no-any-return]
        from model_specs.joined_heads import joined_heads

        image, text = self.to_qkv(hidden_states)[0], self.add_kv_proj(encoder_hidden_states)[0]
        angles, width = (
            [torch.view_as_real(each) for each in (txt_freqs, vid_freqs)],
            self.head_dim * self.query_num_heads,
        )
        parts = list(zip(text.split(width, dim=-1), image.split(width, dim=-1), strict=True))
        query = joined_heads(*parts[0], self.norm_added_q.weight, self.norm_q.weight, *angles, self.eps)
        key = joined_heads(*parts[1], self.norm_added_k.weight, self.norm_k.weight, *angles, self.eps)
        value = torch.cat(parts[2], dim=1).view_as(query)
        mask, metadata = encoder_hidden_states_mask, None
        if mask is not None:
            metadata = AttentionMetadata(attn_mask=torch.cat([mask, mask.new_ones(image.shape[:2])], dim=1))
        attended = self.attn(query, key, value, metadata).flatten(2, 3)
        # One copy each: products in fp8, and an adapter's, want rows without gaps.
        at_text, at_image = attended[:, : text.shape[1]].contiguous(), attended[:, text.shape[1] :].contiguous()
        return self.to_out(at_image), self.to_add_out(at_text)


def takes_joined_heads(attention: QwenImageCrossAttention) -> bool:
    """Whether the kernel is for this layer: bf16 on a GPU, as many keys as queries, whole sequences, a power of 2 as width."""
    weight: Tensor | None = getattr(attention.norm_q, "weight", None)
    config = attention.parallel_config
    whole = config is None or config.sequence_parallel_size == 1
    alike = attention.query_num_heads == attention.kv_num_heads == attention.add_query_num_heads
    fits = whole and alike and attention.head_dim & (attention.head_dim - 1) == 0
    return weight is not None and weight.is_cuda and weight.dtype == torch.bfloat16 and fits
