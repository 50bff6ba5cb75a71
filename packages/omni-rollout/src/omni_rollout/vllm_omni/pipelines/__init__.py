"""Which pipeline class serves which architecture; the classes are imported inside the engine's worker only."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from ...errors import RolloutConfigError


@dataclass(frozen=True)
class PipelineEntry:
    """How one diffusers pipeline class is served.

    Args:
        whole: class that runs a request from start to end, below this package.
        stepwise: class for `step_execution`, where the engine offers it.
        cfg_is_guidance: the engine calls true classifier-free guidance `guidance_scale` for this model.
        counted_by: subfolder of the tokenizer that decides whether a prompt is too long.
        chat: whether the prompt is put into that tokenizer's chat template first.
        extra_tokens: tokens of a fixed template that count as well.
        linear_sigmas: hand the engine the grid before shifting (1 … 1/K), where its own is not diffusers' any more.
        guidance_offset: added to it: Z-Image counts from 0, where the others count from 1.
    """

    whole: str
    stepwise: str | None = None
    cfg_is_guidance: bool = True
    guidance_offset: float = 0.0
    linear_sigmas: bool = False
    counted_by: str = "tokenizer"
    chat: bool = False
    extra_tokens: int = 0


PIPELINES = {
    "QwenImagePipeline": PipelineEntry(
        "qwen_image.QwenImageRolloutPipeline",
        "qwen_image.QwenImageStepwisePipeline",
        cfg_is_guidance=False,
        extra_tokens=5,
    ),
    "StableDiffusion3Pipeline": PipelineEntry("sd3.SD3RolloutPipeline", counted_by="tokenizer_3"),
    "ZImagePipeline": PipelineEntry(
        "z_image.ZImageRolloutPipeline", guidance_offset=-1.0, linear_sigmas=True, chat=True
    ),
    "WanPipeline": PipelineEntry("wan.WanRolloutPipeline"),
    "FluxPipeline": PipelineEntry("flux.FluxRolloutPipeline", cfg_is_guidance=False, counted_by="tokenizer_2"),
}


def entry_for(model_path: str) -> PipelineEntry:
    """The entry of a diffusers pipeline folder. Raises `RolloutConfigError` for an unknown one."""
    index = Path(model_path) / "model_index.json"
    if not index.is_file():
        raise RolloutConfigError(f"{model_path!r} has no model_index.json: give a diffusers pipeline folder.")
    name = json.loads(index.read_text()).get("_class_name", "")
    if name not in PIPELINES:
        raise RolloutConfigError(f"{name!r} has no rollout pipeline; known are {', '.join(PIPELINES)}.")
    return PIPELINES[name]


def pipeline_for(model_path: str, stepwise: bool = False) -> str:
    """Qualified class name. Raises `RolloutConfigError` when the pipeline cannot run step by step and shall."""
    entry = entry_for(model_path)
    if stepwise:
        if entry.stepwise is None:
            raise RolloutConfigError(f"{entry.whole!r} cannot run step by step: set vllm_omni.step_execution=false.")
        return f"{__name__}.{entry.stepwise}"
    return f"{__name__}.{entry.whole}"
