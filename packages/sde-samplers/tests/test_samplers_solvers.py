"""DPM-Solver++: orders of convergence, the SDE form against quadrature, and the Flash tail."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import sde_samplers as ss
import torch
from sde_samplers.solvers import SolverType

V0 = 0.3  # data variance of the linear test problem


def read_out(t: float) -> float:
    """x̂0 = read_out(t) * x for data N(0, V0)."""
    return (1 - t) * V0 / ((1 - t) ** 2 * V0 + t * t)


def exact(t: float, u: float) -> float:
    """x_u / x_t along the ODE: it keeps x / sqrt(variance)."""
    return math.sqrt(((1 - u) ** 2 * V0 + u * u) / ((1 - t) ** 2 * V0 + t * t))


def error(steps: int, order: int, solver_type: SolverType = "midpoint") -> float:
    """From t = 0.9 to 0.1 in equal steps of lambda, started with exact history so that only the order shows."""
    lam = [math.log(1 / 9) + 2 * math.log(9) * k / steps for k in range(-2, steps + 1)]
    t = [1 / (1 + math.exp(value)) for value in lam]
    xs = [exact(t[2], t[0]), exact(t[2], t[1]), 1.0]
    for k in range(2, steps + 2):
        past = [t[k - 1], t[k - 2]][: order - 1]
        c = ss.dpm_coefficients(t[k], t[k + 1], past, order=order, solver_type=solver_type)
        outputs = [read_out(t[j]) * xs[j] for j in (k, k - 1, k - 2)]
        xs.append(c.scale_x * xs[k] + sum(a * b for a, b in zip(c.scale_x0, outputs, strict=False)))
    return abs(xs[-1] - exact(t[2], t[-1]))


@pytest.mark.parametrize(
    ("order", "solver_type", "rate"),
    [
        (1, "midpoint", 1),
        (2, "midpoint", 2),
        (2, "heun", 2),
        (3, "midpoint", 2),  # the weight every public copy uses costs an order
    ],
)
def test_order_of_convergence(order: int, solver_type: SolverType, rate: int) -> None:
    errors = [error(steps, order, solver_type) for steps in (40, 80, 160)]
    for coarse, fine in pairwise(errors):
        assert math.log2(coarse / fine) == pytest.approx(rate, abs=0.35)


def test_first_and_last_step_and_a_start_at_one() -> None:
    assert ss.dpm_coefficients(0.3, 0.0, [0.4, 0.5], order=3) == (0.0, (1.0,))
    x = torch.ones(2, 3)
    assert ss.dpm_step(x, x, 0.7, 0.5, order=1).log_prob is None
    first = ss.dpm_coefficients(1.0, 0.9, order=3)
    euler = ss.step_coefficients("ode", 1.0, 0.9, 0.0)  # x - h v, and v = x - x̂0 at t = 1
    assert first.scale_x == pytest.approx(1 + euler.scale_v)
    assert first.scale_x0[0] == pytest.approx(-euler.scale_v)
    # The step from t = 1 is infinitely long in lambda: it has no weight in the next correction.
    assert ss.dpm_coefficients(0.9, 0.8, [1.0], order=2).scale_x0[1] == 0.0
    third = ss.dpm_coefficients(0.8, 0.7, [0.9, 1.0], order=3).scale_x0
    assert all(math.isfinite(value) for value in third)
    assert third[2] == 0.0
    assert [ss.effective_order(3, k, 8) for k in range(8)] == [3, 3, 3, 3, 3, 3, 2, 1]
    assert [ss.effective_order(3, k, 20) for k in (17, 18, 19)] == [3, 3, 1]
    assert [ss.effective_order(2, k, 4) for k in range(4)] == [2, 2, 2, 1]


def linear_velocity(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    t = float(sigma[0])
    return (x - read_out(t) * x) / t


@pytest.mark.parametrize("solver", ["dpm2", "dpm3"])
def test_a_higher_order_rollout_is_closer_to_the_ode(solver: ss.Solver) -> None:
    schedule = ss.flow_match(16, 3.0, "linear")
    noise = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    truth = noise * exact(1.0, 0.0)
    euler = (ss.rollout(linear_velocity, noise, schedule).final - truth).abs().max()
    better = (ss.rollout(linear_velocity, noise, schedule, solver=solver).final - truth).abs().max()
    same = ss.rollout(linear_velocity, noise, schedule, solver="dpm1").final
    assert float(better) < 0.5 * float(euler)
    torch.testing.assert_close(same, ss.rollout(linear_velocity, noise, schedule).final, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: ss.dpm_step(x, x, 0.7, 0.5, order=4), "order"),
        (lambda x: ss.dpm_step(x, x, 0.7, 0.5, solver_type="rk"), "solver_type"),
        (lambda x: ss.dpm_step(x, x, 0.5, 0.7), "sigma_next < sigma"),
        (lambda x: ss.dpm_step(x, x, torch.tensor([0.7, 0.6]), 0.5), "one sigma for the batch"),
        (lambda x: ss.dpm_step(x, x, 0.7, 0.5, (ss.PastOutput(0.6, x),)), "larger sigmas"),
        (lambda x: ss.rollout(linear_velocity, x, ss.flow_match(4), solver="rk4"), "solver"),
        (
            lambda x: ss.rollout(linear_velocity, x, ss.flow_match(4), solver="dpm2", window=torch.tensor([[0], [1]])),
            "window per sample",
        ),
    ],
)
def test_bad_solver_calls(call: object, message: str) -> None:
    with pytest.raises(ss.SamplerError, match=message):
        call(torch.zeros(2, 3))  # type: ignore[operator]
