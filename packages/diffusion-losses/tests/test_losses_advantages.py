"""Advantages: second derivations, degenerate groups, several rewards, pairs, decay."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from diffusion_losses import (
    LossError,
    combined_advantages,
    group_advantages,
    make_pairs,
    old_policy_decay,
)

close = torch.testing.assert_close
NAN, INF = float("nan"), float("inf")


def rewards_and_groups(n=24, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(n, generator=generator, dtype=torch.float64)
    groups = [f"uid-{int(i)}" for i in torch.randint(0, 5, (n,), generator=generator)]
    return rewards, groups


@pytest.mark.parametrize("std", ["group", "batch", "none"])
@pytest.mark.parametrize("mean", ["group", "batch", "none"])
@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize(("eps", "eps_kind"), [(1e-4, "add"), (0.9, "floor")])
def test_every_reading_against_the_statistics_module(std, mean, ddof, eps, eps_kind):
    rewards, groups = rewards_and_groups()
    spread = statistics.stdev if ddof else statistics.pstdev
    values = rewards.tolist()
    members = {g: [r for r, o in zip(values, groups, strict=True) if o == g] for g in groups}
    want = []
    for r, g in zip(values, groups, strict=True):
        centre = {"group": statistics.mean(members[g]), "batch": statistics.mean(values), "none": 0.0}[mean]
        if std == "none":
            want.append(r - centre)
            continue
        scale = spread(members[g] if std == "group" else values)
        want.append((r - centre) / (scale + eps if eps_kind == "add" else max(scale, eps)))
    out = group_advantages(rewards, groups, std=std, mean=mean, ddof=ddof, eps=eps, eps_kind=eps_kind)
    close(out.advantages, torch.tensor(want, dtype=torch.float64))
    assert out.mask.all()


def test_degenerate_groups_are_defined_masked_and_counted():
    rewards = torch.tensor([1.0, 3.0, 0.1, 0.1, 0.1, 5.0, NAN, 2.0, 4.0, INF])
    groups = ["a", "a", "equal", "equal", "equal", "alone", "b", "b", "b", "gone"]
    for std in ("group", "batch"):
        out = group_advantages(rewards, groups, std=std)
        assert out.mask.tolist() == [True, True, False, False, False, False, False, True, True, False]
        assert torch.isfinite(out.advantages).all()
        assert (out.advantages[~out.mask] == 0).all()
        assert out.metrics["advantages/nonfinite"] == 2
        assert out.metrics["advantages/singleton_groups"] == 1
        assert out.metrics["advantages/equal_groups"] == 1
        assert out.metrics["advantages/groups"] == 5
        assert out.metrics["advantages/masked"] == 6
    out = group_advantages(rewards, groups, eps=0.0)
    close(out.advantages[:2], torch.tensor([-1.0, 1.0]) / math.sqrt(2.0))


def test_equal_rewards_are_zero_exactly_for_any_eps():
    """0.1 summed six times is not 0.6: a mean that is off in the last digit over eps=0 would be anything."""
    out = group_advantages(torch.full((6,), 0.1, dtype=torch.float64), ["g"] * 6, eps=0.0)
    assert (out.advantages == 0).all()
    assert not out.mask.any()


def test_nothing_finite_at_all():
    out = group_advantages([NAN, NAN], ["a", "a"], std="batch")
    assert (out.advantages == 0).all()
    assert out.metrics["advantages/std"] == 0


def test_equal_prompts_with_different_ids_are_different_groups_and_order_does_not_matter():
    rewards, groups = rewards_and_groups()
    order = torch.randperm(24, generator=torch.Generator().manual_seed(1))
    shuffled = group_advantages(rewards[order], [groups[i] for i in order])
    close(shuffled.advantages, group_advantages(rewards, groups).advantages[order])
    ids = torch.tensor([hash(g) % 1000 for g in groups])
    close(group_advantages(rewards, ids).advantages, group_advantages(rewards, groups).advantages)


def test_clip_and_dtype():
    rewards, groups = rewards_and_groups()
    out = group_advantages(rewards.float(), groups, clip=0.5)
    assert out.advantages.dtype == torch.float32
    assert out.advantages.abs().max() == 0.5


def three_rewards():
    a, groups = rewards_and_groups(seed=1)
    b, _ = rewards_and_groups(seed=2)
    return {"a": a, "wide": 1000.0 * b, "flat": torch.zeros(24)}, groups


def test_gdpo_and_mixgrpo_against_a_second_derivation():
    components, groups = three_rewards()
    weights = {"a": 2.0, "wide": 0.5}
    for method in ("gdpo", "decoupled"):
        total = [0.0] * 24
        for name, values in components.items():
            for g in set(groups):
                rows = [i for i in range(24) if groups[i] == g]
                own = [values[i].item() for i in rows]
                for i in rows:
                    z = (values[i].item() - statistics.mean(own)) / (statistics.stdev(own) + 1e-8)
                    total[i] += weights.get(name, 1.0) * z
        if method == "gdpo":
            mean, std = statistics.mean(total), statistics.stdev(total)
            total = [(x - mean) / (std + 1e-8) for x in total]
        out = combined_advantages(components, groups, weights=weights, method=method, eps=1e-8)
        close(out.advantages, torch.tensor(total, dtype=torch.float64))


def test_a_wide_reward_rules_a_sum_but_not_gdpo():
    components, groups = three_rewards()

    def corr(x, y):
        return float(torch.corrcoef(torch.stack([x.double(), y.double()]))[0, 1])

    summed = combined_advantages(components, groups, method="sum").advantages
    fair = combined_advantages(components, groups, method="gdpo").advantages
    wide = group_advantages(components["wide"], groups).advantages
    small = group_advantages(components["a"], groups).advantages
    assert corr(summed, wide) > 0.999
    assert corr(fair, small) > 0.5


def test_components_are_reported_apart_and_holes_are_masked():
    components, groups = three_rewards()
    components["a"][3] = NAN
    out = combined_advantages(components, groups)
    assert not out.mask[3]
    assert out.advantages[3] == 0
    assert torch.isfinite(out.advantages).all()
    assert out.metrics["advantages/a_nonfinite"] == 1
    assert out.metrics["advantages/flat_equal_groups"] == len(set(groups))
    assert combined_advantages({"flat": torch.zeros(24)}, groups).mask.any() == torch.tensor(False)


def test_best_and_worst_pairs():
    rewards = torch.tensor([1.0, 3.0, 3.0, 0.0, 0.5, 0.5, NAN, 2.0, 9.0])
    groups = ["a", "a", "a", "a", "tie", "tie", "b", "b", "c"]
    out = make_pairs(rewards, groups)
    assert (out.winner.tolist(), out.loser.tolist()) == ([1], [3])
    assert {k: int(v) for k, v in out.metrics.items()} == {
        "pairs/tied_pairs": 1, "pairs/below_margin": 0, "pairs/singleton_groups": 2, "pairs/groups": 4, "pairs/pairs": 1,
        "pairs/nonfinite": 1,
    }  # fmt: skip
    kept = make_pairs(rewards, groups, ties="keep")
    assert (kept.winner.tolist(), kept.loser.tolist()) == ([1, 5], [3, 4])
    assert kept.interleaved().tolist() == [1, 3, 5, 4]
    assert make_pairs([1.0, 1.0], ["a", "a"]).winner.shape == (0,)


def test_all_pairs_above_a_margin():
    rewards = [0.0, 1.0, 1.0, 3.0]
    out = make_pairs(rewards, [7, 7, 7, 7], mode="all", margin=1.0)
    assert list(zip(out.winner.tolist(), out.loser.tolist(), strict=True)) == [(3, 0), (3, 1), (3, 2)]
    assert out.metrics["pairs/tied_pairs"] == 1
    assert out.metrics["pairs/below_margin"] == 2
    everything = make_pairs(rewards, [7, 7, 7, 7], mode="all")
    assert everything.metrics["pairs/pairs"] == 5


def test_decay_schedules():
    assert [old_policy_decay(n, 0, 0.001, 0.5) for n in (0, 10, 500, 9999)] == [0.0, 0.01, 0.5, 0.5]
    assert old_policy_decay(9999) == 0.0
    assert [old_policy_decay(n, 75, 0.0075, 0.999) for n in (0, 75, 76, 9999)] == [0.0, 0.0, 0.0075, 0.999]


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: group_advantages(torch.zeros(2), None), "groups=None is missing"),
        (lambda: group_advantages(torch.zeros(2), "ab"), "groups='ab' is missing or not a sequence"),
        (lambda: group_advantages(torch.zeros(3), ["a", "a"]), "groups has 2 ids for 3 rewards"),
        (lambda: group_advantages(torch.zeros(2), ["a", None]), r"groups\[1\]=None is not an id"),
        (lambda: group_advantages(torch.zeros(2), ["a", NAN]), r"groups\[1\]=nan is not an id"),
        (lambda: group_advantages(torch.zeros(2), ["a", ["a"]]), r"groups\[1\]=\['a'\] is not an id"),
        (lambda: group_advantages(torch.zeros(0), []), r"rewards has shape \(0,\)"),
        (lambda: group_advantages(torch.zeros(2, 2, 2), ["a", "a"]), r"rewards has shape \(2, 2, 2\)"),
        (lambda: group_advantages(torch.zeros(2), ["a", "a"], clip=0.0), "clip=0.0 must be above zero"),
        (lambda: group_advantages(torch.zeros(2), ["a", "a"], eps=-1.0), "eps=-1.0 must not be negative"),
        (lambda: group_advantages(torch.zeros(2), ["a", "a"], ddof=2), "ddof=2 must be 0"),
        (lambda: group_advantages(torch.zeros(2), ["a", "a"], std="groups"), "did you mean 'group'"),
        (lambda: group_advantages(torch.zeros(2), ["a", "a"], eps_kind="max"), "choose one of add, floor"),
        (lambda: combined_advantages({}, ["a"]), "is empty"),
        (lambda: combined_advantages({"ocr": torch.zeros(2)}, ["a", "a"], weights={"ocrr": 1.0}), "did you mean 'ocr'"),
        (lambda: combined_advantages({"a": torch.zeros(2), "b": torch.zeros(3)}, ["a", "a"]), "different lengths"),
        (lambda: combined_advantages({"a": torch.zeros(2)}, ["a", "a"], method="gpdo"), "did you mean 'gdpo'"),
        (lambda: make_pairs(torch.zeros(2), ["a", "a"], margin=-1.0), "margin=-1.0"),
        (lambda: make_pairs(torch.zeros(2), ["a", "a"], mode="best"), "did you mean 'best_worst'"),
        (lambda: make_pairs(torch.zeros(2), ["a", "a"], ties="drop"), "choose one of keep, skip"),
        (lambda: make_pairs(torch.zeros(2), ["a", "a"], ties="keep", mode="all"), "contradicts"),
    ],
)
def test_bad_input(call, match):
    with pytest.raises(LossError, match=match):
        call()


def test_groups_about_which_no_reward_says_anything_are_counted():
    metrics = combined_advantages({"a": [1.0, 1.0, 0.0, 1.0], "b": [2.0, 2.0, 3.0, 3.0]}, ["x", "x", "y", "y"]).metrics
    assert (metrics["advantages/groups"], metrics["advantages/equal_groups"]) == (2, 1)
