"""Rollout correction: weights, rejection and diagnostics, derived a second time; and its effect inside a loss."""

from __future__ import annotations

import math

import pytest
import torch
from diffusion_losses import DiffusionLossConfig, LossError, diffusion_loss, rollout_correction

B, W = 4, 3
OLD = torch.tensor([[0.1, -0.2, 0.3], [0.0, 0.0, 0.0], [0.9, 0.1, 0.2], [-1.2, 0.0, 0.1]])
ROLLOUT = torch.zeros(B, W)


def ratio_at(level):
    d = OLD.double()
    pooled = {"step": d, "trajectory": d.sum(1, keepdim=True), "trajectory_mean": d.mean(1, keepdim=True)}[level]
    return pooled.expand(B, W).exp().float()


@pytest.mark.parametrize("level", ["step", "trajectory", "trajectory_mean"])
def test_truncated_weights(level):
    out = rollout_correction(OLD, ROLLOUT, level=level, cap=1.5)
    torch.testing.assert_close(out.weights, ratio_at(level).clamp(max=1.5))
    assert torch.equal(out.old_log_probs, OLD)
    assert out.mask.all()
    assert out.metrics["correction/truncated"] == pytest.approx((ratio_at(level) > 1.5).float().mean().item())
    assert out.metrics["correction/rejected"] == 0


@pytest.mark.parametrize("level", ["step", "trajectory"])
def test_rejection(level):
    out = rollout_correction(OLD, ROLLOUT, level=level, reject=(0.5, 2.0))
    ratio = ratio_at(level)
    assert torch.equal(out.mask, (ratio >= 0.5) & (ratio <= 2.0))
    if level == "trajectory":
        assert out.mask.all(dim=1).tolist() == [True, True, False, False]
    assert out.metrics["correction/rejected"] == pytest.approx((~out.mask).float().mean().item())


def test_bypass_clips_around_the_rollout_policy_and_decoupled_weighs():
    log_probs = (OLD + 0.01).requires_grad_()
    advantages = torch.tensor([1.0, -1.0, 0.5, 2.0])
    config = DiffusionLossConfig(clip_ratio=1.0)

    def run(mode):
        fix = rollout_correction(OLD, ROLLOUT, mode=mode, cap=1.5)
        data = {"old_log_probs": fix.old_log_probs, "rollout_weights": fix.weights, "mask": fix.mask}
        return diffusion_loss(config, {"log_probs": log_probs}, {**data, "advantages": advantages})

    assert rollout_correction(OLD, ROLLOUT, mode="bypass").weights.unique().tolist() == [1.0]
    bypass, decoupled, total = run("bypass"), run("decoupled"), {"bypass": 0.0, "decoupled": 0.0}
    for b in range(B):
        for k in range(W):
            a, d = advantages[b].item(), OLD[b, k].item()
            ratio = math.exp(d + 0.01)
            total["bypass"] += max(-a * ratio, -a * min(ratio, 2.0))
            total["decoupled"] += -a * math.exp(0.01) * min(math.exp(d), 1.5)
    assert bypass.loss.item() == pytest.approx(total["bypass"] / (B * W), rel=1e-5)
    assert decoupled.loss.item() == pytest.approx(total["decoupled"] / (B * W), rel=1e-5)


def test_diagnostics():
    metrics = rollout_correction(OLD, ROLLOUT).metrics
    d = OLD.double().flatten().tolist()
    assert metrics["correction/kl"].item() == pytest.approx(-sum(d) / len(d), rel=1e-5)
    assert metrics["correction/k3"].item() == pytest.approx(sum(math.exp(x) - 1 - x for x in d) / len(d), rel=1e-5)
    assert metrics["correction/chi2"].item() == pytest.approx(sum(math.exp(2 * x) for x in d) / len(d) - 1, rel=1e-5)
    assert metrics["correction/abs_delta_max"].item() == pytest.approx(1.2)
    for k in range(W):
        assert metrics[f"correction/abs_delta_step_{k}"].item() == pytest.approx(
            OLD[:, k].abs().mean().item(), rel=1e-6
        )
    weights = OLD.exp().clamp(max=2.0).double()
    share = (weights.sum() ** 2 / (weights.square().sum() * weights.numel())).item()
    assert metrics["correction/effective_sample_share"].item() == pytest.approx(share, rel=1e-5)
    assert all(value.dtype == torch.float32 and value.ndim == 0 for value in metrics.values())


