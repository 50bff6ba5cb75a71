"""Every loss mode derived a second time, element by element in plain Python floats, and compared in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from diffusion_losses import DiffusionLossConfig, diffusion_loss, mean_kl, velocity_kl

B, W, D = 4, 3, (2, 5)


def draw(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def flat(tensor, *index):
    return tensor[index].flatten().tolist()


@pytest.fixture
def batch():
    """A [B, W] batch of Gaussian transitions with consistent log-probs; two steps are masked out."""
    std = 0.2 + draw(B, W, seed=1).abs()
    old_means = draw(B, W, *D, seed=2)
    means = old_means + 0.05 * draw(B, W, *D, seed=3)
    next_latents = old_means + std[..., None, None] * draw(B, W, *D, seed=4)
    sigma = torch.tensor([0.9, 0.7, 0.4], dtype=torch.float64).expand(B, W)
    sigma_next = torch.tensor([0.7, 0.4, 0.1], dtype=torch.float64).expand(B, W)
    mask = torch.ones(B, W, dtype=torch.bool)
    mask[0, 1] = mask[2, 2] = False
    advantages = torch.tensor([1.5, -2.0, 7.0, -0.3], dtype=torch.float64)

    def log_prob(mean):
        z = (next_latents - mean) / std[..., None, None]
        return (-0.5 * z * z - std.log()[..., None, None]).flatten(2).mean(2)

    return {
        "output": {"log_probs": log_prob(means), "means": means, "std": std},
        "data": {
            "old_log_probs": log_prob(old_means),
            "old_means": old_means,
            "next_latents": next_latents,
            "advantages": advantages,
            "sigma": sigma,
            "sigma_next": sigma_next,
            "mask": mask,
            "ref_means": means + 0.1 * draw(B, W, *D, seed=5),
        },
    }


def ppo(log_ratio, advantage, clip):
    ratio = math.exp(log_ratio)
    return max(-advantage * ratio, -advantage * min(max(ratio, 1 - clip), 1 + clip))


def expected(batch, per_element):
    """Mean of per_element(b, k) over the elements that count."""
    mask = batch["data"]["mask"]
    values = [per_element(b, k) for b in range(B) for k in range(W) if mask[b, k]]
    return sum(values) / len(values)


def delta(batch, b, k):
    return (batch["output"]["log_probs"][b, k] - batch["data"]["old_log_probs"][b, k]).item()


def clamped(batch, b, limit=5.0):
    return min(max(batch["data"]["advantages"][b].item(), -limit), limit)


def mean_square(first, second, b, k):
    pairs = zip(flat(first, b, k), flat(second, b, k), strict=True)
    return sum((x - y) ** 2 for x, y in pairs) / math.prod(D)


@pytest.mark.parametrize("mode", ["flow_grpo", "dance_grpo"])
@pytest.mark.parametrize("clip", [0.002, 0.2])
def test_clipped(batch, mode, clip):
    config = DiffusionLossConfig(mode, clip_ratio=clip)
    want = expected(batch, lambda b, k: ppo(delta(batch, b, k), clamped(batch, b), clip))
    assert diffusion_loss(config, batch["output"], batch["data"]).loss.item() == pytest.approx(want, rel=1e-12)


def test_mix_grpo_with_its_own_kl(batch):
    config = DiffusionLossConfig("mix_grpo", clip_ratio=0.05, ref_kl_coef=0.3)
    want = expected(
        batch, lambda b, k: ppo(delta(batch, b, k), clamped(batch, b), 0.05) + 0.3 * 0.5 * delta(batch, b, k) ** 2
    )
    assert diffusion_loss(config, batch["output"], batch["data"]).loss.item() == pytest.approx(want, rel=1e-12)


def guard_log_ratio(batch, b, k):
    """Eq. 8: S (delta + bias), not the identity that the package uses."""
    std = batch["output"]["std"][b, k].item()
    bias = mean_square(batch["output"]["means"], batch["data"]["old_means"], b, k) / (2 * std**2)
    return std * (delta(batch, b, k) + bias)


@pytest.mark.parametrize("source", ["next_latents", "noise", "log_probs"])
@pytest.mark.parametrize("weighting", ["auto", "uniform", "noise_scale"])
def test_guard(batch, weighting, source):
    data = dict(batch["data"])
    x_next = data.pop("next_latents")
    if source == "next_latents":
        data["next_latents"] = x_next
    elif source == "noise":
        data["noise"] = (x_next - data["old_means"]) / batch["output"]["std"][..., None, None]
    config = DiffusionLossConfig("grpo_guard", clip_ratio=0.004, step_weighting=weighting)
    std, mask = batch["output"]["std"], data["mask"]

    def weight(b, k):
        if weighting == "auto":
            return 1.0 / (data["sigma"][b, k] - data["sigma_next"][b, k]).item()
        if weighting == "noise_scale":
            return (std[b, k] / std[b][mask[b]].mean()).item()
        return 1.0

    want = expected(batch, lambda b, k: weight(b, k) * ppo(guard_log_ratio(batch, b, k), clamped(batch, b), 0.004))
    assert diffusion_loss(config, batch["output"], data).loss.item() == pytest.approx(want, rel=1e-10)


@pytest.mark.parametrize("coefficient", [True, False])
@pytest.mark.parametrize("clamp", [True, False])
def test_flow_dppo(batch, coefficient, clamp):
    threshold = 1e-3
    config = DiffusionLossConfig(
        "flow_dppo", kl_mask_threshold=threshold, add_kl_coefficient=coefficient, dppo_clamp_advantages=clamp
    )

    def element(b, k):
        advantage = clamped(batch, b) if clamp else batch["data"]["advantages"][b].item()
        divergence = mean_square(batch["output"]["means"], batch["data"]["old_means"], b, k) / 2
        divergence /= batch["output"]["std"][b, k].item() ** 2 if coefficient else 1.0
        change = delta(batch, b, k)
        away = (advantage > 0 and change > 0) or (advantage < 0 and change < 0)
        return 0.0 if divergence >= threshold and away else -advantage * math.exp(change)

    out = diffusion_loss(config, batch["output"], batch["data"])
    assert out.loss.item() == pytest.approx(expected(batch, element), rel=1e-12)
    assert 0 < out.metrics["actor/dppo_masked_fraction"] < 1


def test_dppo_boundary_belongs_to_the_mask_in_the_codes_and_not_in_the_paper():
    means = torch.tensor([[1.0]], dtype=torch.float64)
    output = {"log_probs": torch.tensor([0.1]).double(), "means": means, "std": torch.ones(1).double()}
    data = {"old_log_probs": torch.zeros(1).double(), "advantages": torch.ones(1).double(), "old_means": means - 1.0}
    for boundary, want in (("at_or_above", 0.0), ("above", -math.exp(0.1))):  # the divergence is exactly 1/2
        config = DiffusionLossConfig("flow_dppo", kl_mask_threshold=0.5, kl_mask_boundary=boundary)
        assert diffusion_loss(config, output, data).loss.item() == pytest.approx(want, rel=1e-6)


def test_gspo(batch):
    config, mask = DiffusionLossConfig("gspo", clip_ratio=0.01), batch["data"]["mask"]

    def trajectory(b):
        steps = [delta(batch, b, k) for k in range(W) if mask[b, k]]
        return ppo(sum(steps) / len(steps), clamped(batch, b), 0.01)

    want = expected(batch, lambda b, _: trajectory(b))
    assert diffusion_loss(config, batch["output"], batch["data"]).loss.item() == pytest.approx(want, rel=1e-12)


def test_gspo_on_policy_gradient_is_the_per_step_one(batch):
    grads = {}
    for mode in ("gspo", "flow_grpo"):
        log_probs = batch["data"]["old_log_probs"].clone().requires_grad_()
        diffusion_loss(DiffusionLossConfig(mode), {"log_probs": log_probs}, batch["data"]).loss.backward()
        grads[mode] = log_probs.grad
    torch.testing.assert_close(grads["gspo"], grads["flow_grpo"])


def test_step_and_rollout_weights_multiply_the_policy_term_only(batch):
    steps = torch.tensor([0.5, 1.0, 1.5], dtype=torch.float64)
    rollout = 0.5 + draw(B, W, seed=9).abs()
    data = {**batch["data"], "step_weights": steps, "rollout_weights": rollout}
    config = DiffusionLossConfig(clip_ratio=0.05, ref_kl_coef=0.7)

    def element(b, k):
        policy = ppo(delta(batch, b, k), clamped(batch, b), 0.05) * steps[k].item() * rollout[b, k].item()
        return policy + 0.7 * mean_square(batch["output"]["means"], data["ref_means"], b, k) / (
            2 * batch["output"]["std"][b, k].item() ** 2
        )

    out = diffusion_loss(config, batch["output"], data)
    assert out.loss.item() == pytest.approx(expected(batch, element), rel=1e-12)


def test_every_kl_on_means(batch):
    """The main recipe's KL is "std"; the others are it times D, times h, times 2 S^2."""
    out, ref = batch["output"], batch["data"]["ref_means"]
    h = batch["data"]["sigma"] - batch["data"]["sigma_next"]
    for b in range(B):
        for k in range(W):
            square, s = mean_square(out["means"], ref, b, k), out["std"][b, k].item()
            wanted = {
                "std": square / (2 * s * s),
                "paper": math.prod(D) * square / (2 * s * s),
                "flow_grpo": square / (2 * s * s / h[b, k].item()),
                "unscaled": square,
            }
            for kind, want in wanted.items():
                got = mean_kl(out["means"], ref, kind=kind, std=out["std"], step=h, dims=2)[b, k].item()
                assert got == pytest.approx(want, rel=1e-12), kind


