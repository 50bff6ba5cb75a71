"""Advantages and decay schedules against reference vectors."""

from __future__ import annotations

import pytest
import torch
from diffusion_losses import (
    combined_advantages,
    group_advantages,
    make_pairs,
    old_policy_decay,
    optimality_probability,
)

close = torch.testing.assert_close


def pair_advantages(rewards, groups, ties):
    """flow_grpo's `dpo` advantages: +1 for the best, -1 for the worst and 0 for the other samples of each group."""
    pairs, advantages = make_pairs(rewards, groups, ties=ties), torch.zeros_like(rewards)
    advantages[pairs.winner], advantages[pairs.loser] = 1.0, -1.0
    return advantages, pairs.metrics


@pytest.mark.golden("advantages", "fgstat.")
def test_flow_grpo_tracker(vector):
    rewards, groups, params = vector.given["reward"], vector.given["group"], vector.params
    kind = params["type"]
    if kind == "dpo":
        advantages, _ = pair_advantages(rewards, groups, ties="keep")
    elif kind == "rwr":
        advantages = group_advantages(rewards, groups, mean="none", std="none").advantages
    else:
        std = "batch" if params["global_std"] else "group"
        columns = rewards.reshape(len(rewards), -1).unbind(dim=1)  # of [B, T] rewards, each on its own
        each = [group_advantages(column, groups, std=std, ddof=0, eps=params["eps"]).advantages for column in columns]
        advantages = torch.stack(each, dim=1).reshape(rewards.shape)
    close(advantages, vector.want["advantage"], rtol=1e-10, atol=1e-10)


def test_flow_grpo_dpo_ties_are_skipped_by_default(vectors):
    vector = vectors["advantages", "fgstat.dpo.global0"]
    rewards, groups = vector.given["reward"], vector.given["group"]
    advantages, metrics = pair_advantages(rewards, groups, ties="skip")
    tied = groups == 2
    assert (rewards[tied] == 0.5).all()
    assert (advantages[tied] == 0).all()
    close(advantages[~tied], vector.want["advantage"][~tied])
    assert metrics["pairs/tied_pairs"] == 1


@pytest.mark.golden("advantages", "verl_nft.")
def test_verl_group_advantages(vector):
    params = vector.params
    std = "batch" if params["global_std"] else "group"
    result = group_advantages(
        vector.given["reward"], vector.given["group"], std=std, ddof=params["ddof"], eps=params["eps"]
    )
    close(result.advantages.float(), vector.want["advantage"], rtol=1e-5, atol=1e-6)
    close(optimality_probability(result.advantages).float(), vector.want["reward_prob"], rtol=1e-6, atol=1e-6)


@pytest.mark.golden("advantages", "ff.")
def test_flow_factory_advantages(vector):
    given, params = vector.given, vector.params
    global_std = params.get("global_std", False)
    result = combined_advantages(
        {"a": given["reward_a"], "b": given["reward_b"]},
        given["group"],
        weights=params["weights"],
        method="gdpo" if "gdpo" in vector.case else "sum",
        std="batch" if global_std else "group",
        ddof=params["ddof"],
        eps=params["std_floor"],
        eps_kind="floor",
    )
    close(result.advantages, vector.want["advantage"], rtol=1e-8, atol=1e-8)


@pytest.mark.golden("advantages", "dance.group")
def test_dance_advantages(vector):
    params, rewards = vector.params, vector.given["reward"]
    size = params["num_generations"]
    scope = "group" if params["use_group"] else "batch"
    groups = [row // size for row in range(rewards.numel())]
    result = group_advantages(rewards, groups, mean=scope, std=scope, ddof=params["ddof"], eps=params["eps"])
    close(result.advantages, vector.want["advantage"], rtol=1e-5, atol=2e-6)


@pytest.mark.golden("advantages", "nft.decay")
def test_nft_decay(vector):
    published = {0: (0, 0.0, 0.0), 1: (0, 0.001, 0.5), 2: (75, 0.0075, 0.999)}  # start, rate, largest
    for kind in vector.params["types"]:
        ours = [old_policy_decay(int(step), *published[kind]) for step in vector.given["step"]]
        close(torch.tensor(ours, dtype=torch.float64), vector.want[f"type{kind}"], rtol=0, atol=1e-12)


def test_every_reference_vector_has_a_test(vectors):
    prefixes = {
        "loss_grpo": ("flowgrpo.", "dancegrpo.", "mixgrpo.", "kl."),
        "loss_guard_dppo": ("guard.", "dppo."),
        "loss_nft": ("",),
        "loss_dpo": ("",),
        "loss_awm": ("",),
        "advantages": ("fgstat.", "verl_nft.", "ff.", "dance.group", "nft.decay"),
    }
    missed = [key for key in vectors if not key[1].startswith(prefixes[key[0]])]
    assert not missed
    assert len(vectors) == 91
