"""Recipes over a base, the old policy's schedules, and what a config says about who samples."""

import pytest
import torch
from fsdp_diffusers_engine.worker import _filled
from ray_trainer.compose import compose
from ray_trainer.config import OldPolicyConfig, updates_per_step
from ray_trainer.errors import TrainerError
from ray_trainer.step_metrics import forwards_per_sample
from tensordict import NonTensorStack, TensorDict


def test_a_recipe_over_a_base_is_the_base_with_its_changes(tmp_path):
    (tmp_path / "below.yaml").write_text("base: builtin:tiny\nactor: {optim: {lr: 2.0e-3}}\nrollout: {n: 4}\n")
    (tmp_path / "mine.yaml").write_text("base: below.yaml\nrollout: {n: 6}\n")
    config = compose("flowgrpo", tmp_path / "mine.yaml", ["rollout.seed=5"])
    assert config.recipe == "mine"
    assert (config.rollout.n, config.rollout.seed) == (6, 5)  # nearest wins
    assert config.actor.optim.lr == 2e-3  # one below
    assert config.actor.optim.betas == [0.9, 0.99]  # two below
    assert config.model.path == "builtin:tiny_qwen_image"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("base: nothing.yaml\n", "based on 'nothing.yaml', and there is no file"),
        ("base: builtin:huge\n", "there is no built-in 'huge' among the recipes"),
        ("base: mine.yaml\n", "a base must end somewhere"),
        ("base: below.yaml\n", "did you mean 'rollout.n'"),
    ],
)
def test_a_base_that_cannot_be_used_is_named(tmp_path, text, complaint):
    (tmp_path / "below.yaml").write_text("rollout: {nn: 4}\n")
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(TrainerError, match=complaint):
        compose("flowgrpo", tmp_path / "mine.yaml", [])


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [  # DiffusionNFT's three published schedules, d after n optimizer steps
        (OldPolicyConfig(), {0: 0.0, 100: 0.0}),
        (OldPolicyConfig(decay_rate=0.001, decay_max=0.5), {0: 0.0, 100: 0.1, 500: 0.5, 900: 0.5}),
        (OldPolicyConfig(decay_start=75, decay_rate=0.0075, decay_max=0.999), {0: 0, 75: 0, 95: 0.15, 1000: 0.999}),
    ],
)
def test_old_policy_schedules(schedule, expected):
    assert {n: schedule.decay(n) for n in expected} == pytest.approx(expected)


def test_updates_per_step_counts_pairs(tmp_path):
    (tmp_path / "r.yaml").write_text("base: builtin:tiny\ndata: {prompts_per_step: 5}\nrollout: {n: 8}\n")
    assert updates_per_step(compose("flowgrpo", tmp_path / "r.yaml", [])) == 1
    assert updates_per_step(compose("flowgrpo", tmp_path / "r.yaml", ["actor.ppo_mini_batch_size=16"])) == 3
    pairs = ["actor.diffusion_loss.loss_mode=dpo", "actor.ppo_mini_batch_size=4", "actor.ppo_epochs=2"]
    assert updates_per_step(compose("dpo-online", tmp_path / "r.yaml", pairs)) == 6  # 10 rows in threes of four, twice


def test_another_reward_does_not_get_the_recipes_options(tmp_path):
    (tmp_path / "r.yaml").write_text("base: builtin:tiny\nreward: {name: pickscore, options: {path: somewhere}}\n")
    assert compose("flowgrpo", tmp_path / "r.yaml", []).reward.options == {"path": "somewhere"}
    assert compose("flowgrpo", tmp_path / "r.yaml", ["reward.options.device=cpu"]).reward.options == {
        "path": "somewhere",
        "device": "cpu",
    }
    same = compose("flowgrpo", tmp_path / "r.yaml", ["reward.name=pickscore"])
    assert same.reward.options == {"path": "somewhere"}
    (tmp_path / "s.yaml").write_text("base: r.yaml\nreward: {name: clip_score}\n")
    assert compose("flowgrpo", tmp_path / "s.yaml", []).reward.options == {}
    other = compose("flowgrpo", tmp_path / "r.yaml", ["reward.name=ocr", "reward.options={lang: en}"])
    assert (other.reward.name, other.reward.options) == ("ocr", {"lang": "en"})


def test_who_samples(tmp_path):
    (tmp_path / "r.yaml").write_text("base: builtin:tiny\n")
    make = lambda *overrides: compose("flowgrpo", tmp_path / "r.yaml", list(overrides))  # noqa: E731
    assert make().shares_weights
    assert not make("rollout.num_replicas=2").shares_weights
    assert not make("rollout.backend=vllm_omni").shares_weights
    assert make().sampling_adapters == ("default",)
    assert make("rollout.rollout_adapter=old").sampling_adapters == ("default", "old")
    guard = "actor.diffusion_loss.loss_mode=grpo_guard"
    assert make(guard).rollout_means
    assert not make(guard, "algorithm.old_log_probs=trainer").rollout_means
    assert not make().rollout_means
    assert make("rollout.rollout_adapter=reference").sampling_adapters == ("default",)


@pytest.mark.parametrize(("rows", "expected"), [(4, 4), (5, 8), (2, 4), (6, 8)])
def test_rows_are_filled_up_and_masked(rows, expected):
    batch = TensorDict({"x": torch.arange(rows)}, batch_size=[rows])
    batch["uid"] = NonTensorStack(*[f"u{i}" for i in range(rows)])
    full = _filled(batch, batch, expected)
    assert len(full) == expected
    assert full["x"][:rows].tolist() == list(range(rows))
    assert "mask" not in batch.keys()
    if expected > rows:
        assert full["mask"].tolist() == [True] * rows + [False] * (expected - rows)
        assert full["x"][rows] == 0  # pairs stay pairs: the repetition begins at the first row


def test_forwards_of_a_step_add_up():
    counted = {"forwards/rollout": 6.0, "forwards/log_prob": 2.0, "forwards/train": 2.0, "forwards/no_grad": 0.0}
    assert forwards_per_sample(counted, trained_share=1.0) == 10.0
    pairs = {"forwards/rollout": 10.0, "forwards/train": 4.0, "forwards/no_grad": 4.0}
    assert forwards_per_sample(pairs, trained_share=0.25) == 12.0
