"""Stable Diffusion 3 and 3.5 in vLLM-Omni. Latents: [B, C, H, W]."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm_omni.diffusion.models.sd3.pipeline_sd3 import StableDiffusion3Pipeline

from ..denoise import RolloutMixin, stack_padded


class SD3RolloutPipeline(RolloutMixin, StableDiffusion3Pipeline):
    """Whole requests."""

    def encode_prompt(
        self, prompt: Any, prompt_2: Any = "", prompt_3: Any = "", prompt_embeds: Any = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Embeddings [B, S, C] and pooled vectors [B, C']; see the engine for the arguments."""
        if self._batch is None or prompt_embeds is not None:
            return super().encode_prompt(prompt, prompt_2, prompt_3, prompt_embeds, **kwargs)
        one = super().encode_prompt
        options = {**kwargs, "pooled_prompt_embeds": None}
        rows = self.encode_each(prompt, kwargs["max_sequence_length"], lambda text: one([text], "", "", **options))
        embeds, pooled = (stack_padded([row[part] for row in rows]) for part in (0, 1))
        self.remember(embeds, pooled=pooled)
        return embeds, pooled
