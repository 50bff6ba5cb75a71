"""Qwen-Image in a vLLM-Omni engine with the weights that `bench_gpu.py`'s trainer draws: no checkpoint of 41 GB on a disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench_model import empty_transformer
from fsdp_diffusers_engine.loading import RandomSource
from omni_rollout.vllm_omni.pipelines.qwen_image import QwenImageRolloutPipeline
from torch import Tensor


class RandomQwenImage(QwenImageRolloutPipeline):
    """Each tensor is drawn on the card from its name, as `loading.RandomSource` does for the trainer."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.weights_sources: list[Any] = []

    def load_weights(self, weights: Any) -> None:  # type: ignore[override]
        """The random weights, in place of the folder's."""
        super().load_weights(self._drawn())

    def _drawn(self) -> Iterator[tuple[str, Tensor]]:
        source = RandomSource(0, self.device)
        for name, parameter in empty_transformer(Path(self.od_config.model)).named_parameters():
            shape = tuple(parameter.shape)
            yield f"transformer.{name}", source.read(name, shape, tuple(slice(None) for _ in shape))
