"""Requests in the engine's words, and its answers in ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import ReplicaError, RolloutConfigError
from ..types import DiffusionOutput, GenerationRequest, aborted
from .pipelines import PipelineEntry
from .rollout_batch import KNOBS, Knobs


def knobs_of(request: GenerationRequest) -> Knobs:
    """The part of a request that the engine does not read itself."""
    return Knobs(
        seed=request.seed,
        uid=request.uid,
        index=request.index,
        kind=request.kind,
        noise_level=request.noise_level,
        window=request.window,
        return_trajectory=request.return_trajectory,
        return_means=request.return_means,
        start_step=request.start_step,
        init_latents=request.init_latents,
        solver=request.solver,
        shared_noise=request.shared_noise,
        tail_ratio=request.tail_ratio,
    )


def engine_prompt(request: GenerationRequest) -> dict[str, str]:
    """What the engine calls a prompt."""
    prompt = {"prompt": request.prompt}
    if request.uses_cfg:
        prompt["negative_prompt"] = request.negative_prompt or ""
    return prompt


def engine_params(
    request: GenerationRequest, entry: PipelineEntry, adapters: Mapping[str, int], boundary: float | None
) -> dict[str, Any]:
    """Fields of `OmniDiffusionSamplingParams`.

    Args:
        entry: says how this pipeline is to be asked.
        adapters: name → the engine's number, of those that were sent.
        boundary: where Wan's second expert takes over, None for the others.

    Raises:
        RolloutConfigError: an adapter that the engine does not have.
    """
    from vllm_omni.lora.request import LoRARequest

    knobs = knobs_of(request)
    cfg = request.true_cfg_scale
    guidance = cfg + entry.guidance_offset if entry.cfg_is_guidance else request.guidance_scale
    params: dict[str, Any] = {
        "height": request.height,
        "width": request.width,
        "num_frames": request.num_frames,
        "num_inference_steps": request.num_inference_steps,
        "max_sequence_length": request.max_sequence_length,
        "true_cfg_scale": cfg,
        "extra_args": {KNOBS: knobs},
    }
    if guidance is not None:
        params |= {"guidance_scale": guidance, "guidance_scale_provided": True}
    if entry.linear_sigmas:
        params["sigmas"] = torch.linspace(1.0, 1 / request.num_inference_steps, request.num_inference_steps).tolist()
    if knobs.tail is not None:
        # Part of the engine's batching key, and read by none of these pipelines: rows that step over different tables
        # must not share a batch.
        params["decode_timestep"] = [float(value) for value in knobs.tail]
    if boundary is not None:
        params["boundary_ratio"] = boundary
    if request.adapter in adapters:
        number = adapters[request.adapter]
        params["lora_request"] = LoRARequest(request.adapter, number, f"/in-memory/{request.adapter}")
    elif request.adapter not in ("default", "reference"):
        known = ", ".join(sorted(adapters)) or "none"
        raise RolloutConfigError(f"adapter={request.adapter!r} was never sent to this engine; it has {known}.")
    return params


def rollout_output(request: GenerationRequest, final: Any, policy_version: int) -> DiffusionOutput:
    """The engine's last answer to a request. Raises `ReplicaError` when it holds no sample.

    `policy_version` is stamped on aborted samples; finished ones bring the version that they were drawn with.
    """
    if final is None:
        raise ReplicaError(f"the engine gave no answer to request {request.request_id!r}.")
    reasons = {getattr(part, "finish_reason", None) for part in final.outputs or []}
    if "abort" in reasons:
        return aborted(request, policy_version)
    if final.error:
        raise ReplicaError(f"request {request.request_id!r} failed in the engine: {final.error}")
    fields = dict(final.trajectory_log_probs or {})
    if not fields or not final.images:
        raise ReplicaError(f"request {request.request_id!r} came back without a trajectory or without a picture.")
    latents, W = final.trajectory_latents, len(request.window) if request.return_trajectory else 0
    fields["final_latents"] = latents[-1].clone()
    if W:
        fields |= {"latents": latents[:W].clone(), "next_latents": latents[W : 2 * W].clone()}
    fields["seed"] = request.seed
    log_probs = fields.pop("log_probs", None)
    return DiffusionOutput(_to_tensor(final.images, request), log_probs, "completed", 0, fields).check()


def _to_tensor(images: list[Any], request: GenerationRequest) -> Tensor:
    """What the engine calls images to uint8 [C, H, W] or [T, C, H, W]: PIL pictures, or one array of frames in [0, 1]."""
    frames = np.stack([np.array(image) for image in images])
    frames = frames[0] if frames.ndim == 6 else frames  # a list of one batch of one video
    frames = frames[0] if frames.ndim == 5 else frames
    if frames.dtype != np.uint8:
        frames = (frames * 255).round().clip(0, 255).astype(np.uint8)
    pixels = torch.from_numpy(frames).permute(0, 3, 1, 2).contiguous()
    return pixels[0] if request.num_frames == 1 else pixels
