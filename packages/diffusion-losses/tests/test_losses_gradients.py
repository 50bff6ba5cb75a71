"""Gradients against central differences in float64, for every mode, and the places where a gradient must or must not
be zero.
"""

from __future__ import annotations

import pytest
import torch
from diffusion_losses import DiffusionLossConfig, LossError, clipped_surrogate, diffusion_loss, mean_kl, velocity_kl

B, W, D = 3, 2, (2, 2)
POLICY = {
    "flow_grpo": {},
    "dance_grpo": {"ref_kl_coef": 0.3, "kl_kind": "paper"},
    "mix_grpo": {"ref_kl_coef": 0.3},
    "grpo_guard": {"ref_kl_coef": 0.3, "kl_kind": "flow_grpo"},
    "flow_dppo": {"kl_mask_threshold": 1e-3, "ref_kl_coef": 0.3, "kl_kind": "unscaled"},
    "gspo": {"ref_kl_coef": 0.3, "kl_kind": "std"},
}
VELOCITY_KLS = ("velocity", "velocity_std", "velocity_paper")
FORWARD = {
    "nft_theorem": {"loss_mode": "diffusion_nft", "nft_form": "theorem", "ref_kl_coef": 0.3},
    "dpo": {"loss_mode": "dpo", "dpo_beta": 2.0, "ref_kl_coef": 0.3},
    "ipo": {"loss_mode": "dpo", "dpo_beta": 2.0, "dpo_loss": "ipo"},
    "hinge": {"loss_mode": "dpo", "dpo_beta": 0.5, "dpo_loss": "hinge"},
    **{
        f"awm_{name}": {"loss_mode": "awm", "clip_ratio": 0.05, "awm_weighting": name, "ref_kl_coef": 0.3}
        for name in ("uniform", "t", "t2", "huber", "ghuber")
    },
    "sft": {"loss_mode": "sft", "ref_kl_coef": 0.3},
    "awm_trajectory": {"loss_mode": "awm", "clip_ratio": 0.05, "awm_ratio": "trajectory"},
}


