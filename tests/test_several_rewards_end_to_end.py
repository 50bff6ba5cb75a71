"""flowgrpo on real Ray: two rewards by GDPO, two prompt sources, and a resume that draws the same rows."""

import json
import shutil
from itertools import pairwise

import pytest
import torch
from flowgrpo.cli import APP
from ray_trainer.cli import run
from ray_trainer.scoring import Scoring
from ray_trainer.workers import ActorRolloutRefWorker
from safetensors.torch import load_file

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


def test_two_rewards_and_two_sources_train_and_go_on_with_the_same_rows(hosted, metric_rows, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    done = hosted("flowgrpo", *MICRO, *TWO, f"trainer.run_dir={whole}")
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
    shutil.copytree(whole, parts)  # as it was after the first step
    (parts / "checkpoints" / "latest.json").write_text(json.dumps({"step": 1}))
    (parts / "inputs.json").unlink()
    more = ["trainer.on_existing=resume", "reward.several.small.timeout_s=60"]  # a deadline decides no result
    resumed = hosted("flowgrpo", *MICRO, *TWO, f"trainer.run_dir={parts}", *more)
    assert resumed.code == 0, resumed.err[-4000:]
    again = metric_rows(parts)[2]
    for key in ("reward/source_scenes_mean", "reward/source_free_mean", "reward/small_mean"):
        assert again[key] == pytest.approx(table[2][key], abs=1e-6), key
    assert json.loads((parts / "inputs.json").read_text()) == json.loads((whole / "inputs.json").read_text())


def test_the_watchdog_warns_goes_back_and_ends_a_run(one_process, metric_rows, tmp_path, capsys):
    """With bounds that every step breaks: a warning after the first, weights of before after the fourth, fifth and sixth."""
    folder = tmp_path / "run"
    rules = [
        "trainer.watchdog.flat_groups={bound: -1, steps: 1}",
        "trainer.watchdog.grad_norm={bound: -1, steps: 1, action: rollback}",
    ]
    more = [
        "trainer.total_steps=9",
        "trainer.val_every=0",
        "trainer.val_before_train=false",
        "trainer.keep_checkpoints=9",
        "rollout.n=2",
        "actor.ppo_mini_batch_size=6",
    ]
    assert run(APP, [*MICRO, *more, *rules, f"trainer.run_dir={folder}"]) == 1
    said = capsys.readouterr()
    assert "the watchdog ended the run after step 7: the gradient norm is" in said.err
    assert "watchdog, step 1: " in said.out + said.err
    table = metric_rows(folder)
    assert [row["step"] for row in table] == list(range(1, 8))
    assert "watchdog/flat_groups" in table[0]
    assert [row.get("watchdog/went_back_to") for row in table] == [None, None, None, 3, 4, 5, None]
    alarms = [json.loads(line) for line in (folder / "watchdog.jsonl").read_text().splitlines()]
    assert [(one["step"], one["action"]) for one in alarms if one["rule"] == "grad_norm"] == [
        (4, "rollback"), (5, "rollback"), (6, "rollback"), (7, "stop"),
    ]  # fmt: skip
    assert "the gradient norm is" in (folder / "report.html").read_text()
    kept = sorted(folder.glob("checkpoints/step_*"))
    assert [one.name for one in kept] == [f"step_{step:06d}" for step in range(1, 7)]  # what collapsed is not kept
    saved = [load_file(next(one.glob("weights/*.safetensors"))) for one in kept]
    same = [all(torch.equal(before[name], after[name]) for name in before) for before, after in pairwise(saved)]
    assert same == [False, False, True, True, True]


def test_a_rule_that_stops_a_run_says_why_and_the_run_goes_on_without_it(one_process, metric_rows, tmp_path, capsys):
    folder = tmp_path / "run"
    arguments = [*MICRO, "trainer.val_every=0", "trainer.val_before_train=false", f"trainer.run_dir={folder}"]
    rule = "trainer.watchdog.kl={bound: -1, steps: 2, action: stop}"
    assert run(APP, [*arguments, "trainer.total_steps=3", rule]) == 1
    reason = "the KL to the base model is"
    assert f"the watchdog ended the run after step 2: {reason}" in capsys.readouterr().err
    assert reason in (folder / "report.html").read_text()
    assert [one.name for one in folder.glob("checkpoints/step_*")] == ["step_000001"]  # what collapsed is not kept
    more = ["trainer.total_steps=3", "trainer.on_existing=resume", "trainer.watchdog.kl.action=off"]
    assert run(APP, [*arguments, *more]) == 0
    assert [row["step"] for row in metric_rows(folder)] == [1, 2, 3]


def test_what_shares_the_trainers_cards_leaves_them_before_every_update(one_process, monkeypatch, tmp_path):
    seen, train = [], ActorRolloutRefWorker.update_actor

    async def leave_gpu(scoring):
        seen.append("rewards leave")

    def update_actor(worker, *arguments):
        seen.append("update")
        return train(worker, *arguments)

    monkeypatch.setattr(Scoring, "leave_gpu", leave_gpu)
    monkeypatch.setattr(ActorRolloutRefWorker, "update_actor", update_actor)
    assert run(APP, [*MICRO, f"trainer.run_dir={tmp_path / 'run'}"]) == 0
    assert seen == ["rewards leave", "update"] * 2


def test_the_watchdog_is_silent_in_the_shipped_job(finished_run, metric_rows):
    folder, _ = finished_run
    table = metric_rows(folder)
    assert {"rollout/saturation", "rollout/sharpness", "rollout/diversity"} <= set(table[-1])
    assert not [key for row in table for key in row if key.startswith("watchdog/")]