def test_velocity_kl_equals_the_kl_on_means_of_flow_sde():
    """mu = x - h [v + s^2 / (2 t) (x + (1 - t) v)] for two velocities, any s: the velocity form must give the same
    nats.
    """
    t, u, s = 0.6, 0.45, 0.9
    h = t - u
    x, v, ref = draw(3, *D, seed=11), draw(3, *D, seed=12), draw(3, *D, seed=13)
    first, second = (x - h * (y + s * s / (2 * t) * (x + (1 - t) * y)) for y in (v, ref))
    std = torch.full((3,), s * math.sqrt(h), dtype=torch.float64)
    for on_velocity, on_mean in (("velocity_paper", "paper"), ("velocity_std", "std")):
        got = velocity_kl(v, ref, kind=on_velocity, std=std, sigma=t, sigma_next=u)
        torch.testing.assert_close(got, mean_kl(first, second, kind=on_mean, std=std))
    square = torch.tensor([mean_square(v.unsqueeze(1), ref.unsqueeze(1), b, 0) for b in range(3)])
    torch.testing.assert_close(velocity_kl(v, ref), square.double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("form", ["adaptive", "theorem"])
@pytest.mark.parametrize("adv_mode", ["all", "positive_only", "negative_only", "one_only", "binary"])
def test_nft(form, adv_mode):
    beta, floor, limit = 0.3, 1e-5, 5.0
    x0, noise, v, old, ref = (draw(B, *D, seed=20 + i) for i in range(5))
    v, ref = old + 0.1 * v, old + 0.1 * ref
    sigma = torch.tensor([0.1, 0.4, 0.8, 0.95], dtype=torch.float64)
    advantages = torch.tensor([1.5, -2.0, 7.0, 0.0], dtype=torch.float64)
    config = DiffusionLossConfig(
        "diffusion_nft", mix_beta=beta, nft_form=form, adv_mode=adv_mode, ref_kl_coef=0.2, adaptive_weight_min=floor
    )
    data = {
        "x0": x0,
        "noise": noise,
        "sigma": sigma,
        "advantages": advantages,
        "old_velocity": old,
        "ref_velocity": ref,
    }
    total = 0.0
    for b in range(B):
        a = min(max(advantages[b].item(), -limit), limit)
        a = {
            "all": a,
            "positive_only": max(a, 0.0),
            "negative_only": min(a, 0.0),
            "one_only": 1.0 if a > 0 else 0.0,
            "binary": float((a > 0) - (a < 0)),
        }[adv_mode]
        r, t = a / (2 * limit) + 0.5, sigma[b].item()
        plus, minus, kl = [], [], []
        for c, e, w, o, q in zip(*(flat(z, b) for z in (x0, noise, v, old, ref)), strict=True):
            x_t = (1 - t) * c + t * e
            plus.append(x_t - t * (beta * w + (1 - beta) * o) - c)
            minus.append(x_t - t * ((1 + beta) * o - beta * w) - c)
            kl.append((w - q) ** 2)
        n = len(plus)
        p, m = (sum(g * g for g in gap) / n for gap in (plus, minus))
        if form == "adaptive":
            p /= max(sum(abs(g) for g in plus) / n, floor)
            m /= max(sum(abs(g) for g in minus) / n, floor)
        mixed = r * p + (1 - r) * m
        total += (mixed * limit / beta if form == "adaptive" else mixed) + 0.2 * sum(kl) / n
    assert diffusion_loss(config, {"velocity": v}, data).loss.item() == pytest.approx(total / B, rel=1e-10)


def test_nft_theorem_optimum():
    """At v* = v_old + (2 / beta) Delta, Delta = E[r v] - E[r] v_old, the unweighted loss is stationary (two samples,
    one x_t).
    """
    beta, t = 0.5, 0.7
    targets, r = torch.tensor([[1.0], [-0.5]]).double(), torch.tensor([0.9, 0.2]).double()
    old = targets.mean(0, keepdim=True)  # the old policy has fitted its own samples
    delta_v = (r.unsqueeze(1) * targets).mean(0) - r.mean() * old
    best = (old + (2.0 / beta) * delta_v).requires_grad_()
    x_t = torch.zeros(2, 1).double()
    x0 = x_t - t * targets
    data = {
        "x0": x0,
        "x_t": x_t,
        "sigma": torch.full((2,), t, dtype=torch.float64),
        "advantages": (r - 0.5) * 10.0,
        "old_velocity": old.expand(2, 1),
    }
    config = DiffusionLossConfig("diffusion_nft", mix_beta=beta, nft_form="theorem")
    diffusion_loss(config, {"velocity": best.expand(2, 1)}, data).loss.backward()
    assert best.grad.abs().max() < 1e-12


@pytest.mark.parametrize("kind", ["sigmoid", "ipo", "hinge"])
def test_dpo(kind):
    beta = 3.0
    x0, noise, v, ref = (draw(4, *D, seed=40 + i) for i in range(4))
    config = DiffusionLossConfig("dpo", dpo_beta=beta, dpo_loss=kind)

    def error(velocity, row):
        pairs = zip(flat(velocity, row), flat(noise, row), flat(x0, row), strict=True)
        return sum((w - (e - c)) ** 2 for w, e, c in pairs) / math.prod(D)

    total = 0.0
    for win, lose in ((0, 1), (2, 3)):
        margin = -0.5 * ((error(v, win) - error(ref, win)) - (error(v, lose) - error(ref, lose)))
        total += {
            "sigmoid": math.log(1 + math.exp(-beta * margin)),
            "ipo": (margin - 1 / (2 * beta)) ** 2,
            "hinge": max(0.0, 1 - beta * margin),
        }[kind]
    got = diffusion_loss(config, {"velocity": v}, {"x0": x0, "noise": noise, "ref_velocity": ref}).loss.item()
    assert got == pytest.approx(total / 2, rel=1e-10)


@pytest.mark.parametrize("weighting", ["uniform", "t", "t2", "huber", "ghuber"])
@pytest.mark.parametrize("scale", ["raw", "unit"])
@pytest.mark.parametrize("level", ["step", "trajectory"])
def test_awm(weighting, scale, level):
    clip, power = 0.02, 0.25
    x0, noise, v, old = draw(B, *D, seed=50), draw(B, W, *D, seed=51), draw(B, W, *D, seed=52), draw(B, W, *D, seed=53)
    v = old + 0.05 * v
    sigma = 0.05 + 0.9 * draw(B, W, seed=54).sigmoid()
    advantages = torch.tensor([1.5, -2.0, 7.0, -0.3], dtype=torch.float64)

    def likelihood(velocity, b, k):
        rows = zip(flat(velocity, b, k), flat(noise, b, k), flat(x0, b), strict=True)
        q, t = sum((w - (e - c)) ** 2 for w, e, c in rows) / math.prod(D), sigma[b, k].item()
        return {
            "uniform": -q,
            "t": -q * t,
            "t2": -q * t * t,
            "huber": -(math.sqrt(q + 1e-10) - 1e-5) * t,
            "ghuber": -((q + 1e-10) ** power - 1e-10**power) * t / power,
        }[weighting]

    total = 0.0
    for b in range(B):
        change = [likelihood(v, b, k) - likelihood(old, b, k) for k in range(W)]
        if level == "trajectory":
            change = [sum(change) / W] * W
        a = min(max(advantages[b].item(), -5.0), 5.0) / (5.0 if scale == "unit" else 1.0)
        total += sum(ppo(c, a, clip) for c in change)
    config = DiffusionLossConfig(
        "awm", clip_ratio=clip, awm_weighting=weighting, awm_advantage=scale, awm_ratio=level, awm_power=power
    )
    data = {"x0": x0, "noise": noise, "sigma": sigma, "advantages": advantages, "old_velocity": old}
    assert diffusion_loss(config, {"velocity": v}, data).loss.item() == pytest.approx(total / (B * W), rel=1e-10)
    lag = draw(B, W, *D, seed=55)
    pulled = replace(config, lag_kl_coef=0.7)
    away = sum((x - y) ** 2 for x, y in zip(v.flatten().tolist(), lag.flatten().tolist(), strict=True)) / v.numel()
    out = diffusion_loss(pulled, {"velocity": v}, {**data, "lag_velocity": lag})
    assert out.loss.item() == pytest.approx(total / (B * W) + 0.7 * away, rel=1e-10)
    assert out.metrics["actor/lag_kl"].item() == pytest.approx(away, rel=1e-6)
