"""Policy-gradient losses against reference vectors of FlowGRPO, DanceGRPO, MixGRPO, GRPO-Guard and Flow-DPPO."""

from __future__ import annotations

import math

import pytest
import torch
from diffusion_losses import DiffusionLossConfig, diffusion_loss, mean_kl

close = torch.testing.assert_close


def policy_call(config, log_prob, given, **extra):
    data = {"old_log_probs": given["old_log_prob"], "advantages": given["advantages"], **extra}
    return diffusion_loss(config, {"log_probs": log_prob}, data)


@pytest.mark.golden("loss_grpo", "flowgrpo.")
def test_flow_grpo(vector):
    params = vector.params
    config = DiffusionLossConfig(clip_ratio=params["clip_range"], adv_clip_max=params["adv_clip_max"])
    log_prob = vector.given["log_prob"].clone().requires_grad_()
    loss, metrics = (out := policy_call(config, log_prob, vector.given)).loss, out.metrics
    loss.backward()
    close(loss.detach(), vector.want["loss"], rtol=1e-6, atol=1e-7)
    close(log_prob.grad, vector.want["grad_log_prob"], rtol=1e-6, atol=1e-7)
    close(metrics["actor/pg_clipfrac"], vector.want["clipfrac"])
    close(metrics["actor/ppo_kl"], vector.want["ppo_kl"], rtol=1e-5, atol=1e-9)
    ratio = vector.want["ratio"].double()
    for name, value in (
        ("mean", ratio.mean()),
        ("min", ratio.min()),
        ("max", ratio.max()),
        ("std", ratio.std(correction=0)),
    ):
        close(metrics[f"actor/ratio_{name}"].double(), value, rtol=1e-6, atol=1e-7)
    assert metrics["actor/on_policy"] == float("onpolicy" in vector.case)


@pytest.mark.golden("loss_grpo", "dancegrpo.")
def test_dance_grpo(vector):
    params = vector.params
    steps = params["grad_accum"] * params["train_timesteps"]
    config = DiffusionLossConfig("dance_grpo", clip_ratio=params["clip_range"], adv_clip_max=params["adv_clip_max"])
    count = steps * vector.given["log_prob"].numel()
    out = policy_call(config, vector.given["log_prob"], vector.given, global_count=count)
    close(out.loss, vector.want["loss"], rtol=2e-6, atol=1e-7)


@pytest.mark.golden("loss_grpo", "mixgrpo.")
def test_mix_grpo(vector):
    params = vector.params
    steps = params["grad_accum"] * params["n_window"]
    config = DiffusionLossConfig(
        "mix_grpo",
        clip_ratio=params["clip_range"],
        adv_clip_max=params["adv_clip_max"],
        ref_kl_coef=params["kl_coeff"],
    )
    count = steps * vector.given["log_prob"].numel()
    out = policy_call(config, vector.given["log_prob"], vector.given, global_count=count)
    close(out.loss, vector.want["loss"], rtol=2e-6, atol=1e-7)
    close(out.metrics["actor/pg_loss"] / steps, vector.want["policy_loss"], rtol=2e-6, atol=1e-7)
    close(out.metrics["actor/kl_loss"] / steps, vector.want["kl_loss"], rtol=1e-5, atol=1e-10)


@pytest.mark.golden("loss_grpo", "kl.")
def test_kl_on_means(vector):
    given, want = vector.given, vector.want
    name = "kl_flow_grpo" if "kl_flow_grpo" in want else "kl_verl_omni" if "kl_verl_omni" in want else None
    close(mean_kl(given["mean"], given["ref_mean"], kind="unscaled").mean(), want["kl_x_based_unscaled_FlowFactory"])
    if name is None:
        return
    # Both codes divide by the instantaneous std s. With s handed over as the std that is the "std" reading ...
    mean = given["mean"].clone().requires_grad_()
    kl = mean_kl(mean, given["ref_mean"], kind="std", std=given["std_dev_t"]).mean()
    close(kl.detach(), want[name])
    if "loss_beta0.04" in want:
        close(0.04 * kl.detach(), want["loss_beta0.04"])
    grad = torch.autograd.grad(0.04 * kl if "loss_beta0.04" in want else kl, mean)[0]
    scale = want["grad_mean"].norm() / grad.norm()
    assert min(abs(scale - 1.0), abs(scale * 0.04 - 1.0), abs(scale - 0.04)) < 1e-5
    close(grad * scale, want["grad_mean"], rtol=1e-4, atol=1e-9)


