"""What the apps' hooks make of a scored batch, without Ray."""

from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace

import dpo_online.trainer as dpo
import flowgrpo.trainer as grpo
import pytest
import torch
from diffusion_losses import DiffusionLossConfig
from ray_trainer.compose import compose
from ray_trainer.config import RolloutCorrectionConfig
from ray_trainer.errors import TrainerError
from ray_trainer.group import WorkerGroup
from ray_trainer.rules import check_experts, check_rules
from ray_trainer.workers import ActorRolloutRefWorker as Worker
from run_report import MetricsWriter
from sde_samplers import SamplerSettings
from tensordict import NonTensorStack, TensorDict

RECIPES = Path(str(files("flowgrpo"))) / "recipes"


def test_a_random_share_of_the_steps_is_trained():
    chosen = grpo.chosen_steps(64, 5, 0.6, seed=1, step=3)
    assert chosen.shape == (64, 3)
    assert (chosen.diff(dim=1) > 0).all()
    assert len(chosen.unique(dim=0)) > 5  # each sample has its own
    assert torch.equal(grpo.chosen_steps(64, 5, 0.6, seed=1, step=3), chosen)
    assert not torch.equal(grpo.chosen_steps(64, 5, 0.6, seed=1, step=4), chosen)
    assert grpo.chosen_steps(64, 5, 0.01, seed=1, step=3).shape == (64, 1)
    assert grpo.chosen_steps(64, 5, 1.0, seed=1, step=3) is None


class Config:
    """As much of a config as the hooks read."""

    update_scores_first = True

    class algorithm:
        advantage_std, advantage_ddof, advantage_eps, flat_groups = "batch", 0, 1e-4, "keep"
        pair_margin, pair_mode, pair_ties = 0.0, "best_worst", "skip"
        rollout_correction = RolloutCorrectionConfig()

    class reward:
        combine = "weighted_sum"


def scored(rewards):
    batch = TensorDict({"rm_scores": torch.tensor(rewards)[:, None]}, batch_size=[len(rewards)])
    batch["final_latents"] = torch.arange(float(len(rewards)))[:, None].expand(-1, 4)
    batch["uid"] = NonTensorStack(*[f"u{i // 3}" for i in range(len(rewards))])
    return batch


def trainer(cls):
    made = cls.__new__(cls)
    made.config = Config
    return made


REWARDS = [0.0, 1.0, 0.5, 0.7, 0.7, 0.7, float("nan"), 0.2, 0.4]


@pytest.mark.parametrize(("flat", "left"), [("keep", [0, 1, 2, 3, 4, 5, 7, 8]), ("drop", [0, 1, 2, 7, 8])])
@pytest.mark.parametrize("cls", [dpo.RayForwardProcessTrainer, grpo.RayFlowGRPOTrainer])
def test_flat_groups_are_kept_or_dropped_and_unscored_samples_always_leave(cls, flat, left, monkeypatch):
    monkeypatch.setattr(Config.algorithm, "flat_groups", flat)
    batch = scored(REWARDS)
    data, metrics = trainer(cls).compute_advantage(batch)
    assert data["final_latents"][:, 0].tolist() == left
    assert data["advantages"].shape == (len(left), 1)
    assert data["advantages"][:3].sum() == pytest.approx(0, abs=1e-6)
    if flat == "keep":
        assert (data["advantages"][3:6] == 0).all()
    assert metrics["advantages/equal_groups"] == 1
    assert metrics["advantages/nonfinite"] == 1
    assert metrics["advantages/dropped"] == 9 - len(left)


def test_advantages_reach_the_loss_unclamped():
    """Flow-DPPO does not clamp them, so nobody else may: a group's only success of 64 has A = 7.9 = sqrt(63)."""
    batch = TensorDict({"rm_scores": torch.eye(64)[:, :1]}, batch_size=[64])
    batch["uid"] = NonTensorStack(*["u"] * 64)
    data, _ = trainer(dpo.RayForwardProcessTrainer).compute_advantage(batch)
    assert data["advantages"].max() == pytest.approx(63**0.5, rel=1e-2)


