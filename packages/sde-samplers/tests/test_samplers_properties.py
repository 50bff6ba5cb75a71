"""Properties over shapes, dtypes and parameters (hypothesis)."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import sde_samplers as ss
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

SETTINGS = settings(max_examples=60, deadline=None, derandomize=True)
STOCHASTIC = [kind for kind in ss.KINDS if kind != "ode"]
shapes = st.lists(st.integers(1, 5), min_size=2, max_size=5).map(tuple)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])
kinds = st.sampled_from(STOCHASTIC)
levels = st.floats(0.01, 1.0)


@st.composite
def sigma_pairs(draw: st.DrawFn) -> tuple[float, float]:
    t = draw(st.one_of(st.just(1.0), st.floats(0.05, 0.999)))
    u = draw(st.one_of(st.just(0.0), st.floats(0.0, 0.98))) * t
    return t, u


def batch(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g).to(dtype) for _ in range(3)]


def one_step(shape: Any, dtype: Any, kind: Any, level: float, pair: tuple[float, float], seed: int) -> tuple[Any, ...]:
    x, v, z = batch(shape, dtype, seed)
    common = {"kind": kind, "noise_level": level, "sigma_cap": 0.95}
    return x, v, z, common, ss.sde_step(x, v, *pair, noise=z, **common)


@SETTINGS
@given(shapes, dtypes, kinds, levels, sigma_pairs(), st.integers(0, 2**20))
def test_shapes_dtypes_and_finiteness(
    shape: Any, dtype: Any, kind: Any, level: float, pair: tuple[float, float], seed: int
) -> None:
    *_, step = one_step(shape, dtype, kind, level, pair, seed)
    assert step.prev_sample.shape == step.mean.shape == shape
    assert step.std.shape == step.log_prob.shape == shape[:1]
    for value in step:
        assert value.dtype == torch.float32
        assert bool(torch.isfinite(value).all())
    assert bool((step.std >= 0).all())


@SETTINGS
@given(shapes, dtypes, kinds, levels, sigma_pairs(), st.integers(0, 2**20))
def test_scoring_a_drawn_sample_gives_its_log_prob_to_the_bit(
    shape: Any, dtype: Any, kind: Any, level: float, pair: tuple[float, float], seed: int
) -> None:
    x, v, _, common, step = one_step(shape, dtype, kind, level, pair, seed)
    for sigma in (pair[0], torch.full((shape[0],), pair[0], dtype=torch.float64)):
        scored = ss.sde_step(x, v.requires_grad_(), sigma, pair[1], prev_sample=step.prev_sample, **common)
        assert torch.equal(scored.log_prob.detach(), step.log_prob)
        assert torch.equal(scored.mean.detach(), step.mean.detach())
        assert torch.equal(scored.prev_sample, step.prev_sample)


@SETTINGS
@given(shapes, kinds, levels, sigma_pairs(), st.integers(0, 2**20))
def test_the_mean_is_the_most_likely_sample(
    shape: Any, kind: Any, level: float, pair: tuple[float, float], seed: int
) -> None:
    x, v, z, common, step = one_step(shape, torch.float32, kind, level, pair, seed)
    best = ss.sde_step(x, v, *pair, prev_sample=step.mean, **common).log_prob
    assert bool((step.log_prob <= best).all())
    if float(step.std[0]) > 1e-3:
        per_sample = z.flatten(1).square().mean(1)  # (x_u - mean)² = S² z²
        scale = step.std**2 if kind == "flow_cps" else 0.5
        torch.testing.assert_close(best - step.log_prob, scale * per_sample, rtol=2e-3, atol=2e-4)


@SETTINGS
@given(shapes, kinds, levels, sigma_pairs(), st.integers(0, 2**20))
def test_a_sample_does_not_see_its_batch(
    shape: Any, kind: Any, level: float, pair: tuple[float, float], seed: int
) -> None:
    x, v, z, common, step = one_step(shape, torch.float32, kind, level, pair, seed)
    row = seed % shape[0]
    alone = ss.sde_step(x[row : row + 1], v[row : row + 1], *pair, noise=z[row : row + 1], **common)
    assert torch.equal(alone.prev_sample[0], step.prev_sample[row])
    torch.testing.assert_close(alone.log_prob[0], step.log_prob[row], rtol=1e-6, atol=1e-6)


@SETTINGS
@given(kinds, levels, sigma_pairs())
def test_coefficients_stay_in_bounds(kind: Any, level: float, pair: tuple[float, float]) -> None:
    t, u = pair
    a, b, s = ss.step_coefficients(kind, t, u, level, 0.95)
    assert b <= 0 <= s
    if kind in ("flow_cps", "ddim"):
        # Same weight on the data as the marginal at u, and noise of the old and the new kind add up to u.
        weight_of_old_noise = a * t + b  # coefficient of e when x = (1-t) x0 + t e and v = e - x0
        assert math.isclose(a * (1 - t) - b, 1 - u, rel_tol=1e-9, abs_tol=1e-12)
        assert math.isclose(math.hypot(weight_of_old_noise, s), u, rel_tol=1e-9, abs_tol=1e-12)
    else:
        rate = s * s / (t - u)
        assert math.isclose(a, 1 - (t - u) * rate / (2 * t), rel_tol=1e-9, abs_tol=1e-12)


@SETTINGS
@given(
    st.integers(1, 60),
    st.floats(0.2, 10.0),
    st.sampled_from(["diffusers", "linear"]),
    st.one_of(st.none(), st.floats(0.001, 0.5)),
)
def test_schedules_decrease_from_one_to_exactly_zero(steps: int, shift: float, grid: Any, terminal: Any) -> None:
    schedule = ss.flow_match(steps, shift, grid, shift_terminal=terminal)
    values = schedule.sigmas.tolist()
    assert len(values) == steps + 1
    assert values[0] == 1.0
    assert values[-1] == 0.0
    assert all(a > b for a, b in pairwise(values))
    assert ss.SigmaSchedule.from_values(values).hash == schedule.hash


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(1, 6), st.integers(1, 3), kinds, st.floats(0.05, 0.95), st.data())
def test_any_window_replays_exactly(steps: int, size: int, kind: Any, level: float, data: st.DataObject) -> None:
    schedule = ss.flow_match(steps, 3.0)
    positions = st.lists(st.integers(0, steps - 1), unique=True, min_size=0, max_size=steps)
    window = data.draw(positions)
    if data.draw(st.booleans()) and window:
        rows = [window, *(data.draw(st.permutations(range(steps)))[: len(window)] for _ in range(size - 1))]
        given_window: Any = torch.tensor(rows)
    else:
        given_window = window
    generators = [ss.sample_generator(1, "p", i) for i in range(size)]
    noise = ss.initial_noise(generators, (3, 4))

    def velocity(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        return torch.sin(x) + sigma.view(-1, 1, 1)

    trajectory = ss.rollout(
        velocity, noise, schedule, kind=kind, noise_level=level, window=given_window, generators=generators
    )
    assert trajectory.window_size == len(window)
    for w, step in enumerate(ss.replay(velocity, trajectory, schedule, window=given_window)):
        assert torch.equal(step.log_prob - trajectory.log_probs[:, w], torch.zeros(size))


@SETTINGS
@given(
    st.integers(1, 5),
    st.integers(0, 4),
    st.integers(0, 8),
    st.integers(1, 7),
    st.integers(1, 5),
    st.sampled_from(["roll_back", "clamp"]),
    st.sampled_from(["full", "cut", "empty"]),
    st.integers(0, 10_000),
)
def test_moving_windows_stay_inside_their_range(
    size: int, low: int, slack: int, period: int, stride: int, at_end: Any, edge: Any, step: int
) -> None:
    high = low + size + slack
    steps = ss.Progressive(size, (low, high), period=period, stride=stride, at_end=at_end, edge=edge).steps(step)
    assert all(low <= p < high for p in steps)
    assert list(steps) == sorted(set(steps))
    assert len(steps) == size or (edge != "full" and len(steps) < size)
    assert steps or edge == "empty"
