"""Scores a run's LoRA, and its average where it kept one, with stock diffusers alone: no trainer, no Ray, a process of its own.

    uv run python tools/score_lora.py RUN_FOLDER

Draws the held-out prompts of the run's last validation again, from the same noise, without and with each LoRA, and prints the
shapes reward's components with standard errors clustered by prompt. The LoRA's line should equal the run's own last validation.
The last line is the average's gain over the LoRA, paired by prompt.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
import yaml
from diffusers import QwenImagePipeline
from image_rewards import RewardSample, load
from ray_trainer.models import fetch
from ray_trainer.prompts import load_prompts
from run_report import load_validations
from run_report.stats import estimate
from sde_samplers import initial_noise, sample_generator

SHOWN = ("strict", "count", "color", "shape", "background", "clean")


def main(folder: Path) -> None:
    """Print one line for the base and one for the LoRA."""
    config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    val = config["rollout"]["val_kwargs"]
    records = load_validations(folder)[-1].records
    metadata = {prompt.text: prompt.metadata for prompt in load_prompts(config["data"]["val_file"])}
    pipeline = QwenImagePipeline.from_pretrained(fetch(config["model"]["path"])).to(torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    noise = initial_noise([sample_generator(val["seed"], r.uid, r.seed) for r in records], (16, 64))
    size = {key: val["pipeline"][key] for key in ("height", "width", "num_inference_steps", "true_cfg_scale")}
    reward = load("shapes")
    found: dict[str, dict[str, np.ndarray]] = {}
    for state in ("base", *(name for name in ("lora", "lora_ema") if (folder / name).is_dir())):
        if state != "base":
            pipeline.unload_lora_weights()
            pipeline.load_lora_weights(str(folder / state))
        pictures: list[np.ndarray] = []
        for start in range(0, len(records), 48):
            prompts = [r.prompt for r in records[start : start + 48]]
            images = pipeline(prompts, latents=noise[start : start + 48], output_type="np", **size).images
            pictures += list((images * 255).round().astype(np.uint8).transpose(0, 3, 1, 2))
        scores = reward.score(
            [RewardSample(p, r.prompt, metadata[r.prompt]) for p, r in zip(pictures, records, strict=True)]
        )
        found[state] = {
            name: np.array([s.components[name] for s in scores]).reshape(-1, val["n"]).mean(1) for name in SHOWN
        }
        show(state, found[state])
    if "lora_ema" in found:
        show("lora_ema - lora", {name: found["lora_ema"][name] - found["lora"][name] for name in SHOWN})


def show(what: str, values: dict[str, np.ndarray]) -> None:
    """One line: the mean of each component over the prompts."""
    line = {name: estimate(list(by_prompt)) for name, by_prompt in values.items()}
    print(f"{what}  " + "  ".join(f"{name} {e.mean:.3f} ± {e.stderr:.3f}" for name, e in line.items()))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