class Workers:
    """What the policy-gradient hooks ask of the workers: scores, and of how many rows."""

    log_probs = torch.zeros(0, 2, 1)

    def __init__(self):
        self.rows = []

    def each(self, method, batch, *columns):
        self.rows.append((method, len(batch), *map(len, columns)))

    def each_row(self, method, batch):
        self.each(method, batch)
        return self.log_probs

    def score_after_first(self, batch, step):
        self.each(WorkerGroup.score_after_first, batch)


def settled(difference, run, *more, clip=1e-3):
    """(methods that scored, floor that was logged, line) of a first and a second step with `old_log_probs=auto`."""
    made, said = trainer(grpo.RayFlowGRPOTrainer), []
    changes = ["algorithm.old_log_probs=auto", f"actor.diffusion_loss.clip_ratio={clip}", *more]
    made.config = compose("flowgrpo", RECIPES / "tiny_flow_grpo.yaml", changes)
    made.workers, made.run, made._note = Workers(), SimpleNamespace(path=run), said.append
    made.workers.log_probs = torch.tensor([[[0.0, 0.0], [0.0, 0.0]], [[-0.5, -0.5], [-0.5, -0.5 + difference]]])
    batch = scored([0.0, 1.0])
    metrics = [made.compute_old_log_prob(batch, step) for step in range(2)]
    assert metrics[1] == {}
    return [method for method, *_ in made.workers.rows], metrics[0].get(grpo.FLOOR), said


def test_auto_takes_the_rollouts_log_probs_when_they_are_within_a_tenth_of_the_clip(tmp_path):
    methods, floor, (line,) = settled(6e-5, tmp_path)
    assert methods == [Worker.measure_log_prob]  # once: no pass in the steps after
    assert floor == pytest.approx(6e-5, rel=1e-3)
    assert "differ by 6.00e-05 at most, within 0.1 of clip_ratio=0.001: the rollout's own log-probs serve" in line
    methods, _, (line,) = settled(6e-5, tmp_path, clip=1e-4)
    assert methods == [Worker.measure_log_prob, *[WorkerGroup.score_after_first] * 2]
    assert "more than 0.1 of clip_ratio=0.0001: the trainer scores the samples again" in line
    # A resumed run decides by the same number, whatever is measured now.
    with MetricsWriter(tmp_path) as writer:
        writer.append(1, {grpo.FLOOR: 0.5})
        writer.append(2, {"reward/mean": 0.5})
    methods, floor, _ = settled(0.0, tmp_path)
    assert methods == [WorkerGroup.score_after_first] * 2
    assert floor is None


def test_who_asked_for_a_correction_is_told_when_auto_leaves_nothing_to_correct(tmp_path):
    decoupled, words = "algorithm.rollout_correction.mode=decoupled", "rollout_correction does nothing"
    methods, _, (line,) = settled(6e-5, tmp_path, decoupled)
    assert line.endswith(f"the rollout's own log-probs serve, so {words}")
    assert methods == [Worker.measure_log_prob]
    assert words not in settled(6e-5, tmp_path)[2][0]  # nobody asked for one


