"""Wan2.2 text to video in vLLM-Omni: the A14B with its two experts, and the 5B. Latents: [B, C, T, H, W].

The engine builds a UniPC scheduler of its own. A policy needs the grid that its trainer uses, so the folder's scheduler
gives the sigmas here; and since the expert of a step is chosen by its timestep, both sides then choose alike.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from model_specs import WanSpec
from sde_samplers import from_diffusers
from torch import Tensor
from vllm_omni.diffusion.models.wan2_2.pipeline_wan2_2 import Wan22Pipeline

from ..denoise import RolloutMixin, stack_padded


class _FolderScheduler:
    """The sigma grid of a pipeline folder; steps are the rollout's, or plain Euler for people's requests.

    Args:
        spec: of the folder.
        thin: takes out of the tables what the rollout at hand does not step over.
    """

    def __init__(self, spec: WanSpec, thin: Callable[[Any], None]) -> None:
        self._source, self.timesteps_at = spec.load_scheduler(str(spec.folder)), spec.timesteps_at
        self.config = SimpleNamespace(num_train_timesteps=1000)
        self.sigmas = self.timesteps = torch.empty(0)
        self._thin = thin

    def set_timesteps(self, num_steps: int, device: Any = None, **kwargs: Any) -> None:
        self.sigmas = from_diffusers(self._source, num_steps).sigmas
        self.timesteps = self.timesteps_at(self.sigmas[:-1]).to(device)
        self._thin(self)

    def step(self, model_output: Tensor, timestep: Any, sample: Tensor, return_dict: bool = True, **kwargs: Any) -> Any:
        k = int((self.timesteps.cpu() - float(timestep)).abs().argmin())
        return (sample + (self.sigmas[k + 1] - self.sigmas[k]).to(sample) * model_output,)


class WanRolloutPipeline(RolloutMixin, Wan22Pipeline):
    """Whole requests."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.scheduler = _FolderScheduler(WanSpec(self.od_config.model), self.thin)
        self._sample_solver = "euler"  # what the engine thinks it runs; another name would make it build its own again

    def timesteps_at(self, sigmas: Tensor) -> Tensor:
        """As the trainer asks."""
        return self.scheduler.timesteps_at(sigmas)

    def encode_prompt(
        self,
        prompt: Any,
        negative_prompt: Any = None,
        do_classifier_free_guidance: bool = True,
        num_videos_per_prompt: int = 1,
        max_sequence_length: int = 512,
        device: Any = None,
        dtype: Any = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Embeddings [B, S, C], negative ones or None; padded with zeros that the network attends to as well."""
        one = super().encode_prompt
        if self._batch is None:
            return one(
                prompt,
                negative_prompt,
                do_classifier_free_guidance,
                num_videos_per_prompt,
                max_sequence_length,
                device,
                dtype,
            )

        def alone(text: str) -> tuple[Tensor]:
            return (one([text], None, False, 1, max_sequence_length, device, dtype)[0],)

        def batch_of(texts: list[str]) -> Tensor:
            rows = self.encode_each(texts, max_sequence_length, alone)
            embeds = stack_padded([row[0] for row in rows])
            self.remember(embeds)
            return embeds

        positive = batch_of(prompt)
        negative = batch_of(negative_prompt or [""] * len(prompt)) if do_classifier_free_guidance else None
        return positive, negative