def draw(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def central_difference(function, point, step=1e-6):
    grad = torch.zeros_like(point)
    flat_point, flat_grad = point.reshape(-1), grad.reshape(-1)
    for i in range(flat_point.numel()):
        saved = flat_point[i].item()
        flat_point[i] = saved + step
        up = function(point).item()
        flat_point[i] = saved - step
        down = function(point).item()
        flat_point[i] = saved
        flat_grad[i] = (up - down) / (2 * step)
    return grad


def assert_gradient(function, point):
    leaf = point.clone().requires_grad_()
    function(leaf).backward()
    with torch.no_grad():
        numeric = central_difference(function, point.clone())
    torch.testing.assert_close(leaf.grad, numeric, rtol=2e-6, atol=2e-8)
    assert numeric.abs().max() > 0
    return leaf.grad


def trajectory():
    std = 0.3 + draw(B, W, seed=1).abs()
    old_means = draw(B, W, *D, seed=2)
    x_next = old_means + std[..., None, None] * draw(B, W, *D, seed=3)

    def output(means):
        z = (x_next - means) / std[..., None, None]
        return {"log_probs": (-0.5 * z * z).flatten(2).mean(2), "means": means, "std": std, "velocity": 2.0 * means}

    data = {
        "old_log_probs": output(old_means)["log_probs"],
        "old_means": old_means,
        "next_latents": x_next,
        "advantages": torch.tensor([1.5, -2.0, 0.7], dtype=torch.float64),
        "sigma": torch.tensor([0.9, 0.6], dtype=torch.float64).expand(B, W),
        "sigma_next": torch.tensor([0.6, 0.2], dtype=torch.float64).expand(B, W),
        "ref_means": old_means + 0.2 * draw(B, W, *D, seed=4),
        "ref_velocity": old_means + 0.2 * draw(B, W, *D, seed=5),
    }
    return output, data, old_means + 0.03 * draw(B, W, *D, seed=6)


@pytest.mark.parametrize("mode", POLICY)
def test_policy_gradients(mode):
    output, data, means = trajectory()
    config = DiffusionLossConfig(mode, clip_ratio=0.01, **POLICY[mode])
    assert_gradient(lambda point: diffusion_loss(config, output(point), data).loss, means)


@pytest.mark.parametrize("mode", ["grpo_guard"])
def test_guard_gradient_from_log_probs_is_that_of_the_identity(mode):
    output, data, means = trajectory()
    config = DiffusionLossConfig(mode, clip_ratio=0.01)
    identity = assert_gradient(lambda point: diffusion_loss(config, output(point), data).loss, means)
    bare = {key: value for key, value in data.items() if key != "next_latents"}
    written = assert_gradient(lambda point: diffusion_loss(config, output(point), bare).loss, means)
    torch.testing.assert_close(identity, written)


@pytest.mark.parametrize("kind", VELOCITY_KLS)
def test_velocity_kl_gradients(kind):
    output, data, means = trajectory()
    config = DiffusionLossConfig(clip_ratio=0.01, ref_kl_coef=0.3, kl_kind=kind)
    assert_gradient(lambda point: diffusion_loss(config, output(point), data).loss, means)


@pytest.mark.parametrize("name", FORWARD)
def test_forward_process_gradients(name):
    n = 4
    config = DiffusionLossConfig(**FORWARD[name])
    old = draw(n, W, *D, seed=10)
    data = {
        "x0": draw(n, *D, seed=11),
        "noise": draw(n, W, *D, seed=12),
        "sigma": 0.1 + 0.8 * draw(n, W, seed=13).sigmoid(),
        "advantages": torch.tensor([1.5, -2.0, 0.7, 0.2], dtype=torch.float64),
        "old_velocity": old,
        "ref_velocity": old + 0.1 * draw(n, W, *D, seed=14),
    }
    assert_gradient(
        lambda point: diffusion_loss(config, {"velocity": point}, data).loss, old + 0.05 * draw(n, W, *D, seed=15)
    )


def test_nft_adaptive_gradient_treats_the_weights_as_constants():
    """Differences of the loss see the weights move; so freeze them at the point and differentiate that."""
    config = DiffusionLossConfig("diffusion_nft", mix_beta=0.4)
    old, x0, x_t = draw(B, *D, seed=20), draw(B, *D, seed=21), draw(B, *D, seed=22)
    sigma, advantages = torch.tensor([0.2, 0.5, 0.9]).double(), torch.tensor([1.0, -2.0, 4.0]).double()
    velocity = old + 0.1 * draw(B, *D, seed=23)
    data = {"x0": x0, "x_t": x_t, "sigma": sigma, "advantages": advantages, "old_velocity": old}
    leaf = velocity.clone().requires_grad_()
    diffusion_loss(config, {"velocity": leaf}, data).loss.backward()

    def gaps(v):
        mixtures = (0.4 * v + 0.6 * old, 1.4 * old - 0.4 * v)
        return [x_t - sigma[:, None, None] * m - x0 for m in mixtures]

    frozen = [gap.abs().flatten(1).mean(1) for gap in gaps(velocity)]
    r = advantages / 10 + 0.5

    def surrogate(v):
        p, q = (gap.square().flatten(1).mean(1) / w for gap, w in zip(gaps(v), frozen, strict=True))
        return ((r * p + (1 - r) * q) * 5 / 0.4).mean()

    torch.testing.assert_close(leaf.grad, central_difference(surrogate, velocity.clone()), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", ["std", "paper", "flow_grpo", "unscaled", *VELOCITY_KLS])
def test_the_kl_alone_has_a_gradient(kind):
    output, data, means = trajectory()
    data = {**data, "advantages": torch.zeros(B, dtype=torch.float64)}
    leaf = means.clone().requires_grad_()
    diffusion_loss(DiffusionLossConfig(ref_kl_coef=0.5, kl_kind=kind), output(leaf), data).loss.backward()
    assert (leaf.grad.abs() > 0).all()


def test_data_never_receives_a_gradient():
    output, data, means = trajectory()
    data = {key: value.clone().requires_grad_() for key, value in data.items()}
    leaf = means.clone().requires_grad_()
    for mode in POLICY:
        config = DiffusionLossConfig(mode, ref_kl_coef=0.5, kl_kind="std")
        diffusion_loss(config, output(leaf), data).loss.backward()
    assert all(value.grad is None for value in data.values())


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "zero"),
    [(0.1, 1.0, True), (0.1, -1.0, False), (-0.1, 1.0, False), (-0.1, -1.0, True), (0.0, 1.0, False)],
)
def test_clip_cuts_the_gradient_on_one_side_only(log_ratio, advantage, zero):
    leaf = torch.tensor([log_ratio], dtype=torch.float64, requires_grad=True)
    data = {"old_log_probs": torch.zeros(1).double(), "advantages": torch.tensor([advantage]).double()}
    diffusion_loss(DiffusionLossConfig(clip_ratio=0.05), {"log_probs": leaf}, data).loss.backward()
    want = 0.0 if zero else -advantage * torch.tensor(log_ratio).exp().item()
    assert leaf.grad.item() == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("space", ["log_ratio", "ratio"])