def test_equal_policies_correct_nothing():
    out = rollout_correction(OLD, OLD, reject=(0.99, 1.01))
    assert (out.weights == 1).all()
    assert out.mask.all()
    for name in ("kl", "k3", "chi2", "abs_delta_mean", "abs_delta_max", "truncated", "rejected"):
        assert out.metrics[f"correction/{name}"] == 0
    assert out.metrics["correction/effective_sample_share"] == 1


def test_what_is_rejected_is_no_effective_sample():
    half = rollout_correction(torch.tensor([[0.0], [5.0]]), torch.zeros(2, 1), reject=(0.5, 2.0)).metrics
    assert half["correction/effective_sample_share"] == 0.5
    none = rollout_correction(torch.full((2, 1), 5.0), torch.zeros(2, 1), reject=(0.5, 2.0)).metrics
    assert (none["correction/rejected"], none["correction/effective_sample_share"]) == (1, 0)
    assert not [name for name in none if "/weight_" in name]  # there is none, and 1 would say that all is well
    assert half["correction/weight_min"] == half["correction/weight_max"] == 1


def test_weights_make_an_off_policy_mean_unbiased():
    """Samples of N(0, 1) weighted to N(0.3, 1): with a cap that never binds, the weighted mean of x is 0.3."""
    x = torch.randn(200_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def density(mean):
        return -0.5 * (x - mean) ** 2

    out = rollout_correction(density(0.3), density(0.0), cap=1e6)
    assert (out.weights * x).mean().item() == pytest.approx(0.3, abs=0.01)
    assert out.weights.mean().item() == pytest.approx(1.0, abs=0.01)
    assert out.metrics["correction/kl"].item() == pytest.approx(0.045, abs=0.003)
    assert out.metrics["correction/k3"].item() == pytest.approx(0.045, abs=0.003)
    assert out.metrics["correction/chi2"].item() == pytest.approx(math.exp(0.09) - 1, abs=0.01)


def test_masked_elements_and_one_element():
    mask = torch.tensor([[True, False, True]] * B)
    dirty = OLD.clone()
    dirty[:, 1] = float("nan")
    out = rollout_correction(dirty, ROLLOUT, mask=mask, level="trajectory")
    torch.testing.assert_close(out.weights[:, 0], (OLD[:, 0] + OLD[:, 2]).exp().clamp(max=2.0))
    assert torch.equal(out.mask, mask)
    assert out.metrics["correction/abs_delta_step_1"] == 0
    single = rollout_correction(OLD[:1, 0], ROLLOUT[:1, 0])
    assert all(torch.isfinite(value) for value in single.metrics.values())
    nothing = rollout_correction(OLD, ROLLOUT, reject=(100.0, 200.0))
    assert not nothing.mask.any()
    assert all(torch.isfinite(value) for value in nothing.metrics.values())


def test_bypass_needs_no_old_log_probs():
    out = rollout_correction(None, ROLLOUT, mode="bypass")
    assert torch.equal(out.old_log_probs, ROLLOUT)
    with pytest.raises(LossError, match="old_log_probs=None, but mode='decoupled'"):
        rollout_correction(None, ROLLOUT)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"mode": "decouple"}, "did you mean 'decoupled'"),
        ({"level": "token"}, "choose one of step, trajectory, trajectory_mean"),
        ({"cap": 0.0}, "cap=0.0"),
        ({"reject": (2.0, 1.0)}, r"reject=\(2.0, 1.0\)"),
        ({"reject": (-1.0, 1.0)}, "0 <= low < high"),
        ({"old_log_probs": torch.zeros(2)}, r"old_log_probs has shape \(2,\), rollout_log_probs \(4, 3\)"),
        ({"old_log_probs": torch.full((B, W), float("nan"))}, r"old_log_probs\[0, 0\]=nan"),
        ({"rollout_log_probs": ROLLOUT.bfloat16()}, "has dtype torch.bfloat16"),
    ],
)
def test_bad_input(arguments, match):
    call = {"old_log_probs": OLD, "rollout_log_probs": ROLLOUT, **arguments}
    with pytest.raises(LossError, match=match):
        rollout_correction(call.pop("old_log_probs"), call.pop("rollout_log_probs"), **call)
