"""FLUX.1 in vLLM-Omni. Latents are packed: [B, S, 64]."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm_omni.diffusion.models.flux.pipeline_flux import FluxPipeline

from ..denoise import RolloutMixin, stack_padded


class FluxRolloutPipeline(RolloutMixin, FluxPipeline):
    """Whole requests."""

    timestep_scale = 1.0

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        # The engine's LoRA manager learns from this attribute what its fused projections consist of; FLUX's transformer,
        # alone among the five, does not set it, and an adapter on q, k or v would find no place.
        self.transformer.stacked_params_mapping = [
            (f".{fused}", f".{part}", shard)
            for fused, parts in type(self.transformer).packed_modules_mapping.items()
            for part, shard in zip(parts, "qkv", strict=True)
        ]

    def encode_prompt(
        self,
        prompt: Any,
        prompt_2: Any = None,
        num_images_per_prompt: int = 1,
        prompt_embeds: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Embeddings [B, S, C], pooled vectors [B, C'] and text positions [S, 3]."""
        if self._batch is None or prompt_embeds is not None:
            return super().encode_prompt(prompt, prompt_2, num_images_per_prompt, prompt_embeds, **kwargs)
        one = super().encode_prompt
        options = {**kwargs, "pooled_prompt_embeds": None}
        rows = self.encode_each(prompt, kwargs["max_sequence_length"], lambda text: one([text], None, 1, **options))
        embeds, pooled = (stack_padded([row[part] for row in rows]) for part in (0, 1))
        self.remember(embeds, pooled=pooled)
        return embeds, pooled, rows[0][2]
