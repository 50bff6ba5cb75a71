"""Bad input to the losses: a LossError that names the argument, its value and the remedy."""

from __future__ import annotations

import pytest
import torch
from diffusion_losses import (
    DiffusionLossConfig,
    LossError,
    clipped_surrogate,
    diffusion_loss,
    group_advantages,
    guard_log_ratio,
    make_pairs,
    mean_kl,
    nft_terms,
    noise_scale_weights,
    optimality_probability,
    preference_loss,
    trajectory_log_ratio,
    velocity_kl,
)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"loss_mode": "flow_grop"}, "loss_mode='flow_grop' is unknown; choose one of awm, .*did you mean 'flow_grpo'"),
        (
            {"loss_mode": "ppo"},
            "choose one of awm, dance_grpo, diffusion_nft, dpo, flow_dppo, flow_grpo, gspo, grpo_guard",
        ),
        ({"clip_ratio": 0.0}, "clip_ratio=0.0 must be a finite number above zero"),
        ({"clip_ratio": -1e-4}, "clip_ratio=-0.0001"),
        ({"clip_ratio": "1e-4"}, "clip_ratio='1e-4'"),
        ({"clip_ratio": float("nan")}, "clip_ratio=nan"),
        ({"mix_beta": 0.0}, "mix_beta=0.0"),
        ({"dpo_beta": 0}, "dpo_beta=0 "),
        ({"adv_clip_max": float("inf")}, "adv_clip_max=inf"),
        ({"ref_kl_coef": -0.1}, "ref_kl_coef=-0.1 must be zero or a positive number"),
        ({"ref_kl_coef": None}, "ref_kl_coef=None"),
        ({"kl_kind": "means"}, "kl_kind='means' is unknown"),
        ({"kl_kind": "std", "loss_mode": "awm"}, "kl_kind='std' needs the transitions of a trajectory"),
        ({"adv_mode": "positive"}, "did you mean 'positive_only'"),
        ({"step_weighting": "inverse_steps"}, "did you mean 'inverse_step'"),
    ],
)
def test_config(fields, match):
    with pytest.raises(LossError, match=match.replace("flow_grpo, gspo, grpo_guard", "flow_grpo, grpo_guard, gspo")):
        DiffusionLossConfig(**fields)


def test_config_says_what_a_mode_reads():
    assert DiffusionLossConfig().reference_key is None
    assert DiffusionLossConfig(ref_kl_coef=0.5).reference_key == "ref_means"
    assert DiffusionLossConfig("mix_grpo", ref_kl_coef=0.5).reference_key is None
    assert DiffusionLossConfig("mix_grpo", ref_kl_coef=0.5, kl_kind="std").reference_key == "ref_means"
    assert DiffusionLossConfig("awm", ref_kl_coef=0.5).reference_key == "ref_velocity"
    assert DiffusionLossConfig("dpo").reference_key == "ref_velocity"
    assert DiffusionLossConfig("grpo_guard").needs_old_means
    assert not DiffusionLossConfig().needs_old_means
    assert DiffusionLossConfig("diffusion_nft").needs_old_velocity
    assert DiffusionLossConfig("gspo").needs_trajectory
    assert DiffusionLossConfig("awm", awm_ratio="trajectory").needs_trajectory
    assert DiffusionLossConfig("dpo").family == "forward_process"


