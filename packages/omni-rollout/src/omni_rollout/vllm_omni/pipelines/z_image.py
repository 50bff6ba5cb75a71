"""Z-Image in vLLM-Omni. Latents: [B, C, H, W].

The engine's loop calls its scheduler itself, serves one request at a time, and reads one set of sampling parameters. So
the scheduler here is a subclass that asks the rollout, and a batch is shown to the loop as one request with many prompts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor
from vllm_omni.diffusion.models.z_image import pipeline_z_image as engine
from vllm_omni.diffusion.models.z_image.pipeline_z_image import ZImagePipeline
from vllm_omni.diffusion.models.z_image.z_image_transformer import SEQ_MULTI_OF, ZImageTransformer2DModel
from vllm_omni.diffusion.utils.tf_utils import get_transformer_config_kwargs
from vllm_omni.diffusion.worker.request_batch import DiffusionRequestBatch, split_diffusion_output_by_request

from ..denoise import RolloutMixin


class _ByLength(ZImageTransformer2DModel):
    """One forward for each padded length of the prompts.

    The engine's attention has no mask and turns all rows by the positions of the first, so a prompt beside a longer one
    would come out wrong.
    """

    def forward(self, x: list[Tensor], t: Tensor, cap_feats: list[Tensor], *args: Any, **kwargs: Any) -> Any:
        lengths: dict[int, list[int]] = {}
        for i, prompt in enumerate(cap_feats):
            lengths.setdefault(-(-len(prompt) // SEQ_MULTI_OF), []).append(i)
        rows: dict[int, Tensor] = {}
        for places in lengths.values():
            several = [x[i] for i in places], t[places], [cap_feats[i] for i in places]
            rows |= zip(places, super().forward(*several, *args, **kwargs)[0], strict=True)
        return ([rows[i] for i in range(len(x))],)


@contextmanager
def _transformer_of(config: Any) -> Iterator[None]:
    """While the engine builds its pipeline: the class above, in the sizes of the folder's config.

    The engine builds the published size whatever the config says. It looks the class up in its module when it builds one.
    """
    sizes = get_transformer_config_kwargs(config, ZImageTransformer2DModel)
    engine.ZImageTransformer2DModel = partial(_ByLength, **sizes)
    try:
        yield
    finally:
        engine.ZImageTransformer2DModel = ZImageTransformer2DModel


class _RolloutScheduler(FlowMatchEulerDiscreteScheduler):
    """Steps as the rollout says, and over the table that it says, while there is one."""

    rollout: Any = None

    @wraps(FlowMatchEulerDiscreteScheduler.set_timesteps)  # the engine reads the signature
    def set_timesteps(self, *args: Any, **kwargs: Any) -> None:
        super().set_timesteps(*args, **kwargs)  # type: ignore[misc]
        if self.rollout is not None:
            self.rollout.thin(self)

    def step(self, model_output: Tensor, timestep: Any, sample: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.rollout is None or self.rollout._batch is None:
            return super().step(model_output, timestep, sample, *args, **kwargs)  # type: ignore[misc]
        return (self.rollout.scheduler_step_maybe_with_cfg(model_output, timestep, sample, False),)


class _UniformBatch(DiffusionRequestBatch):
    """A batch whose requests have the same sampling parameters, apart from what the rollout keeps to itself."""

    @property
    def sampling_params(self) -> Any:
        return self.requests[0].sampling_params


class ZImageRolloutPipeline(RolloutMixin, ZImagePipeline):
    """Whole requests, several at a time."""

    scheduler: Any

    supports_request_batch = True

    def __init__(self, **kwargs: Any) -> None:
        with _transformer_of(kwargs["od_config"].tf_model_config):
            super().__init__(**kwargs)
        self.scheduler = _RolloutScheduler.from_config(self.scheduler.config)
        object.__setattr__(self.scheduler, "rollout", self)

    def run_batch(self, req: Any, *args: Any, **kwargs: Any) -> list[Any]:
        """The engine's forward, over several requests."""
        if self._batch is not None:  # the engine's own grid before shifting is not diffusers' any more
            params = req.requests[0].sampling_params
            params.sigmas = torch.linspace(1.0, 1 / params.num_inference_steps, params.num_inference_steps).tolist()
        output = super().run_batch(_UniformBatch(req.requests), *args, **kwargs)
        return split_diffusion_output_by_request(output, req, num_outputs_per_prompt=1)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """The engine's, and text encoders that were saved without their language head."""
        bare, whole = "text_encoder.", ("text_encoder.model.", "text_encoder.lm_head.")
        return super().load_weights(
            (name.replace(bare, whole[0], 1) if name.startswith(bare) and not name.startswith(whole) else name, value)
            for name, value in weights
        )

    def _encode_prompt(
        self, prompt: Any, device: Any = None, prompt_embeds: Any = None, max_sequence_length: int = 512
    ) -> list[Tensor]:
        if self._batch is None or prompt_embeds is not None:
            return super()._encode_prompt(prompt, device, prompt_embeds, max_sequence_length)
        one = super()._encode_prompt

        def alone(text: str) -> tuple[Tensor]:
            return (one([text], device, None, max_sequence_length)[0],)

        rows = [row[0] for row in self.encode_each(prompt, max_sequence_length, alone)]
        mask = torch.nn.utils.rnn.pad_sequence(
            [torch.ones(len(row), dtype=torch.bool) for row in rows], batch_first=True
        )
        self.remember(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), mask)
        return rows
