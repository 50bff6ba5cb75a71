"""DPM-Solver++: orders of convergence, the SDE form against quadrature, and the Flash tail."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import sde_samplers as ss
import torch
from sde_samplers.solvers import SolverType, ThirdOrder

V0 = 0.3  # data variance of the linear test problem


def read_out(t: float) -> float:
    """x̂0 = read_out(t) * x for data N(0, V0)."""
    return (1 - t) * V0 / ((1 - t) ** 2 * V0 + t * t)


def exact(t: float, u: float) -> float:
    """x_u / x_t along the ODE: it keeps x / sqrt(variance)."""
    return math.sqrt(((1 - u) ** 2 * V0 + u * u) / ((1 - t) ** 2 * V0 + t * t))


def error(steps: int, order: int, solver_type: SolverType = "midpoint", third_order: ThirdOrder = "published") -> float:
    """From t = 0.9 to 0.1 in equal steps of lambda, started with exact history so that only the order shows."""
    lam = [math.log(1 / 9) + 2 * math.log(9) * k / steps for k in range(-2, steps + 1)]
    t = [1 / (1 + math.exp(value)) for value in lam]
    xs = [exact(t[2], t[0]), exact(t[2], t[1]), 1.0]
    for k in range(2, steps + 2):
        past = [t[k - 1], t[k - 2]][: order - 1]
        c = ss.dpm_coefficients(t[k], t[k + 1], past, order=order, solver_type=solver_type, third_order=third_order)
        outputs = [read_out(t[j]) * xs[j] for j in (k, k - 1, k - 2)]
        xs.append(c.scale_x * xs[k] + sum(a * b for a, b in zip(c.scale_x0, outputs, strict=False)))
    return abs(xs[-1] - exact(t[2], t[-1]))


@pytest.mark.parametrize(
    ("order", "solver_type", "third_order", "rate"),
    [
        (1, "midpoint", "published", 1),
        (2, "midpoint", "published", 2),
        (2, "heun", "published", 2),
        (3, "midpoint", "published", 2),  # the weight every public copy uses costs an order
        (3, "midpoint", "consistent", 3),
    ],
)
def test_order_of_convergence(order: int, solver_type: SolverType, third_order: ThirdOrder, rate: int) -> None:
    errors = [error(steps, order, solver_type, third_order) for steps in (40, 80, 160)]
    for coarse, fine in pairwise(errors):
        assert math.log2(coarse / fine) == pytest.approx(rate, abs=0.35)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_sde_form_integrates_a_polynomial_read_out_exactly(order: int) -> None:
    """mean = (u/t) e^-H x + (1-u) ∫ 2 e^-2(lambda_u - l) x̂0(l) dl, exact when x̂0 is a polynomial in lambda."""
    sigmas = [0.85, 0.75, 0.6]
    u = 0.4
    lam = [math.log((1 - s) / s) for s in (*sigmas, u)]
    past = [sigmas[1], sigmas[0]][: order - 1]
    c = ss.dpm_coefficients(sigmas[2], u, past, order=order, sde=True, solver_type="heun")
    h = lam[3] - lam[2]

    def x0(value: float) -> float:
        return sum(
            coefficient * (value - lam[2]) ** power for power, coefficient in enumerate((0.7, -0.4, 0.9)[:order])
        )

    cells = 20_000
    nodes = [lam[2] + (i + 0.5) * h / cells for i in range(cells)]
    integral = sum(2 * math.exp(-2 * (lam[3] - y)) * x0(y) for y in nodes) * h / cells
    mean = sum(a * x0(value) for a, value in zip(c.scale_x0, (lam[2], lam[1], lam[0]), strict=False))
    assert mean == pytest.approx((1 - u) * integral, rel=1e-6)
    assert c.scale_x == pytest.approx(u / sigmas[2] * math.exp(-h))
    assert c.std == pytest.approx(u * math.sqrt(1 - math.exp(-2 * h)))


def test_sde_form_keeps_the_marginal() -> None:
    """Any step from the exact marginal lands close to the exact marginal, closer as steps shrink."""

    def gap(h: float) -> float:
        t, u = 0.6, 0.6 - h
        c = ss.dpm_coefficients(t, u, order=1, sde=True)
        slope = c.scale_x + c.scale_x0[0] * read_out(t)
        variance = slope**2 * ((1 - t) ** 2 * V0 + t * t) + c.std**2
        return abs(variance - ((1 - u) ** 2 * V0 + u * u))

    assert gap(0.01) < 0.3 * gap(0.02) < 0.3 * 0.3 * gap(0.04)


def test_sde_step_scores_what_it_draws() -> None:
    g = torch.Generator().manual_seed(0)
    x, v, z = (torch.randn(2, 3, 4, generator=g) for _ in range(3))
    drawn = ss.dpm_step(x, v, 0.7, 0.5, order=1, sde=True, noise=z)
    scored = ss.dpm_step(x, v.requires_grad_(), 0.7, 0.5, order=1, sde=True, prev_sample=drawn.prev_sample)
    assert torch.equal(drawn.step.log_prob, scored.step.log_prob)
    scored.step.log_prob.sum().backward()
    assert float(v.grad.abs().sum()) > 0
    assert ss.dpm_step(x, v, 0.7, 0.5, order=1).step.log_prob is None
    seeded = [ss.dpm_step(x, v, 0.7, 0.5, sde=True, generator=torch.Generator().manual_seed(3)) for _ in range(2)]
    assert torch.equal(seeded[0].prev_sample, seeded[1].prev_sample)


def test_first_and_last_step_and_a_start_at_one() -> None:
    assert ss.dpm_coefficients(0.3, 0.0, [0.4, 0.5], order=3) == (0.0, (1.0,), 0.0)
    assert ss.dpm_coefficients(0.3, 0.0, sde=True, order=1).std == 0.0
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


def test_flash_keeps_the_trained_steps_and_reaches_zero() -> None:
    full = ss.flow_match(25, 3.0, "linear")
    for end in range(26):
        flash = ss.flash_schedule(25, end, shift=3.0, ratio=0.4)
        assert torch.equal(flash.sigmas[: end + 1], full.sigmas[: end + 1])
        tail = 0 if end == 25 else max(int(max((25 - end + 1) * 0.4, 1)) - 1, 1)
        assert flash.num_steps == end + tail
    mu = 0.7
    torch.testing.assert_close(
        ss.flash_schedule(10, 4, mu=mu).sigmas, ss.flash_schedule(10, 4, shift=math.exp(mu)).sigmas, rtol=0, atol=1e-7
    )
    # one point left: the published grid stops with noise, ours takes one last step
    assert ss.flash_schedule(25, 23).num_steps == 24


def test_flash_rollout_trains_the_window_as_without() -> None:
    noise = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    z = torch.randn(25, 2, 8, generator=torch.Generator().manual_seed(1))
    full, flash = ss.flow_match(25, 3.0, "linear"), ss.flash_schedule(25, 6)
    window = range(2, 6)
    plain = ss.rollout(linear_velocity, noise, full, window=window, step_noise=z)
    short = ss.rollout(
        linear_velocity,
        noise,
        flash,
        window=window,
        step_noise=z[: flash.num_steps],
        solver="dpm2",
        solver_steps="post",
    )
    assert torch.equal(plain.latents, short.latents)
    assert torch.equal(plain.log_probs, short.log_probs)
    for step, log_prob in zip(ss.replay(linear_velocity, short, flash), short.log_probs.T, strict=True):
        assert torch.equal(step.log_prob, log_prob)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: ss.dpm_step(x, x, 0.7, 0.5, order=4), "order"),
        (lambda x: ss.dpm_step(x, x, 0.7, 0.5, solver_type="rk"), "solver_type"),
        (lambda x: ss.dpm_step(x, x, 0.7, 0.5, third_order="new"), "third_order"),
        (lambda x: ss.dpm_step(x, x, 0.5, 0.7), "sigma_next < sigma"),
        (lambda x: ss.dpm_step(x, x, torch.tensor([0.7, 0.6]), 0.5), "one sigma for the batch"),
        (lambda x: ss.dpm_step(x, x, 0.7, 0.5, (ss.PastOutput(0.6, x),)), "larger sigmas"),
        (lambda x: ss.dpm_step(x, x, 0.7, 0.5, noise=x, prev_sample=x, sde=True), "both"),
        (lambda x: ss.rollout(linear_velocity, x, ss.flow_match(4), solver="rk4"), "solver"),
        (
            lambda x: ss.rollout(linear_velocity, x, ss.flow_match(4), solver="dpm2", window=torch.tensor([[0], [1]])),
            "window per sample",
        ),
        (lambda x: ss.flash_schedule(10, 11), "window_end"),
        (lambda x: ss.flash_schedule(10, 4, ratio=0.0), "ratio"),
    ],
)
def test_bad_solver_calls(call: object, message: str) -> None:
    with pytest.raises(ss.SamplerError, match=message):
        call(torch.zeros(2, 3))  # type: ignore[operator]
