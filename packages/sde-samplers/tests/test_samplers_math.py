"""The step against independently written formulas, and its marginals against closed forms on Gaussian data."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import sde_samplers as ss
import torch

STOCHASTIC: list[ss.Kind] = [kind for kind in ss.KINDS if kind != "ode"]


def textbook(
    x: torch.Tensor, v: torch.Tensor, t: float, u: float, kind: ss.Kind, eta: float, cap: float
) -> tuple[torch.Tensor, float]:
    """Mean and total std in float64, straight from the definitions: scores and read-outs, no shared coefficients."""
    h, x0, e = t - u, x - t * v, x + (1 - t) * v
    score = -(x - (1 - t) * x0) / t**2
    if kind == "flow_sde":
        s = eta * math.sqrt(t / (1 - (cap if t == 1 else t)))
        return x - h * (v - s**2 / 2 * score), s * math.sqrt(h)
    if kind == "dance_sde":
        return x - h * (v - eta**2 / 2 * score), eta * math.sqrt(h)
    if kind == "wan_sde":
        return x - h * (v - (cap * t) ** 2 / 2 * score), cap * t * math.sqrt(h)
    if kind == "flow_cps":
        std = u * math.sin(eta * math.pi / 2)
    else:
        std = eta * u * math.sqrt(1 - (u * (1 - t)) ** 2 / (t * (1 - u)) ** 2)
    return (1 - u) * x0 + math.sqrt(max(u**2 - std**2, 0)) * e, std


@pytest.mark.parametrize("kind", STOCHASTIC)
@pytest.mark.parametrize(("t", "u"), [(1.0, 0.93), (0.7, 0.6), (0.3, 0.05), (0.2, 0.0)])
def test_step_and_gradients_match_the_textbook(kind: ss.Kind, t: float, u: float) -> None:
    eta, cap = 0.6, 0.93
    g = torch.Generator().manual_seed(3)
    x, v, z = (torch.randn(3, 4, 5, 6, generator=g) for _ in range(3))
    mean, std = textbook(x.double(), v.double(), t, u, kind, eta, cap)
    prev = (mean + max(std, 0.05) * z).float()

    results = []
    for dtype in (torch.float32, torch.float64):
        x_, v_ = x.to(dtype).requires_grad_(), v.to(dtype).requires_grad_()
        if dtype == torch.float32:
            step = ss.sde_step(x_, v_, t, u, kind=kind, noise_level=eta, sigma_cap=cap, prev_sample=prev)
            log_prob, mean_ = step.log_prob, step.mean
            assert log_prob is not None
            torch.testing.assert_close(step.std, torch.full((3,), std), rtol=1e-6, atol=1e-7)
        else:
            mean_, _ = textbook(x_, v_, t, u, kind, eta, cap)
            square = (prev.double() - mean_).square().flatten(1).mean(1)
            if kind == "flow_cps":
                log_prob = -square
            elif std == 0:
                log_prob = 0 * square
            else:
                log_prob = -square / (2 * std**2) - math.log(std) - 0.5 * math.log(2 * math.pi)
        weights = torch.tensor([1.0, -2.0, 0.5], dtype=dtype)
        loss = (weights * log_prob).sum() + 0.1 * mean_.square().sum()
        results.append((log_prob, mean_, *torch.autograd.grad(loss, (x_, v_))))
    for ours, exact in zip(*results, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=2e-5, atol=2e-5)


def final_variance(kind: ss.Kind, eta: float, steps: int, v0: float, start: float = 1.0) -> float:
    """Variance of the samples for data N(0, v0) and the exact velocity: each step maps V to c² V + S²."""
    schedule = ss.flow_match(steps, 3.0, "linear")
    sigmas, variance = schedule.sigmas.double().tolist(), start
    for t, u in pairwise(sigmas):
        a, b, s = ss.step_coefficients(kind, t, u, eta, schedule.sigma_cap)
        slope = (t - (1 - t) * v0) / ((1 - t) ** 2 * v0 + t * t)  # E[e - x0 | x] = slope * x
        variance = float((a + b * slope) ** 2 * variance + s * s)
    return variance


@pytest.mark.parametrize("v0", [0.25, 1.0])
@pytest.mark.parametrize(("kind", "eta"), [("ode", 0.0), ("dance_sde", 0.3), ("wan_sde", 1.0), ("ddim", 0.7)])
def test_first_order_convergence_to_the_data_variance(kind: ss.Kind, eta: float, v0: float) -> None:
    errors = [abs(final_variance(kind, eta, steps, v0) / v0 - 1) for steps in (200, 400, 800, 1600)]
    assert errors[-1] < 0.01
    for coarse, fine in pairwise(errors):
        assert 0.45 < fine / coarse < 0.55


@pytest.mark.parametrize("v0", [0.25, 1.0])
def test_flow_sde_converges_to_the_data_variance(v0: float) -> None:
    """Slowly: s is singular at t = 1, and what its first steps add is forgotten only as N^(-η²)."""
    errors = [abs(final_variance("flow_sde", 0.7, steps, v0) / v0 - 1) for steps in (50, 10_000, 40_000)]
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 7e-4
    assert 4 ** (-(0.7**2)) * 0.9 < errors[2] / errors[1] < 0.75


@pytest.mark.parametrize("v0", [0.25, 1.0])
@pytest.mark.parametrize("eta", [0.3, 0.7, 1.0])
def test_cps_does_not_keep_the_marginal_but_has_a_known_limit(eta: float, v0: float) -> None:
    limit = v0 * (1 + math.cos(eta * math.pi / 2)) / 2
    rough, fine = (final_variance("flow_cps", eta, steps, v0) for steps in (1_000, 16_000))
    assert abs(fine - limit) < abs(rough - limit) < 0.05 * v0
    assert fine == pytest.approx(limit, rel=0.01)
    if eta >= 0.7:
        assert fine < 0.8 * v0


@pytest.mark.parametrize("grid", ["diffusers", "linear"])
@pytest.mark.parametrize(("kind", "eta"), [("ode", 0.0), ("flow_cps", 0.3), ("flow_cps", 1.0)])
def test_on_a_point_mass_ode_and_cps_keep_std_equal_to_t(kind: ss.Kind, eta: float, grid: Any) -> None:
    schedule = ss.flow_match(10, 3.0, grid)
    sigmas = schedule.sigmas.double().tolist()
    for t, u in pairwise(sigmas):
        a, b, s = ss.step_coefficients(kind, t, u, eta, schedule.sigma_cap)
        assert math.sqrt((a + b / t) ** 2 * t * t + s * s) == pytest.approx(u, abs=1e-14)


@pytest.mark.parametrize(("kind", "eta"), [("flow_sde", 0.7), ("flow_sde", 1.2), ("dance_sde", 0.3), ("wan_sde", 1.0)])
def test_on_a_point_mass_the_sdes_exceed_it_by_the_known_amount(kind: ss.Kind, eta: float) -> None:
    schedule = ss.flow_match(10, 3.0)
    sigmas = schedule.sigmas.double().tolist()
    for t, u in pairwise(sigmas):
        a, b, s = ss.step_coefficients(kind, t, u, eta, schedule.sigma_cap)
        h, rate = t - u, s * s / (t - u)  # rate = s²
        excess = (a + b / t) ** 2 * t * t + s * s - u * u
        assert excess == pytest.approx(h * h * (rate / t + rate * rate / (4 * t * t)), rel=1e-9)


def test_dance_diverges_at_the_end_of_the_diffusers_grid() -> None:
    """Why Dance must not run on the last steps of that grid: on a point mass the final std is 12.8."""
    schedule = ss.flow_match(10, 3.0)
    sigmas, variance = schedule.sigmas.double().tolist(), 1.0
    for t, u in pairwise(sigmas):
        a, b, s = ss.step_coefficients("dance_sde", t, u, 0.7)
        variance = float((a + b / t) ** 2 * variance + s * s)
    assert math.sqrt(variance) == pytest.approx(12.8, abs=0.1)


def test_a_sampled_rollout_has_the_predicted_variance() -> None:
    """The same recursion through rollout() itself, by Monte Carlo."""
    v0, steps, batch = 0.5, 12, 64

    def velocity(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        t = float(sigma[0])
        return x * (t - (1 - t) * v0) / ((1 - t) ** 2 * v0 + t * t)

    schedule = ss.flow_match(steps, 3.0, "linear")
    generators = [ss.sample_generator(5, "mc", i) for i in range(batch)]
    noise = ss.initial_noise(generators, (1024,))
    trajectory = ss.rollout(velocity, noise, schedule, kind="flow_sde", window=range(steps), generators=generators)
    expected = final_variance("flow_sde", 0.7, steps, v0)
    assert float(trajectory.final.var()) == pytest.approx(expected, rel=5 * math.sqrt(2 / (batch * 1024)))
    assert trajectory.log_probs is not None  # E[log p] of a Gaussian under itself is -1/2 - ln S - ½ ln 2π
    entropy = -0.5 - trajectory.std[0].log() - 0.5 * math.log(2 * math.pi)
    torch.testing.assert_close(trajectory.log_probs.mean(0), entropy, rtol=0, atol=0.02)


def test_ddim_without_noise_and_cps_without_noise_are_euler() -> None:
    for kind in ("ddim", "flow_cps", "flow_sde", "dance_sde"):
        assert ss.step_coefficients(kind, 0.7, 0.4, 0.0) == ss.step_coefficients("ode", 0.7, 0.4, 0.0)


def test_tensor_formulas_are_the_float_formulas() -> None:
    """On an accelerator the coefficients are computed as float64 tensors; here the same code on a CPU tensor.

    torch's vectorised square root may miss the last bit of float64; in fp32, where they are used, the numbers are equal.
    """
    schedule = ss.flow_match(12, 3.0)
    t, u = schedule.sigmas[:-1].double(), schedule.sigmas[1:].double()
    for kind in ss.KINDS:
        tensors = ss.find_kind(kind).load()(t, u, 0.7, schedule.sigma_cap)
        for k in range(12):
            floats = ss.step_coefficients(kind, float(t[k]), float(u[k]), 0.7, schedule.sigma_cap)
            for one, many in zip(floats, tensors, strict=True):
                value = float(many[k]) if isinstance(many, torch.Tensor) else many
                assert value == pytest.approx(one, rel=1e-14, abs=1e-16)
                assert float(torch.tensor(value).float()) == float(torch.tensor(one).float())
