"""Qwen-Image in vLLM-Omni. Latents are packed: [B, S, 64]."""

from __future__ import annotations

from typing import Any

import torch
from model_specs.single_frame import single_frame_convolutions
from torch import Tensor
from vllm_omni.diffusion.models.qwen_image.pipeline_qwen_image import QwenImagePipeline

from ..denoise import RolloutMixin, stack_padded
from ..stepwise import StepwiseMixin
from . import qwen_attention


class _QwenImage(QwenImagePipeline):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        single_frame_convolutions(self.vae)  # a picture is one frame: a third of the decoder's work
        qwen_attention.let_compile(self.transformer)

    def encode_prompt(
        self, prompt: Any = None, num_images_per_prompt: int = 1, prompt_embeds: Any = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Embeddings [B, S, C] and mask [B, S]; see the engine for the arguments."""
        if self._batch is None or prompt_embeds is not None:
            return super().encode_prompt(prompt, num_images_per_prompt, prompt_embeds, **kwargs)
        one = super().encode_prompt
        rows = self.encode_each(prompt, kwargs["max_sequence_length"], lambda text: one([text], **kwargs))
        embeds, mask = (stack_padded([row[part] for row in rows]) for part in (0, 1))
        self.remember(embeds, mask.to(torch.bool))
        return embeds, mask


class QwenImageRolloutPipeline(RolloutMixin, _QwenImage):
    """Whole requests."""

    timestep_scale = 1.0


class QwenImageStepwisePipeline(StepwiseMixin, _QwenImage):
    """Step by step."""

    timestep_scale = 1.0