@pytest.mark.parametrize("clip", [1e-3, 0.2])
def test_the_clip_lies_exactly_at_one_plus_minus_epsilon(space, clip):
    for bound, sign in ((1.0 - clip, -1.0), (1.0 + clip, 1.0)):
        for offset, cut in ((-1e-9, False), (1e-9, True)):
            leaf = torch.tensor([bound + sign * offset], dtype=torch.float64).log().requires_grad_()
            advantage = torch.tensor([sign], dtype=torch.float64)
            clipped_surrogate(leaf, advantage, clip, space=space).sum().backward()
            assert (leaf.grad == 0).all() == cut


def test_the_reference_of_a_kl_is_a_constant():
    for function, kind in ((mean_kl, "std"), (mean_kl, "unscaled"), (velocity_kl, "velocity")):
        policy, reference = (draw(2, 3, seed=i).requires_grad_() for i in (30, 31))
        scale = {} if function is velocity_kl else {"std": 1.0}
        function(policy, reference, kind=kind, **scale).sum().backward()
        assert policy.grad.abs().min() > 0
        assert reference.grad is None


def test_guard_keeps_the_whole_gradient_where_fp32_ratios_tie():
    """exp(1.99e-6) and 1 + 2e-6 are the same fp32 number; max() would halve the gradient there."""
    move = torch.tensor([[1.99e-6]], requires_grad=True)
    output = {"log_probs": move.sum(1), "means": move, "std": torch.ones(1)}
    data = {"old_log_probs": torch.zeros(1), "old_means": torch.zeros(1, 1), "noise": torch.ones(1, 1)}
    data |= {"advantages": torch.ones(1), "sigma": torch.ones(1), "sigma_next": torch.zeros(1)}
    config = DiffusionLossConfig("grpo_guard", clip_ratio=2e-6)
    grads = torch.autograd.grad(diffusion_loss(config, output, data).loss, move)
    assert grads[0].item() == pytest.approx(-1.0, rel=1e-5)
    output["means"] = torch.tensor([[2.01e-6]], requires_grad=True)
    assert torch.autograd.grad(diffusion_loss(config, output, data).loss, output["means"])[0].item() == 0.0


def test_a_huge_ratio_gives_no_nan():
    leaf = torch.tensor([200.0, 200.0, -200.0], requires_grad=True)
    data = {"old_log_probs": torch.zeros(3), "advantages": torch.tensor([1.0, -1.0, 1.0])}
    loss = diffusion_loss(DiffusionLossConfig(), {"log_probs": leaf}, data).loss
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(leaf.grad).all()


def test_detached_means_are_refused():
    output, data, means = trajectory()
    leaf = means.clone().requires_grad_()
    built = output(leaf)
    built["means"] = built["means"].detach()
    with pytest.raises(LossError, match="carries no gradient"):
        diffusion_loss(DiffusionLossConfig("grpo_guard"), built, data)