def steps(**changes):
    """A valid grpo_guard call with a few entries changed; None removes an entry."""
    output = {"log_probs": torch.zeros(2), "means": torch.zeros(2, 3), "std": torch.ones(2)}
    data = {
        "old_log_probs": torch.zeros(2),
        "advantages": torch.ones(2),
        "old_means": torch.zeros(2, 3),
        "next_latents": torch.ones(2, 3),
        "ref_means": torch.zeros(2, 3),
        "sigma": torch.ones(2),
        "sigma_next": torch.zeros(2),
    }
    for key, value in changes.items():
        (output if key in output else data)[key] = value
    return tuple({k: v for k, v in part.items() if v is not None} for part in (output, data))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"log_probs": None}, r"model_output\['log_probs'\] is missing; loss_mode='grpo_guard' needs it"),
        ({"old_log_probs": None}, r"data\['old_log_probs'\] is missing"),
        ({"old_means": None}, r"data\['old_means'\] is missing; .*ratio is built from the transition means"),
        ({"ref_means": None}, r"data\['ref_means'\] is missing; .*kl_kind='std' with ref_kl_coef=0.5"),
        ({"std": None}, r"model_output\['std'\] is missing"),
        ({"sigma_next": None}, r"data\['sigma_next'\] is missing; .*step_weighting='inverse_step'"),
        ({"advantages": 1.0}, r"data\['advantages'\]=1.0 is not a tensor"),
        ({"advantages": torch.ones(3)}, r"data\['advantages'\] has shape \(3,\), which does not fit .* \(2,\)"),
        ({"advantages": torch.ones(2, 2)}, r"data\['advantages'\] has shape \(2, 2\)"),
        ({"old_log_probs": torch.zeros(3)}, r"data\['old_log_probs'\] has shape \(3,\) but log_probs has \(2,\)"),
        ({"log_probs": torch.zeros(2, 1, 1)}, r"log_probs'\] has shape \(2, 1, 1\); give \[B\] or \[B, W\]"),
        ({"log_probs": torch.zeros(0), "old_log_probs": torch.zeros(0)}, "at least one element"),
        ({"means": torch.zeros(3, 3)}, r"model_output\['means'\] has shape \(3, 3\)"),
        ({"old_means": torch.zeros(2, 4)}, r"data\['old_means'\] has shape \(2, 4\), expected \(2, 3\)"),
        ({"log_probs": torch.tensor([0.0, float("nan")])}, r"log_probs\[1\]=nan is not finite; mask that element"),
        ({"old_log_probs": torch.tensor([float("inf"), 0.0])}, r"old_log_probs\[0\]=inf is not finite"),
        ({"advantages": torch.tensor([float("nan"), 0.0])}, r"advantages\[0\]=nan"),
        ({"log_probs": torch.zeros(2).bfloat16()}, "has dtype torch.bfloat16; .* float32"),
        ({"old_means": torch.zeros(2, 3).half()}, r"old_means'\] has dtype torch.float16"),
        ({"std": torch.tensor([1.0, 0.0])}, r"std\[1\]=0.0 must be finite and above zero: a deterministic step"),
        ({"sigma": torch.zeros(2)}, r"sigma - sigma_next\[0\]=0.0 .*noise levels must decrease"),
        ({"mask": torch.ones(2)}, r"data\['mask'\] has dtype torch.float32; give a bool tensor"),
        ({"global_count": 0}, r"global_count'\]=0 is smaller than the 2 elements"),
    ],
)
def test_policy_gradient_input(changes, match):
    config = DiffusionLossConfig("grpo_guard", ref_kl_coef=0.5)
    diffusion_loss(config, *steps())
    with pytest.raises(LossError, match=match):
        diffusion_loss(config, *steps(**changes))


def test_trajectory_losses_refuse_single_steps():
    with pytest.raises(LossError, match=r"needs all window steps at once, as \[B, W\]"):
        diffusion_loss(DiffusionLossConfig("gspo"), *steps())
    with pytest.raises(LossError, match="cannot be normalised over one step"):
        diffusion_loss(DiffusionLossConfig(step_weighting="noise_scale"), *steps())


def forward(**changes):
    output = {"velocity": torch.zeros(4, 3)}
    data = {name: torch.zeros(4, 3) for name in ("x0", "noise", "old_velocity", "ref_velocity")}
    data |= {"sigma": torch.full((4,), 0.5), "advantages": torch.ones(4)}
    for key, value in changes.items():
        (output if key in output else data)[key] = value
    return tuple({k: v for k, v in part.items() if v is not None} for part in (output, data))


