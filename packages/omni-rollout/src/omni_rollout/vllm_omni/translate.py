"""Requests in the engine's words, and its answers in ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..errors import AbortedError, ReplicaError, RolloutConfigError
from ..types import GenerationRequest
from .rollout_batch import REQUEST, tail_of

if TYPE_CHECKING:
    from model_specs import ModelSpec


def engine_prompt(request: GenerationRequest) -> dict[str, str]:
    """What the engine calls a prompt."""
    prompt = {"prompt": request.prompt}
    if request.settings.guided:
        prompt["negative_prompt"] = request.negative_prompt or ""
    return prompt


def engine_params(request: GenerationRequest, spec: ModelSpec, adapters: Mapping[str, int]) -> dict[str, Any]:
    """Fields of `OmniDiffusionSamplingParams`.

    Args:
        request: one sample.
        spec: of the model.
        adapters: name → the engine's number, of those that were sent.

    Raises:
        RolloutConfigError: an adapter that the engine does not have.
    """
    from vllm_omni.lora.request import LoRARequest

    settings = request.settings
    cfg = settings.true_cfg_scale
    if isinstance(cfg, tuple):
        raise RolloutConfigError(f"true_cfg_scale={cfg!r}: an engine takes one guidance scale for both experts.")
    guidance = spec.stock_guidance(settings)
    names = ("height", "width", "num_frames", "num_inference_steps", "max_sequence_length", "true_cfg_scale")
    params: dict[str, Any] = {name: getattr(settings, name) for name in names}
    params["extra_args"] = {REQUEST: request}
    if guidance is not None:
        params |= {"guidance_scale": guidance, "guidance_scale_provided": True}
    tail = tail_of(settings)
    if tail is not None:
        # Part of the engine's batching key, and read by none of these pipelines: rows that step over different tables
        # must not share a batch.
        params["decode_timestep"] = [float(value) for value in tail]
    boundary = spec.pipeline_config.get("boundary_ratio")  # where Wan's second expert takes over
    if boundary is not None:
        params["boundary_ratio"] = boundary
    if request.adapter in adapters:
        number = adapters[request.adapter]
        params["lora_request"] = LoRARequest(request.adapter, number, f"/in-memory/{request.adapter}")
    elif request.adapter not in ("default", "reference"):
        known = ", ".join(sorted(adapters)) or "none"
        raise RolloutConfigError(f"adapter={request.adapter!r} was never sent to this engine; it has {known}.")
    return params


def sample_row(request: GenerationRequest, final: Any) -> dict[str, Tensor]:
    """The engine's last answer to a request, by the names of `samples`.

    Raises:
        AbortedError: it was cancelled. ReplicaError: the answer holds no sample.
    """
    if final is None:
        raise ReplicaError(f"the engine gave no answer to request {request.request_id!r}.")
    if "abort" in {getattr(part, "finish_reason", None) for part in final.outputs or []}:
        raise AbortedError(f"request {request.request_id!r} was cancelled before its picture was finished.")
    if final.error:
        raise ReplicaError(f"request {request.request_id!r} failed in the engine: {final.error}")
    row = dict(final.trajectory_log_probs or {})
    if not row or not final.images:
        raise ReplicaError(f"request {request.request_id!r} came back without a trajectory or without a picture.")
    latents, W = final.trajectory_latents, len(request.settings.window) if request.return_trajectory else 0
    row["final_latents"] = latents[-1].clone()
    if W:
        row |= {"latents": latents[:W].clone(), "next_latents": latents[W : 2 * W].clone()}
    if "pixels" in request.shown:  # an engine decodes all the same
        row["responses"] = _to_tensor(final.images, request.settings.num_frames)
    return row


def _to_tensor(images: list[Any], num_frames: int) -> Tensor:
    """What the engine calls images to uint8 [C, H, W] or [T, C, H, W]: PIL pictures, or one array of frames in [0, 1]."""
    frames = np.stack([np.array(image) for image in images])
    frames = frames[0] if frames.ndim == 6 else frames  # a list of one batch of one video
    frames = frames[0] if frames.ndim == 5 else frames
    if frames.dtype != np.uint8:
        frames = (frames * 255).round().clip(0, 255).astype(np.uint8)
    pixels = torch.from_numpy(frames).permute(0, 3, 1, 2).contiguous()
    return pixels[0] if num_frames == 1 else pixels
