"""flowgrpo's real command on real Ray: two rewards by GDPO, two prompt sources, and a resume that draws the same rows."""

import json

import pytest

MICRO = [
    "data.prompts_per_step=3",
    "data.val_max_prompts=4",
    "rollout.n=4",
    "rollout.val_kwargs.n=1",
    "rollout.pipeline.num_inference_steps=3",
    "rollout.val_kwargs.pipeline.num_inference_steps=2",
    "actor.ppo_mini_batch_size=12",
    "trainer.save_every=1",
    "trainer.val_every=2",
    "trainer.total_steps=2",
]
TWO = [
    "reward.combine=gdpo",
    "reward.several.right.name=shapes",
    "reward.several.small={name: jpeg_compressibility, weight: 0.5}",
    "data.sources.scenes={train_file: builtin:tiny_shapes_train, val_file: builtin:tiny_shapes_heldout, share: 2}",
    "data.sources.free={train_file: builtin:creative_train, val_file: builtin:creative_heldout, rewards: [small]}",
]


def test_two_rewards_and_two_sources_train_and_go_on_with_the_same_rows(start, metric_rows, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    done = start("flowgrpo", *MICRO, *TWO, f"trainer.run_dir={whole}").wait()
    assert done.code == 0, done.err[-4000:]
    assert "right (shapes, weight 1), small (jpeg_compressibility, weight 0.5)" in done.out
    assert "prompts of a step: 2 of scenes, 1 of free" in done.out
    table = metric_rows(whole)
    for row in table[1:]:
        assert row["actor/grad_norm"] > 0
        assert row["reward/mean"] == pytest.approx(
            (2 * row["reward/source_scenes_mean"] + row["reward/source_free_mean"]) / 3
        )
        assert {"reward/right_mean", "reward/right_count_mean", "advantages/small_equal_groups"} <= set(row)
    assert {"val/right_mean", "val/small_stderr", "val/source_scenes_mean", "val/source_free_mean"} <= set(table[2])
    page = (whole / "report.html").read_text()
    assert "reward/small_mean" in page
    assert "reward/source_free_mean" in page
    begun = start("flowgrpo", *MICRO, *TWO, f"trainer.run_dir={parts}", "trainer.total_steps=1").wait()
    assert begun.code == 0, begun.err[-4000:]
    more = ["trainer.on_existing=resume", "reward.several.small.timeout_s=60"]  # a deadline decides no result
    resumed = start("flowgrpo", *MICRO, *TWO, f"trainer.run_dir={parts}", *more).wait()
    assert resumed.code == 0, resumed.err[-4000:]
    again = metric_rows(parts)[2]
    for key in ("reward/source_scenes_mean", "reward/source_free_mean", "reward/small_mean"):
        assert again[key] == pytest.approx(table[2][key], abs=1e-6), key
    assert json.loads((parts / "inputs.json").read_text()) == json.loads((whole / "inputs.json").read_text())
