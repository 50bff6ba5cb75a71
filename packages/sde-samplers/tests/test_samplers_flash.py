"""A schedule with a thinned tail: the published count, the trained steps untouched, the end at 0, and how well it samples."""

from __future__ import annotations

import pytest
import sde_samplers as ss
import torch

GRIDS = [ss.flow_match(n, 3.0, grid) for n in (1, 2, 10, 25) for grid in ("linear", "diffusers")]


@pytest.mark.parametrize("full", GRIDS, ids=lambda grid: f"{grid.num_steps}-{grid.hash[:4]}")
def test_thinned_tails_count_as_published_and_keep_the_rest(full: ss.SigmaSchedule) -> None:
    steps = full.num_steps
    for end in range(steps + 1):
        for ratio in (0.01, 0.3, 0.4, 0.75, 1.0):
            thin = ss.thin_tail(full, end, ratio)
            assert torch.equal(thin.sigmas[: end + 1], full.sigmas[: end + 1])
            assert bool(torch.isin(thin.sigmas, full.sigmas).all())
            assert float(thin.sigmas[-1]) == 0.0
            points = int(max((steps - (end - 1)) * ratio, 1))
            tail = 0 if end == steps else max(points, 2) - 1
            assert thin.num_steps == end + tail
            gaps = torch.isin(full.sigmas, thin.sigmas).nonzero().flatten().diff()[end:]
            assert gaps.numel() == 0 or int(gaps.max() - gaps.min()) <= 1  # evenly spaced by position


def test_a_ratio_of_one_changes_nothing() -> None:
    for full in GRIDS:
        assert all(ss.thin_tail(full, end, 1.0) == full for end in range(full.num_steps + 1))


def test_positions_of_one_tail() -> None:
    full = ss.flow_match(10, 3.0, "linear")
    thin = ss.thin_tail(full, 4, 0.4)  # int(7 · 0.4) = 2 points: the joint and 0
    assert torch.equal(thin.sigmas, full.sigmas[[0, 1, 2, 3, 4, 10]])
    assert torch.equal(ss.thin_tail(full, 4, 0.75).sigmas, full.sigmas[[0, 1, 2, 3, 4, 6, 7, 9, 10]])


def test_thinned_rollout_trains_the_window_as_without_and_replays() -> None:
    def velocity(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) + sigma[:, None]

    noise = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    z = torch.randn(12, 2, 8, generator=torch.Generator().manual_seed(1))
    full = ss.flow_match(12, 3.0, "linear")
    thin = ss.thin_tail(full, 4, 0.5)
    plain = ss.rollout(velocity, noise, full, window=(2, 3), step_noise=z)
    short = ss.rollout(
        velocity, noise, thin, window=(2, 3), step_noise=z[: thin.num_steps], solver="dpm2", solver_steps="post"
    )
    assert torch.equal(plain.latents, short.latents)
    assert torch.equal(plain.log_probs, short.log_probs)
    for step, log_prob in zip(ss.replay(velocity, short, thin), short.log_probs.T, strict=True):
        assert torch.equal(step.log_prob, log_prob)


@pytest.mark.parametrize(
    ("end", "ratio", "words"), [(5, 0.5, "window_end=5"), (-1, 0.5, "window_end"), (2, 0.0, "ratio"), (2, 1.1, "ratio")]
)
def test_impossible_tails_are_refused(end: int, ratio: float, words: str) -> None:
    with pytest.raises(ss.SamplerError, match=words):
        ss.thin_tail(ss.flow_match(4), end, ratio)
