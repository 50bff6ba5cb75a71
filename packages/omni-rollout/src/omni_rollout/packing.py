"""A denoised batch, cut into outputs: one per request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sde_samplers import SigmaSchedule
from torch import Tensor

from .types import DiffusionOutput, GenerationRequest


def pack(
    batch: Sequence[GenerationRequest],
    trajectory: Any,
    pictures: Tensor,
    schedule: SigmaSchedule,
    *,
    cond: Any,
    negative: Any,
    policy_version: int,
    forwards: float,
) -> list[DiffusionOutput]:
    """Outputs that own nothing of each other's rows but the shared sigma grid.

    Args:
        batch: B requests with windows of one length, all beginning at one step.
        trajectory: `sde_samplers.Trajectory` of the steps that ran, on any device.
        pictures: uint8 [B, C, H, W] or [B, T, C, H, W] on the CPU.
        schedule: the grid that step numbers count in; an edit ran over its end only.
        cond, negative: `model_specs.PromptEmbeds`, the latter None without true guidance.
        policy_version, forwards: the same for every row.
    """
    first, final = batch[0], trajectory.final.cpu()
    parts: dict[str, Tensor] = {}
    log_probs = None
    if first.window and first.return_trajectory:
        names = ("latents", "next_latents", "step_index", "std", *(["means"] if first.return_means else []))
        parts = {name: getattr(trajectory, name).cpu() for name in names}
        parts["step_index"] = parts["step_index"] + first.start_step
        log_probs = None if trajectory.log_probs is None else trajectory.log_probs.cpu()
    embeds: dict[str, list[Tensor]] = {}
    if first.return_trajectory:
        embeds = _embeds_rows("", cond) | ({} if negative is None else _embeds_rows("negative_", negative))
    shared = {"sigmas": schedule.sigmas.cpu(), "schedule_hash": schedule.hash, "policy_version": policy_version}
    shared |= {"batch_size": len(batch), "forwards": forwards}
    outputs = []
    for row, request in enumerate(batch):
        extra: dict[str, Any] = {name: value[row] for name, value in parts.items()}
        extra |= {"final_latents": final[row], "seed": request.seed, **shared}
        extra |= {name: rows[row] for name, rows in embeds.items()}
        log_prob = None if log_probs is None else log_probs[row]
        outputs.append(DiffusionOutput(pictures[row], log_prob, "completed", 0, extra).check())
    return outputs


def _embeds_rows(prefix: str, embeds: Any) -> dict[str, list[Tensor]]:
    """Embeddings per sample, cut to each one's own length: name → one tensor per row."""
    lengths = embeds.mask.sum(1).tolist()
    hidden, mask = embeds.embeds.cpu(), embeds.mask.cpu()
    rows = {
        f"{prefix}prompt_embeds": [hidden[i, :length] for i, length in enumerate(lengths)],
        f"{prefix}prompt_embeds_mask": [mask[i, :length] for i, length in enumerate(lengths)],
    }
    if embeds.pooled is not None:
        rows[f"{prefix}pooled_prompt_embeds"] = list(embeds.pooled.cpu())
    return rows
