"""Accuracies of a pipeline folder, drawn by the stock pipeline and judged by the `shapes` reward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from image_rewards import RewardSample, load

from .shapes import caption, metadata

MEASURES = ("strict", "count", "color", "shape", "background", "clean")


def draw_with_pipeline(
    folder: Path, captions: Sequence[int], seeds: int, steps: int, device: str, batch: int, noise_seed: int = 1234
) -> np.ndarray:
    """Pictures uint8 [captions · seeds, 3, 64, 64], caption-major; the noise is drawn on the CPU, so every device agrees."""
    from diffusers import QwenImagePipeline

    pipeline = QwenImagePipeline.from_pretrained(folder, dtype=torch.float32, local_files_only=True).to(device)
    pipeline.set_progress_bar_config(disable=True)
    ids = [number for number in captions for _ in range(seeds)]
    noise = torch.randn(len(ids), 16, 64, generator=torch.Generator().manual_seed(noise_seed))
    parts = []
    for start in range(0, len(ids), batch):
        images = pipeline(
            [caption(number) for number in ids[start : start + batch]],
            height=64,
            width=64,
            num_inference_steps=steps,
            true_cfg_scale=1.0,
            latents=noise[start : start + batch].to(device),
            output_type="np",
        ).images
        parts.append((images * 255).round().astype(np.uint8).transpose(0, 3, 1, 2))
    return np.concatenate(parts)


def judge(pictures: np.ndarray, captions: Sequence[int], seeds: int) -> dict[str, tuple[float, float]]:
    """Each measure's mean and standard error; the error is over captions, each the mean of its seeds."""
    ids = [number for number in captions for _ in range(seeds)]
    samples = [RewardSample(picture, caption(i), metadata(i)) for picture, i in zip(pictures, ids, strict=True)]
    results = load("shapes").score(samples)
    failed = next((result.error for result in results if result.error), None)
    if failed:
        raise RuntimeError(f"the shapes reward could not judge a picture: {failed}")
    summary = {}
    for name in MEASURES:
        means = np.array([r.components[name] for r in results]).reshape(len(captions), seeds).mean(1)
        error = means.std(ddof=1) / math.sqrt(len(means)) if len(means) > 1 else math.nan
        summary[name] = (float(means.mean()), float(error))
    return summary


def show(summary: dict[str, tuple[float, float]]) -> str:
    """ "strict 0.440 ± 0.017  count …"."""
    return "  ".join(f"{name} {mean:.3f} ± {error:.3f}" for name, (mean, error) in summary.items())