@pytest.mark.parametrize(
    ("mode", "changes", "match"),
    [
        ("diffusion_nft", {"old_velocity": None}, r"data\['old_velocity'\] is missing"),
        ("diffusion_nft", {"sigma": torch.zeros(4, 1, 1)}, r"data\['sigma'\] has shape \(4, 1, 1\)"),
        ("diffusion_nft", {"x0": torch.zeros(3, 3)}, r"data\['x0'\] has shape \(3, 3\), expected \(4, 3\)"),
        ("diffusion_nft", {"advantages": torch.full((4,), float("nan"))}, r"advantages\[0\]=nan"),
        ("diffusion_nft", {"velocity": torch.full((4, 3), float("nan"))}, r"velocity_error\[0\]=nan"),
        ("awm", {"noise": None}, r"data\['noise'\] is missing"),
        ("awm", {"old_velocity": None}, r"data\['old_velocity'\] is missing"),
        ("dpo", {"ref_velocity": None}, r"data\['ref_velocity'\] is missing"),
        ("dpo", {"velocity": torch.full((4, 3), float("inf"))}, r"velocity_error\[0\]=inf"),
        ("dpo", {"rollout_weights": torch.ones(4)}, "has no meaning for loss_mode='dpo'"),
        ("dpo", {"groups": ["a", "b", "a", "b"]}, "not sorted in pairs: rows 0 and 1 .* 'a' and 'b'"),
        ("dpo", {"groups": ["a", "a"]}, "has 2 ids for 4 rows"),
    ],
)
def test_forward_process_input(mode, changes, match):
    diffusion_loss(DiffusionLossConfig(mode), *forward())
    with pytest.raises(LossError, match=match):
        diffusion_loss(DiffusionLossConfig(mode), *forward(**changes))


def test_odd_rows_make_no_pairs():
    output, data = forward()
    with pytest.raises(LossError, match="3 rows do not make pairs"):
        diffusion_loss(
            DiffusionLossConfig("dpo"),
            {"velocity": output["velocity"][:3]},
            {name: value[:3] for name, value in data.items()},
        )


def test_groups_of_pairs_are_interleaved():
    rewards, groups = torch.tensor([1.0, 2.0, 4.0, 3.0]), ["a", "a", "b", "b"]
    rows = make_pairs(rewards, groups).interleaved()
    output, data = forward()
    data["groups"] = [groups[i] for i in rows]
    diffusion_loss(DiffusionLossConfig("dpo"), output, data)
    data["groups"] = ["a", "b", "a", "b"]
    with pytest.raises(LossError, match="rows 0 and 1 make a pair but belong to 'a' and 'b'"):
        diffusion_loss(DiffusionLossConfig("dpo"), output, data)


z3, o3 = torch.zeros(3), torch.ones(3)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: clipped_surrogate(z3, o3, 0.0), "clip_ratio=0.0"),
        (lambda: clipped_surrogate(z3, o3, 0.1, space="log"), "did you mean 'log_ratio'"),
        (lambda: mean_kl(z3, o3, std=0.0), r"std\[0\]=0.0 must be finite and above zero"),
        (lambda: mean_kl(z3, o3), "std=None, but kind='std' needs it"),
        (lambda: mean_kl(z3, o3, kind="flow_grpo", std=1.0), "step=None"),
        (lambda: mean_kl(z3, torch.ones(4), std=1.0), r"ref_mean has shape \(4,\) but the policy's is \(3,\)"),
        (lambda: mean_kl(z3, o3, kind="velocity", std=1.0), "kind='velocity' is unknown"),
        (lambda: velocity_kl(z3, o3, kind="velocity_std", std=1.0, sigma=0.5), "sigma_next=None"),
        (
            lambda: velocity_kl(z3, o3, kind="velocity_std", std=1.0, sigma=0.5, sigma_next=0.5),
            "noise levels must decrease",
        ),
        (lambda: guard_log_ratio(z3, o3, 1.0), "next_latents, noise and log_ratio are all None"),
        (lambda: guard_log_ratio(z3, o3, 0.0, noise=o3), r"std\[0\]=0.0"),
        (lambda: trajectory_log_ratio(z3), "as "),
        (lambda: noise_scale_weights(z3), "above zero somewhere in every window"),
        (lambda: nft_terms(z3, z3, z3, z3, o3, o3, beta=0.0), "beta=0.0"),
        (lambda: optimality_probability(o3, 0.0), "adv_clip_max=0.0"),
        (lambda: preference_loss(z3, 0.0), "beta=0.0"),
        (lambda: preference_loss(z3, 1.0, "sigmoids"), "did you mean 'sigmoid'"),
    ],
)
def test_pure_functions(call, match):
    with pytest.raises(LossError, match=match):
        call()


def test_errors_are_value_errors():
    with pytest.raises(ValueError, match="groups has 1 ids"):
        group_advantages(torch.zeros(2), ["a"])