@pytest.mark.golden("loss_grpo", "kl.")
def test_kl_on_means_from_the_total_std(vector, flow_step):
    """... and with the total std S it is the "flow_grpo" reading, which takes h and says so."""
    want = vector.want.get("kl_flow_grpo", vector.want.get("kl_verl_omni"))
    step = flow_step(vector.params["step_index"], vector.params["noise_level"])
    kl = mean_kl(
        vector.given["mean"],
        vector.given["ref_mean"],
        kind="flow_grpo",
        std=torch.full((3,), step.total_std),
        step=step.h,
    )
    close(kl.mean(), want, rtol=1e-5, atol=0)
    assert math.isclose(step.s, vector.given["std_dev_t"].flatten()[0].item(), rel_tol=1e-5)


def guard_inputs(vector, flow_step):
    """The transition in float64 up to its stored fp32 tensors: leaf means, total std, and d mean / d v."""
    step = flow_step(vector.params["step_index"], vector.params["noise_level"])
    given = vector.given
    close(step.mean(given["x_t"].double(), given["v_new"].double()).float(), given["mean"], rtol=1e-5, atol=1e-5)
    std = given["std_dev_t"].flatten() * given["sqrt_neg_dt"]
    assert math.isclose(std[0].item(), step.total_std, rel_tol=1e-5)
    return step, std, given["sqrt_neg_dt"] ** 2


class ScaledLogProb(torch.autograd.Function):
    """The stored fp32 log-prob, with the derivative that its formula has in the mean."""

    @staticmethod
    def forward(ctx, mean, stored, x_next, std):
        ctx.save_for_backward(mean, x_next, std)
        return stored.clone()

    @staticmethod
    def backward(ctx, grad):
        mean, x_next, std = ctx.saved_tensors
        tail = [1] * (mean.ndim - 1)
        per_element = (x_next - mean) / (std.reshape(-1, *tail) ** 2) / mean[0].numel()
        return grad.reshape(-1, *tail) * per_element, None, None, None


def guard_run(vector, flow_step, *, identity, clip_space, weighting="inverse_step"):
    step, std, h = guard_inputs(vector, flow_step)
    given = vector.given
    mean = given["mean"].clone().requires_grad_()
    log_prob = ScaledLogProb.apply(mean, given["log_prob"], given["prev_sample"], std)
    config = DiffusionLossConfig(
        "grpo_guard",
        clip_ratio=vector.params["clip_ratio"],
        adv_clip_max=vector.params["adv_clip_max"],
        guard_clip=clip_space,
        step_weighting=weighting,
    )
    data = {
        "old_log_probs": given["old_log_prob"],
        "old_means": given["old_mean"],
        "advantages": given["advantages"],
        "sigma": h,  # only the difference is read
        "sigma_next": torch.zeros_like(h),
    }
    if identity:
        data["next_latents"] = given["prev_sample"]
    out = diffusion_loss(config, {"log_probs": log_prob, "means": mean, "std": std}, data)
    out.loss.backward()
    return out, mean.grad * step.dmean_dv, std