def refusal(recipe, *changes):
    with pytest.raises(TrainerError) as caught:
        check_rules(compose("flowgrpo", RECIPES / f"{recipe}.yaml", list(changes)))
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["mode=decoupled"], "set algorithm.old_log_probs=trainer or auto"),
        (
            ["mode=decoupled", "old=auto", "staleness=1"],
            "nothing would be corrected; set algorithm.old_log_probs=trainer",
        ),
        (["mode=bypass", "old=trainer"], "old_log_probs=trainer around another; set rollout"),
        (
            ["cap=3"],
            "rollout_correction.cap=3.0 has no effect with algorithm.rollout_correction.mode=none; set mode=decoupled",
        ),
        (["mode=bypass", "cap=3"], "cap=3.0 has no effect"),
        (["mode=bypass", "level=trajectory"], "without reject"),
        (["mode=bypass", "reject=[2,1]"], "keeps nothing"),
        (["reject=[0.5,2]"], "reject=[0.5, 2.0] has no effect"),
    ],
)
def test_a_correction_without_effect_or_meaning_is_refused(changes, words):
    keys = [f"algorithm.rollout_correction.{one}".replace("rollout_correction.old", "old_log_probs") for one in changes]
    keys = [key.replace("algorithm.rollout_correction.staleness", "trainer.staleness") for key in keys]
    assert words in refusal("tiny_flow_grpo", *keys)


def test_going_back_needs_checkpoints():
    back = "trainer.watchdog.grad_norm.action=rollback"
    assert f"{back} with trainer.save_every=0: there is no checkpoint" in refusal(
        "tiny_flow_grpo", back, "trainer.save_every=0"
    )


def test_log_probs_that_do_not_exist_are_not_compared():
    loss = "actor.diffusion_loss.loss_mode=diffusion_nft"
    assert "has no log-probs of what was drawn" in refusal("tiny_flow_grpo", loss, "algorithm.old_log_probs=auto")
    mode = "algorithm.rollout_correction.mode=bypass"
    assert "rollout_correction.mode=bypass with loss_mode=diffusion_nft" in refusal("tiny_flow_grpo", loss, mode)
    assert "its clip is on means" in refusal("tiny_grpo_guard", "algorithm.old_log_probs=auto")


@pytest.mark.parametrize("rewards", [REWARDS, [0.5] * 9])
def test_dropped_rows_cost_no_forward(rewards, monkeypatch):
    monkeypatch.setattr(Config.algorithm, "flat_groups", "drop")
    monkeypatch.setattr(Config.algorithm, "old_log_probs", "trainer", raising=False)
    monkeypatch.setattr(Config.algorithm, "step_fraction", 0.5, raising=False)

    class actor:
        diffusion_loss = DiffusionLossConfig(ref_kl_coef=0.1)

    class loop:
        seed = 0

    monkeypatch.setattr(Config, "actor", actor, raising=False)
    monkeypatch.setattr(Config, "trainer", loop, raising=False)
    batch = scored(rewards)
    batch["settings"] = NonTensorStack(
        *[SamplerSettings(64, 64, 4, kind="flow_sde", noise_level=0.7, window=(0, 1))] * 9
    )
    made = trainer(grpo.RayFlowGRPOTrainer)
    made.workers = Workers()
    data, _ = made.prepare_update(batch, 0)
    left = 5 if rewards is REWARDS else 0
    assert len(data) == left
    asked = [(Worker.choose_steps, 5, 5), (WorkerGroup.score_after_first, 5), (Worker.compute_ref_log_prob, 5)]
    assert made.workers.rows == (asked if left else [])


def noted(metrics, **changes):
    """What the loop says about `metrics` of the first update."""
    made, said = trainer(dpo.RayForwardProcessTrainer), []
    recipe = RECIPES / f"{changes.pop('recipe', 'tiny_flow_grpo')}.yaml"
    made.config = compose("flowgrpo", recipe, [f"{key}={value}" for key, value in changes.items()])
    made.live = SimpleNamespace(note=said.append)
    made._warn_about_noise(metrics)
    made._warn_about_noise(metrics)
    return said


