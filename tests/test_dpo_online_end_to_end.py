"""dpo-online's real command on real Ray with fewer steps."""

import json
import math

import numpy as np
import pytest
from PIL import Image

FEW = ["data.val_max_prompts=2", "rollout.val_kwargs.n=1"]


def test_it_runs_and_counts_its_pairs(hosted, small, metric_rows, tmp_path):
    folder = tmp_path / "run"
    done = hosted("dpo-online", *small, *FEW, "trainer.total_steps=2", f"trainer.run_dir={folder}")
    assert done.code == 0, done.err[-4000:]
    assert done.left_over == []
    table = metric_rows(folder)
    assert [row["step"] for row in table] == [0, 1, 2]
    for row in table[1:]:
        assert row["pairs/pairs"] + row["pairs/tied_pairs"] + row["pairs/singleton_groups"] == 3
        assert row["actor/grad_norm"] > 0
    assert (folder / "lora" / "pytorch_lora_weights.safetensors").exists()


def test_it_trains_on_given_pairs_with_two_processes(hosted, small, metric_rows, tmp_path):
    for number in range(8):
        pixels = np.random.default_rng(number).integers(0, 255, (64, 64, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    pairs = [{"prompt": f"picture {i}", "chosen": f"{2 * i}.png", "rejected": f"{2 * i + 1}.png"} for i in range(4)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    folder = tmp_path / "run"
    files = [f"data.train_file={tmp_path}/pairs.jsonl", "data.val_file=builtin:tiny_shapes_heldout"]
    size = [
        "rollout.n=1",
        "data.prompts_per_step=4",
        "actor.ppo_mini_batch_size=8",
        "trainer.num_workers=2",
        "trainer.total_steps=2",
        *FEW,
    ]
    done = hosted("dpo-online", "recipe=offline_dpo", *small, *files, *size, f"trainer.run_dir={folder}")
    assert done.code == 0, done.err[-4000:]
    assert done.left_over == []
    before, first, second = metric_rows(folder)
    assert before["val/reward_mean"] > 0  # the held-out prompts are drawn and scored
    assert first["actor/dpo_loss"] == pytest.approx(math.log(2), abs=1e-5)  # the policy is its own reference
    assert second["actor/dpo_loss"] < first["actor/dpo_loss"]  # the same four pairs again
    assert first["actor/count"] == 16  # four pairs at four levels, once each over both processes
