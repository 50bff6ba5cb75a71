"""The weights and prompts that come with the package: small, safe to load, and as good and as bad as the card says."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch
from image_rewards import RewardSample, load
from image_rewards.shapes import parse_target

ASSETS = Path(str(files("ray_trainer"))) / "assets"
MODEL = ASSETS / "tiny_qwen_image"
TEMPLATE_TOKENS = 34  # what QwenImagePipeline drops from the front of its embeddings


def prompts(name):
    lines = (ASSETS / f"prompts/tiny_shapes_{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def pipeline():
    from diffusers import QwenImagePipeline

    torch.set_num_threads(1)
    loaded = QwenImagePipeline.from_pretrained(MODEL, dtype=torch.float32, local_files_only=True)
    loaded.set_progress_bar_config(disable=True)
    return loaded


def test_the_folder_is_small_and_holds_no_pickle():
    found = [path for path in MODEL.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in found) <= 10_000_000
    assert {path.suffix for path in found} == {".json", ".safetensors", ".md"}


def test_training_and_held_out_prompts_share_nothing_and_cover_the_world():
    train, held_out = prompts("train"), prompts("heldout")
    texts = [row["prompt"] for row in train + held_out]
    assert (len(train), len(held_out), len(set(texts))) == (96, 48, 144)
    for row in train + held_out:
        asked = parse_target(row["prompt"], {})
        assert row["metadata"] == {
            "count": asked.count, "color": asked.color, "shape": asked.shape, "background": asked.background,
        }  # fmt: skip


def test_the_template_prefix_is_what_the_stock_pipeline_drops(pipeline):
    assert pipeline.prompt_template_encode_start_idx == TEMPLATE_TOKENS
    prefix = pipeline.prompt_template_encode.split("{}")[0]
    assert len(pipeline.tokenizer(prefix)["input_ids"]) == TEMPLATE_TOKENS
    embeds, mask = pipeline.encode_prompt([row["prompt"] for row in prompts("heldout")])
    assert mask is None or bool(mask.bool().all())  # all captions are equally long
    assert len(torch.unique(embeds.flatten(1), dim=0)) == 48  # and all different


def test_the_scheduler_is_the_one_that_the_recipe_was_tuned_with(pipeline):
    assert pipeline.scheduler.config.shift == 3.0
    assert pipeline.scheduler.config.use_dynamic_shifting is False


def test_it_is_right_about_as_often_as_the_card_says(pipeline):
    rows = [row for row in prompts("heldout")[::2] for _ in range(4)]
    noise = torch.randn(len(rows), 16, 64, generator=torch.Generator().manual_seed(1234))
    images = pipeline(
        [row["prompt"] for row in rows],
        height=64,
        width=64,
        num_inference_steps=10,
        true_cfg_scale=1.0,
        latents=noise,
        output_type="np",
    ).images
    pictures = (images * 255).round().astype(np.uint8).transpose(0, 3, 1, 2)
    results = load("shapes").score(
        [RewardSample(p, r["prompt"], r["metadata"]) for p, r in zip(pictures, rows, strict=True)]
    )
    mean = {name: float(np.mean([r.components[name] for r in results])) for name in ("strict", "background", "clean")}
    assert 0.30 < mean["strict"] < 0.60, mean  # .42 on all held-out prompts; 96 pictures have a standard error of .05
    assert mean["background"] > 0.90, mean
    assert mean["clean"] >= 0.93, mean


def test_the_card_states_the_band_that_the_project_promises():
    card = (MODEL / "README.md").read_text(encoding="utf-8")
    row = re.search(r"these weights, 144 prompts × 8 seeds \| (\.\d+) .*\| (\.\d+) ± \.\d+ \|\n", card)
    assert row is not None
    assert 0.35 <= float(row[1]) <= 0.65
    assert float(row[2]) >= 0.95
