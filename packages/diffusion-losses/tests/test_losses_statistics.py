"""Metrics pool exactly: any cut into calls, steps and ranks gives the number of the whole batch."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from diffusion_losses import (
    DiffusionLossConfig,
    ElementLoss,
    LossError,
    Statistic,
    diffusion_loss,
    numbers,
    pool_statistics,
    statistic,
)
from diffusion_losses.reduction import reduce_elements

CUTS = ([1] * 12, [12], [5, 7], [2, 2, 8], [3, 3, 3, 3], [11, 1])
"""Sizes of the micro-batches that 12 rows are cut into."""


def elements(rows: slice) -> ElementLoss:
    """Twelve rows of two steps: ratios a millionth around 1, as they are, and a mask that leaves some calls empty."""
    draw = torch.Generator().manual_seed(0)
    value = torch.randn(12, 2, generator=draw, dtype=torch.float64)[rows]
    mask = (torch.rand(12, 2, generator=draw) > 0.4)[rows]
    return ElementLoss(value, mask, {"actor/square": value**2}, 1.0 + 1e-6 * value, value.abs())


def cut(sizes):
    ends = torch.tensor(sizes).cumsum(0).tolist()
    return [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("sizes", CUTS, ids=str)
def test_any_cut_gives_the_numbers_of_the_whole_batch(sizes, ranks):
    part = elements(slice(None))
    ratio = part.ratio[part.mask]
    want = {
        "actor/loss": part.objective[part.mask].mean(),
        "actor/square": (part.objective[part.mask] ** 2).mean(),
        "actor/ratio_mean": ratio.mean(),
        "actor/ratio_std": ratio.std(correction=0),
        "actor/ratio_max": ratio.max(),
        "actor/ratio_min": ratio.min(),
        "actor/distance_max": part.distance[part.mask].max(),
        "actor/count": part.mask.sum(),
    }
    calls = [reduce_elements(elements(rows), global_count=24).statistics for rows in cut(sizes)]
    shares = [calls[rank::ranks] for rank in range(ranks)]  # the ranks hold different numbers of calls
    on_ranks = [pickle.loads(pickle.dumps(pool_statistics(share))) for share in shares]
    found = numbers(pool_statistics(on_ranks, over_ranks=True))
    assert found == pytest.approx({name: float(value) for name, value in want.items()}, rel=1e-9)


def test_each_kind_of_metric_pools_as_it_says():
    steps = [
        {"norm": statistic("mean", 1.0), "lost": statistic("events", 1.0), "rare": statistic("mean", 5.0, 0.0)},
        {"norm": statistic("mean", 4.0, 2.0), "lost": statistic("events", 1.0), "late": statistic("max", 0.5)},
    ]
    rank = pool_statistics(steps)
    assert numbers(rank) == {"norm": 3.0, "lost": 2.0, "late": 0.5}  # what counted nothing has no number
    both = numbers(pool_statistics([rank, rank], over_ranks=True))
    assert both == {"norm": 3.0, "lost": 2.0, "late": 0.5}  # the ranks lost the same steps, not four
    assert numbers(pool_statistics([{"n": statistic("sum", 3.0)}] * 2, over_ranks=True)) == {"n": 6.0}
    assert numbers(pool_statistics([{"plain": 1.0}, {"plain": torch.tensor(3.0)}])) == {"plain": 2.0}


@pytest.mark.parametrize("order", [[0, 1, 2], [1, 2, 0], [2, 0, 1]])
def test_a_number_that_is_not_finite_is_seen_wherever_it_stands(order):
    rows = [{"top": statistic("max", v), "middle": statistic("mean", v)} for v in (1.0, math.nan, 3.0)]
    found = numbers(pool_statistics(rows[i] for i in order))
    assert math.isnan(found["top"])
    assert math.isnan(found["middle"])
    assert numbers(pool_statistics([{"a": statistic("mean", math.inf)}, {"a": 1.0}]))["a"] == math.inf


def test_disagreement_and_unknown_kinds_are_refused():
    with pytest.raises(LossError, match="did you mean 'mean'"):
        statistic("meen", 1.0)
    with pytest.raises(LossError, match="pool of 'a'"):
        pool_statistics([{"a": statistic("max", 1.0)}, {"a": Statistic("mean", (1.0, 1.0))}])


def test_the_distance_is_in_the_units_of_the_losss_own_clip():
    """Flow-DPPO is bounded by a divergence and the others by a log-ratio: the same move has another size to each."""
    old, std = torch.zeros(4, 3), torch.full((4,), 0.5)
    means = (old + 0.01).requires_grad_()
    log_probs = torch.full((4,), 2e-4, requires_grad=True)
    data = {"old_log_probs": torch.zeros(4), "advantages": torch.ones(4), "old_means": old, "noise": torch.ones(4, 3)}
    data |= {"sigma": torch.full((4,), 0.8), "sigma_next": torch.full((4,), 0.5)}
    output = {"log_probs": log_probs, "means": means, "std": std}
    for mode, distance, field in (
        ("flow_grpo", 2e-4, "clip_ratio"),
        ("flow_dppo", 0.01**2 / (2 * 0.5**2), "kl_mask_threshold"),
        ("grpo_guard", 0.01, "clip_ratio"),
    ):
        config = DiffusionLossConfig(mode)
        out = diffusion_loss(config, output, data)
        assert out.metrics["actor/distance_max"].item() == pytest.approx(distance, rel=1e-5), mode
        assert config.limit == getattr(config, field), mode