@pytest.mark.golden("loss_guard_dppo", "guard.")
@pytest.mark.parametrize("identity", [True, False], ids=["identity", "eq8"])
def test_grpo_guard_loss(vector, flow_step, identity):
    out, _, _ = guard_run(vector, flow_step, identity=identity, clip_space="log_ratio")
    close(out.loss.detach(), vector.want["loss"], rtol=5e-7, atol=0)
    close(out.metrics["actor/ratio_mean"], vector.want["ratio_mean"], rtol=0, atol=3e-7)
    bare, _, _ = guard_run(vector, flow_step, identity=identity, clip_space="log_ratio", weighting="uniform")
    close(bare.loss.detach(), vector.want["loss_flow_factory_no_inv_dt"], rtol=0, atol=5e-7)


@pytest.mark.golden("loss_guard_dppo", "guard.")
def test_grpo_guard_gradient_with_the_clip_on_the_fp32_ratio(vector, flow_step):
    """verl-omni's reading: every row agrees."""
    out, grad, _ = guard_run(vector, flow_step, identity=False, clip_space="ratio")
    scale = vector.want["grad_v_new"].abs().max().item()
    close(grad, vector.want["grad_v_new"], rtol=0, atol=2e-6 * scale)
    close(out.metrics["actor/pg_clipfrac"], vector.want["clipfrac"])


@pytest.mark.golden("loss_guard_dppo", "guard.")
@pytest.mark.parametrize("identity", [True, False], ids=["identity", "eq8"])
def test_grpo_guard_gradient_with_the_clip_on_the_log_ratio(vector, flow_step, identity):
    """Our default: rows agree unless their log-ratio lies between the clip and what fp32 makes of 1 +- clip."""
    _, grad, std = guard_run(vector, flow_step, identity=identity, clip_space="log_ratio")
    given, want = vector.given, vector.want["grad_v_new"]
    tail = (-1, *[1] * (given["mean"].ndim - 1))
    z = (given["prev_sample"].double() - given["old_mean"].double()) / std.double().reshape(tail)
    exact = (z * (given["mean"].double() - given["old_mean"].double())).flatten(1).mean(1)
    clip = vector.params["clip_ratio"]
    lo, hi = (torch.tensor([1.0 - clip, 1.0 + clip]).double() - 1.0).abs().tolist()
    near = (exact.abs() > clip - 3e-7) & (exact.abs() < max(lo, hi) + 3e-7)
    scale = want.abs().max().item()
    close(grad[~near], want[~near], rtol=0, atol=1e-5 * scale)
    for row in near.nonzero().flatten():
        cut = exact[row].abs() > clip and exact[row] * given["advantages"][row] > 0
        if identity and abs(exact[row].abs() - clip) > 1e-8:
            assert (grad[row].abs().max() == 0) == bool(cut)


@pytest.mark.golden("loss_guard_dppo", "dppo.")
def test_flow_dppo(vector, vectors, flow_step):
    source = vectors["loss_guard_dppo", vector.params["inputs_case"]]
    step, std, _ = guard_inputs(source, flow_step)
    given = source.given
    for coefficient, name in ((True, "loss"), (False, "loss_no_kl_coef")):
        mean = given["mean"].clone().requires_grad_()
        log_prob = ScaledLogProb.apply(mean, given["log_prob"], given["prev_sample"], std)
        config = DiffusionLossConfig(
            "flow_dppo", kl_mask_threshold=vector.params["kl_mask_threshold"], add_kl_coefficient=coefficient
        )
        data = {key: given[key] for key in ("advantages",)}
        data |= {"old_log_probs": given["old_log_prob"], "old_means": given["old_mean"]}
        out = diffusion_loss(config, {"log_probs": log_prob, "means": mean, "std": std}, data)
        close(out.loss.detach(), vector.want[name], rtol=2e-6, atol=1e-6)
        if coefficient:
            out.loss.backward()
            close(out.metrics["actor/dppo_masked_fraction"], vector.want["masked_fraction"])
            close(out.metrics["actor/dppo_divergence"], vector.want["kl_mean"], rtol=1e-5, atol=0)
            grad_v = (mean.grad * step.dmean_dv).norm()
            close(grad_v, vector.want["grad_norm_v_new"], rtol=1e-5, atol=1e-8)