def test_the_warning_about_noise_knows_each_clip_and_advises_what_is_not_set():
    bf16 = {"actor.fsdp_config.model_dtype": "bf16"}
    assert noted({"actor/noise_max": 9e-4}) == []
    assert noted({"actor/rollout_log_prob_diff_max": 0.5, "actor/noise_max": 0.0}) == []
    (line,) = noted({"actor/noise_max": 2e-3})  # once, not twice
    assert "clip_ratio=0.001: set algorithm.old_log_probs=trainer, or raise actor.diffusion_loss.clip_ratio" in line
    (line,) = noted({"actor/noise_max": 2e-3}, **{"algorithm.old_log_probs": "trainer"}, **bf16)
    assert "old_log_probs" not in line
    assert "float32" in line
    scoring = {"algorithm.old_log_probs": "trainer", "actor.log_prob_micro_batch_size_per_gpu": 4}
    (line,) = noted({"actor/noise_max": 2e-3}, **scoring)
    assert "actor.log_prob_micro_batch_size_per_gpu=48" in line
    (line,) = noted({"actor/noise_max": 2e-5}, recipe="tiny_flow_dppo")
    assert "raise actor.diffusion_loss.kl_mask_threshold" in line
    assert noted({"actor/noise_max": 9e-6}, recipe="tiny_flow_dppo") == []
    assert len(noted({"actor/noise_max": 3e-6}, recipe="tiny_grpo_guard")) == 1


@pytest.mark.parametrize(
    ("recipe", "words"),
    [("tiny_nft", "true_cfg_scale=1"), ("tiny_awm", "true_cfg_scale=1"), ("tiny_dpo", None)],
)
def test_guidance_is_refused_where_the_update_compares_with_the_velocity_that_sampled(recipe, words):
    folder = Path(str(files("dpo_online"))) / "recipes"
    config = compose("dpo-online", folder / f"{recipe}.yaml", ["rollout.pipeline.true_cfg_scale=4.0"])
    if words is None:
        return check_rules(config)
    with pytest.raises(TrainerError, match=words):
        check_rules(config)
    embedded = compose("dpo-online", folder / f"{recipe}.yaml", ["rollout.pipeline.guidance_scale=3.5"])
    return check_rules(embedded)  # an input of the model, in sampling and training alike


@pytest.mark.parametrize(
    ("app", "recipe", "changes", "words"),
    [
        ("dpo_online", "tiny_nft", [], "diffusion_nft draws a noise level for each sample"),
        ("dpo_online", "tiny_dpo", [], "dpo draws a noise level for each sample"),
        ("flowgrpo", "tiny_dance_grpo", [], "step_fraction=0.6 draws steps for each sample"),
        ("flowgrpo", "tiny_dance_grpo", ["algorithm.step_fraction=1"], None),
        ("flowgrpo", "tiny_flow_grpo", [], None),
    ],
)
def test_two_experts_shared_by_several_processes_take_losses_whose_samples_stay_together(app, recipe, changes, words):
    keys = ["trainer.num_workers=2", "actor.fsdp_config.sharding=shard", *changes]
    made = compose(app, Path(str(files(app))) / "recipes" / f"{recipe}.yaml", keys)
    check_experts(made, {"boundary_ratio": None})
    if words is None:
        return check_experts(made, {"boundary_ratio": 0.875})
    with pytest.raises(TrainerError, match=words):
        check_experts(made, {"boundary_ratio": 0.875})
    made.actor.fsdp_config.sharding = "replicate"  # whole copies wait for nobody in a forward pass
    check_experts(made, {"boundary_ratio": 0.875})
    made.actor.fsdp_config.sharding, made.trainer.num_workers = "shard", 1
    return check_experts(made, {"boundary_ratio": 0.875})


def test_pairs_are_the_best_and_the_worst_of_a_prompt():
    batch = scored([0.0, 1.0, 0.5, 0.7, 0.7, 0.7, 0.3, 0.2, 0.4])
    data, metrics = trainer(dpo.RayOnlineDPOTrainer).prepare_update(batch, 0)
    assert data["final_latents"][:, 0].tolist() == [1, 0, 8, 7]
    assert (metrics["pairs/pairs"], metrics["pairs/tied_pairs"]) == (2, 1)
    assert metrics["pairs/reward_gap"] == pytest.approx(0.6)
