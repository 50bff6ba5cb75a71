"""A 2-D flow policy learns a rule with every loss family.

Data are N(0, 1/4) in the plane, for which the exact velocity is known in closed form; the policy is that velocity
plus a small network whose last layer is zero, so it starts as an exact sampler. Four prompts ask for four corners;
the reward is minus the distance to the corner. The sampler is Flow-SDE with a deterministic last step, written out
here: this package knows no sampler.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
from diffusion_losses import (
    DiffusionLossConfig,
    combined_advantages,
    diffusion_loss,
    group_advantages,
    make_pairs,
    old_policy_decay,
)
from torch import nn

CORNERS = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
SIGMAS = torch.linspace(1.0, 0.0, 7)
NOISE_LEVEL, GROUP, DATA_VAR = 0.7, 16, 0.25


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(7, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 2))
        nn.init.zeros_(self.net[-1].weight)
        nn.init.zeros_(self.net[-1].bias)

    def forward(self, x, sigma, prompt):
        t = sigma.reshape(-1, 1)
        exact = (t - (1 - t) * DATA_VAR) / ((1 - t) ** 2 * DATA_VAR + t * t) * x
        hot = nn.functional.one_hot(prompt, 4).to(x)
        return exact + self.net(torch.cat([x, t, hot], dim=1))


def transition(policy, x, index, prompt):
    """Mean and total std of one Flow-SDE step for rows with their own step numbers."""
    t, u = SIGMAS[index], SIGMAS[index + 1]
    h = (t - u).unsqueeze(1)
    s = NOISE_LEVEL * (t / (1 - torch.where(index == 0, SIGMAS[1], t))).sqrt().unsqueeze(1)
    v = policy(x, t, prompt)
    tt = t.unsqueeze(1)
    mean = x - h * (v + s * s / (2 * tt) * (x + (1 - tt) * v))
    return mean, (s * h.sqrt()).squeeze(1)


def log_prob(x_next, mean, std):
    z = (x_next - mean) / std.unsqueeze(1)
    return (-0.5 * z * z - std.log().unsqueeze(1) - 0.5 * math.log(2 * math.pi)).mean(1)


@torch.no_grad()
def rollout(policy, prompt, generator, stochastic=True):
    """Clean samples [B, 2] and, for the stochastic steps, x, x_next, mean, std and log-prob stacked as [B, W, ...]."""
    x = torch.randn(len(prompt), 2, generator=generator)
    kept = []
    for k in range(len(SIGMAS) - 1):
        index = torch.full_like(prompt, k)
        if stochastic and k < len(SIGMAS) - 2:
            mean, std = transition(policy, x, index, prompt)
            x_next = mean + std.unsqueeze(1) * torch.randn(x.shape, generator=generator)
            kept.append((x, x_next, mean, std, log_prob(x_next, mean, std)))
            x = x_next
        else:
            x = x - (SIGMAS[k] - SIGMAS[k + 1]) * policy(x, SIGMAS[index], prompt)
    return x, [torch.stack(parts, dim=1) for parts in zip(*kept, strict=True)] if kept else None


def reward(x, prompt):
    return -(x - CORNERS[prompt]).norm(dim=1)


def evaluate(policy):
    """Rewards of 512 deterministic samples with fixed noise."""
    prompt = torch.arange(512) % 4
    x, _ = rollout(policy, prompt, torch.Generator().manual_seed(99), stochastic=False)
    return reward(x, prompt)


def groups_of(prompt):
    return [f"prompt-{int(p)}-{i // GROUP}" for i, p in enumerate(prompt)]


def near_corner(final, prompt):
    return group_advantages(reward(final, prompt), groups_of(prompt)).advantages


def learn_policy_gradient(config, policy, generator, iterations, lr, sign=1.0, judge=near_corner):
    """Returns the largest share of steps that the trust region held back in any update."""
    held_back = 0.0
    optimizer = torch.optim.Adam(policy.parameters(), lr=lr)
    prompt = torch.arange(4).repeat_interleave(GROUP)
    for _ in range(iterations):
        final, (x, x_next, means, std, old) = rollout(policy, prompt, generator)
        advantages = sign * judge(final, prompt)
        b, w = old.shape
        index = torch.arange(w).expand(b, w)
        data = {"old_log_probs": old, "old_means": means, "next_latents": x_next, "advantages": advantages}
        data |= {"sigma": SIGMAS[index], "sigma_next": SIGMAS[index + 1]}
        for _ in range(3):
            mean, _ = transition(policy, x.reshape(-1, 2), index.flatten(), prompt.repeat_interleave(w))
            score = log_prob(x_next.reshape(-1, 2), mean, std.flatten())
            output = {"log_probs": score.reshape(b, w), "means": mean.reshape(b, w, 2), "std": std}
            optimizer.zero_grad()
            loss, metrics = (out := diffusion_loss(config, output, data)).loss, out.metrics
            loss.backward()
            optimizer.step()
            for name in ("actor/pg_clipfrac", "actor/dppo_masked_fraction"):
                held_back = max(held_back, float(metrics.get(name, 0.0)))
    return held_back


def learn_forward_process(config, policy, generator, iterations, lr):
    optimizer = torch.optim.Adam(policy.parameters(), lr=lr)
    prompt = torch.arange(4).repeat_interleave(GROUP)
    old, reference, steps = copy.deepcopy(policy), copy.deepcopy(policy), 0
    for iteration in range(iterations):
        x0, _ = rollout(old, prompt, generator, stochastic=False)
        rewards, rows = reward(x0, prompt), torch.arange(len(prompt))
        if config.loss_mode == "dpo":
            if iteration % 10 == 0:
                reference.load_state_dict(policy.state_dict())
            rows = make_pairs(rewards, groups_of(prompt), mode="all", margin=0.3).interleaved()
        advantages = group_advantages(rewards, groups_of(prompt)).advantages[rows]
        for _ in range(3):
            noise = torch.randn(x0.shape, generator=generator)[rows]
            sigma = 0.05 + 0.9 * torch.rand(len(rows), generator=generator)
            if config.loss_mode == "dpo":  # winner and loser share noise and level
                noise, sigma = noise[0::2].repeat_interleave(2, 0), sigma[0::2].repeat_interleave(2, 0)
            clean, asked = x0[rows], prompt[rows]
            x_t = (1 - sigma).unsqueeze(1) * clean + sigma.unsqueeze(1) * noise
            with torch.no_grad():
                old_velocity, ref_velocity = old(x_t, sigma, asked), reference(x_t, sigma, asked)
            data = {"x0": clean, "noise": noise, "sigma": sigma, "advantages": advantages}
            data |= {"old_velocity": old_velocity, "ref_velocity": ref_velocity}
            optimizer.zero_grad()
            diffusion_loss(config, {"velocity": policy(x_t, sigma, asked)}, data).loss.backward()
            optimizer.step()
            steps += 1
        decay = old_policy_decay(steps, 0, 0.001, 0.5) if config.loss_mode == "diffusion_nft" else 0.0
        with torch.no_grad():
            for mine, theirs in zip(old.parameters(), policy.parameters(), strict=True):
                mine.lerp_(theirs, 1.0 - decay)


RECIPES = {
    "flow_grpo": (DiffusionLossConfig("flow_grpo", clip_ratio=0.05), learn_policy_gradient, 25, 3e-3),
    "grpo_guard": (DiffusionLossConfig("grpo_guard", clip_ratio=0.05), learn_policy_gradient, 25, 3e-3),
    "flow_dppo": (DiffusionLossConfig("flow_dppo", kl_mask_threshold=2e-3), learn_policy_gradient, 25, 3e-3),
    "diffusion_nft": (DiffusionLossConfig("diffusion_nft", mix_beta=1.0), learn_forward_process, 30, 3e-3),
    "dpo": (DiffusionLossConfig("dpo", dpo_beta=10.0), learn_forward_process, 30, 3e-3),
    "awm": (DiffusionLossConfig("awm", clip_ratio=0.5), learn_forward_process, 30, 3e-3),
}


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", RECIPES)
def test_the_toy_policy_learns(name, seed):
    torch.manual_seed(seed)
    config, learn, iterations, lr = RECIPES[name]
    policy = Policy()
    before = evaluate(policy)
    held_back = learn(config, policy, torch.Generator().manual_seed(1000 + seed), iterations, lr)
    gain = evaluate(policy) - before  # same noise before and after: paired
    z = gain.mean() / (gain.std() / math.sqrt(gain.numel()))
    print(f"{name} seed {seed}: {before.mean():.3f} -> {(before + gain).mean():.3f}, z = {z:.1f}, held {held_back}")
    assert before.mean() < -1.2
    assert gain.mean() > 0.3
    assert z > 10
    if config.family == "policy_gradient":
        assert held_back > 0.02  # clip and mask took part


def test_the_wrong_sign_unlearns():
    """The control: the same loop on negated advantages makes the reward fall."""
    torch.manual_seed(0)
    policy = Policy()
    before = evaluate(policy)
    config, _, iterations, lr = RECIPES["flow_grpo"]
    learn_policy_gradient(config, policy, torch.Generator().manual_seed(1000), iterations, lr, sign=-1.0)
    assert (evaluate(policy) - before).mean() < -0.1


def test_gdpo_raises_two_rewards_of_different_scale_and_their_sum_only_the_large_one():
    """Close to a corner from the side counts a thousandth of close to it from above or below."""

    def two(x, prompt):
        away = (x - CORNERS[prompt]).abs()
        return {"small": -away[:, 0], "large": -1000 * away[:, 1]}

    def gains(method):
        torch.manual_seed(0)
        policy, prompt = Policy(), torch.arange(512) % 4
        noise = torch.Generator().manual_seed(99)
        before = two(rollout(policy, prompt, noise, stochastic=False)[0], prompt)

        def judge(final, asked):
            return combined_advantages(two(final, asked), groups_of(asked), method=method).advantages

        config, _, iterations, lr = RECIPES["flow_grpo"]
        learn_policy_gradient(config, policy, torch.Generator().manual_seed(1000), iterations, lr, judge=judge)
        after = two(rollout(policy, prompt, noise.manual_seed(99), stochastic=False)[0], prompt)
        return {name: float((after[name] - before[name]).mean()) for name in before}

    summed, fair = gains("sum"), gains("gdpo")
    print(summed, fair)
    assert fair["small"] > 0.15
    assert fair["large"] > 150
    assert summed["large"] > 150
    assert summed["small"] < 0.3 * fair["small"]
