"""Edges with a defined answer: t = 1, the last step, no noise, all noise, one step, odd dtypes and shapes, bad input."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import sde_samplers as ss
import torch


def tensors(shape: tuple[int, ...] = (2, 4, 4, 4), seed: int = 0) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g) for _ in range(3)]


def test_sigma_one_uses_the_cap_and_defaults_to_sigma_next() -> None:
    x, v, z = tensors()
    default = ss.sde_step(x, v, 1.0, 0.9, kind="flow_sde", noise_level=0.7, noise=z)
    given = ss.sde_step(x, v, 1.0, 0.9, kind="flow_sde", noise_level=0.7, noise=z, sigma_cap=0.9)
    assert torch.equal(default.prev_sample, given.prev_sample)
    assert float(default.std[0]) == pytest.approx(0.7 * math.sqrt(1 / (1 - 0.9) * 0.1), rel=1e-6)
    other = ss.sde_step(x, v, 1.0, 0.9, kind="flow_sde", noise_level=0.7, noise=z, sigma_cap=0.5)
    assert float(other.std[0]) == pytest.approx(0.7 * math.sqrt(1 / 0.5 * 0.1), rel=1e-6)
    # 1 is met exactly by timestep 1000 / 1000; elsewhere the cap plays no part.
    assert float(torch.tensor(1000.0) / 1000) == 1.0
    assert ss.step_coefficients("flow_sde", 0.998, 0.9, 0.7, 0.1) == ss.step_coefficients("flow_sde", 0.998, 0.9, 0.7)


@pytest.mark.parametrize("first", [0.999, 0.99967, 0.9998, 0.999999])
def test_a_table_that_begins_just_below_one_has_the_first_step_of_one_that_begins_at_one(first: float) -> None:
    # diffusers' DPM-Solver++ on flow sigmas begins at 0.999, shifted by 3 at 0.9997: without the cap the std is 7.2.
    one = ss.step_coefficients("flow_sde", 1.0, 0.964, 0.7, 0.964)
    near = ss.step_coefficients("flow_sde", first, 0.964, 0.7, 0.964)
    rows = ss.step_coefficients("flow_sde", torch.tensor([first, 0.5]), torch.tensor([0.964, 0.4]), 0.7, 0.964)
    assert near.std == pytest.approx(one.std, rel=0.02)
    assert near.std == pytest.approx(0.7, rel=0.02)
    assert near.scale_x == pytest.approx(one.scale_x, abs=0.01)
    assert float(rows.std[0]) == pytest.approx(near.std, rel=1e-4)  # the row is fp32
    # The cap is the second entry: a second entry as near to 1 keeps its own std.
    assert ss.step_coefficients("flow_sde", 0.9995, 0.9, 0.7, 0.9995).std == pytest.approx(
        0.7 * math.sqrt(0.9995 / 0.0005 * 0.0995)
    )


def test_both_places_of_the_formula_agree_near_one() -> None:
    from sde_samplers.coefficients import flow_sde

    for t in (0.9, 0.998, 0.999, 0.9997, 1.0):
        rows = flow_sde(torch.tensor([t], dtype=torch.float64), torch.tensor([0.8], dtype=torch.float64), 0.7, 0.8)
        one = flow_sde(t, 0.8, 0.7, 0.8)
        assert [float(value) for value in rows] == pytest.approx(list(one), rel=1e-12)


def test_last_step_of_flow_sde_keeps_noise_and_of_cps_has_none() -> None:
    x, v, z = tensors()
    sde = ss.sde_step(x, v, 0.3, 0.0, kind="flow_sde", noise_level=0.7, noise=z)
    assert float(sde.std[0]) == pytest.approx(0.7 * math.sqrt(0.3 / 0.7 * 0.3), rel=1e-6)
    cps = ss.sde_step(x, v, 0.3, 0.0, kind="flow_cps", noise_level=0.7, noise=z)
    assert float(cps.std[0]) == 0.0
    torch.testing.assert_close(cps.prev_sample, x - 0.3 * v)
    assert torch.equal(cps.log_prob, torch.zeros(2))


@pytest.mark.parametrize("form", ["density", "density_no_constants"])
@pytest.mark.parametrize("kind", ["flow_cps", "ddim"])
def test_a_sample_without_noise_counts_zero_and_carries_no_gradient(kind: ss.Kind, form: ss.LogProbForm) -> None:
    x, v, z = tensors((3, 8))
    v.requires_grad_()
    sigma, sigma_next = torch.tensor([0.9, 0.3, 0.6]), torch.tensor([0.8, 0.0, 0.5])
    step = ss.sde_step(x, v, sigma, sigma_next, kind=kind, noise_level=0.5, prev_sample=z, log_prob_form=form)
    assert step.log_prob is not None
    assert float(step.log_prob[1]) == 0.0
    (grad,) = torch.autograd.grad(step.log_prob.sum(), v)
    assert bool((grad[1] == 0).all())
    assert bool((grad[0] != 0).any())
    assert bool(torch.isfinite(grad).all())


@pytest.mark.parametrize("sigma_next", [1e-313, 1e-200, 1e-100, 1e-39])
def test_noise_too_small_for_a_float_counts_as_none(sigma_next: float) -> None:
    x, v, z = tensors((3, 8))
    for sigma in (0.9, torch.full((3,), 0.9, dtype=torch.float64)):
        step = ss.sde_step(x, v, sigma, sigma_next, kind="ddim", noise_level=1.0, noise=z)
        assert torch.equal(step.log_prob, torch.zeros(3))
        assert bool(torch.isfinite(step.prev_sample).all())


@pytest.mark.parametrize("kind", ["flow_sde", "dance_sde", "flow_cps", "ddim", "ode"])
def test_no_noise_is_euler_without_a_log_prob(kind: ss.Kind) -> None:
    x, v, _ = tensors()
    step = ss.sde_step(x, v, 0.8, 0.5, kind=kind, noise_level=0.0)
    torch.testing.assert_close(step.prev_sample, x + (0.5 - 0.8) * v, rtol=0, atol=2e-7)
    assert step.log_prob is None
    assert float(step.std.abs().max()) == 0.0


def test_cps_with_all_noise_discards_the_old_one() -> None:
    a, b, s = ss.step_coefficients("flow_cps", 0.8, 0.5, 1.0)
    assert s == 0.5
    assert (a, b) == (0.5, -0.8 * 0.5)  # (1 - u) x̂0, with no share of ê left


def test_wan_ignores_the_noise_level_and_needs_the_cap() -> None:
    assert ss.step_coefficients("wan_sde", 0.8, 0.5, 0.0, 0.95) == ss.step_coefficients("wan_sde", 0.8, 0.5, 0.7, 0.95)
    with pytest.raises(ss.SamplerError, match="sigma_cap"):
        ss.step_coefficients("wan_sde", 0.8, 0.5, 1.0)


def test_one_step() -> None:
    schedule = ss.flow_match(1, 3.0)
    assert schedule.sigmas.tolist() == [1.0, 0.0]
    noise, _, z = tensors((2, 8))
    for kind in ss.KINDS:
        trajectory = ss.rollout(lambda x, s: x, noise, schedule, kind=kind, window=[0], step_noise=z[None])
        assert bool(torch.isfinite(trajectory.final).all())
        (step,) = ss.replay(lambda x, s: x, trajectory, schedule)
        if trajectory.log_probs is not None:
            assert torch.equal(step.log_prob, trajectory.log_probs[:, 0])


def test_window_at_the_end_and_empty_window() -> None:
    schedule = ss.flow_match(5, 3.0)
    noise, _, _ = tensors((2, 8))
    z = torch.randn(5, 2, 8, generator=torch.Generator().manual_seed(1))
    last = ss.rollout(lambda x, s: x, noise, schedule, window=[4], step_noise=z)
    assert torch.equal(last.next_latents[:, 0], last.final)
    assert float(last.std[0, 0]) > 0
    for empty in (None, [], (), torch.empty(2, 0, dtype=torch.int64)):
        none = ss.rollout(lambda x, s: x, noise, schedule, window=empty, return_means=True)
        assert none.window_size == 0
        assert none.means is not None
        assert list(ss.replay(lambda x, s: x, none, schedule)) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("kind", ss.KINDS)
def test_arithmetic_is_fp32_whatever_comes_in(kind: ss.Kind, dtype: torch.dtype) -> None:
    x, v, z = (t.to(dtype) for t in tensors())
    common: dict[str, Any] = {"kind": kind, "noise_level": 0.7, "sigma_cap": 0.9}
    low = ss.sde_step(x, v, 0.8, 0.5, noise=z, **common)
    full = ss.sde_step(x.float(), v.float(), 0.8, 0.5, noise=z.float(), **common)
    for name in ("prev_sample", "mean", "std"):
        assert getattr(low, name).dtype == torch.float32
        assert torch.equal(getattr(low, name), getattr(full, name))
    leaf = v.clone().requires_grad_()
    ss.sde_step(x, leaf, 0.8, 0.5, prev_sample=z, **common).mean.sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.dtype == dtype


@pytest.mark.parametrize("kind", ss.KINDS)
def test_mixed_timesteps_are_the_single_steps(kind: ss.Kind) -> None:
    x, v, z = tensors((4, 3, 5))
    sigma, sigma_next = torch.tensor([1.0, 0.9, 0.5, 0.2]), torch.tensor([0.95, 0.7, 0.4, 0.0])
    common: dict[str, Any] = {"kind": kind, "noise_level": 0.6, "sigma_cap": 0.95}
    batch = ss.sde_step(x, v, sigma, sigma_next, noise=z, **common)
    shaped = ss.sde_step(x, v, sigma.view(4, 1, 1), sigma_next.view(4, 1, 1), noise=z, **common)
    assert torch.equal(batch.prev_sample, shaped.prev_sample)
    for b in range(4):
        row = slice(b, b + 1)
        single = ss.sde_step(x[row], v[row], float(sigma[b]), float(sigma_next[b]), noise=z[row], **common)
        assert torch.equal(batch.prev_sample[row], single.prev_sample)
        assert torch.equal(batch.mean[row], single.mean)
        assert torch.equal(batch.std[row], single.std)
        if single.log_prob is not None:
            torch.testing.assert_close(batch.log_prob[row], single.log_prob, rtol=1e-6, atol=1e-6)


def test_strided_inputs_are_read_right() -> None:
    x, v, z = (t.transpose(1, 3) for t in tensors((2, 3, 4, 5)))
    common: dict[str, Any] = {"kind": "flow_sde", "noise_level": 0.7}
    strided = ss.sde_step(x, v, 0.8, 0.5, noise=z, **common)
    dense = ss.sde_step(x.contiguous(), v.contiguous(), 0.8, 0.5, noise=z.contiguous(), **common)
    assert torch.equal(strided.prev_sample, dense.prev_sample)
    assert torch.equal(strided.log_prob, dense.log_prob)


def test_prev_sample_is_detached_and_inputs_are_left_alone() -> None:
    x, v, z = tensors()
    v.requires_grad_()
    before = [t.clone() for t in (x, v, z)]
    for step in (
        ss.sde_step(x, v, 0.8, 0.5, kind="flow_sde", noise_level=0.7, noise=z),
        ss.sde_step(x, v, 0.8, 0.5, kind="flow_sde", noise_level=0.7, prev_sample=z),
        ss.sde_step(x, v, 0.8, 0.5, kind="ode", noise_level=0.0),
    ):
        assert not step.prev_sample.requires_grad
        assert step.mean.requires_grad
        (torch.sum(step.mean) if step.log_prob is None else step.log_prob.sum()).backward()
    for now, then in zip((x, v, z), before, strict=True):
        assert torch.equal(now, then)


def test_a_step_unpacks_in_its_written_order() -> None:
    x, v, z = tensors()
    step = ss.sde_step(x, v, 0.8, 0.5, kind="flow_sde", noise_level=0.7, noise=z)
    prev, mean, std, log_prob = step
    assert prev is step.prev_sample
    assert mean is step.mean
    assert std is step.std
    assert log_prob is step.log_prob
    assert "SdeStep" in repr(step)


def test_gaussian_log_prob_is_the_steps_own() -> None:
    x, v, z = tensors()
    for kind in ("flow_sde", "flow_cps"):
        for form in ss.LOG_PROB_FORMS:
            step = ss.sde_step(x, v, 0.8, 0.5, kind=kind, noise_level=0.7, noise=z, log_prob_form=form)
            again = ss.gaussian_log_prob(step.prev_sample, step.mean, step.std, form=form)
            torch.testing.assert_close(step.log_prob, again, rtol=1e-5, atol=1e-6)
    exact = (
        torch.distributions.Normal(step.mean, step.std.view(-1, 1, 1, 1)).log_prob(step.prev_sample).flatten(1).mean(1)
    )
    torch.testing.assert_close(ss.gaussian_log_prob(step.prev_sample, step.mean, step.std), exact)


GOOD: dict[str, Any] = {"sigma": 0.8, "sigma_next": 0.5, "kind": "flow_sde", "noise_level": 0.7}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "sde"}, "flow_sde"),
        ({"noise_level": -0.1}, "not negative"),
        ({"noise_level": float("nan")}, "finite"),
        ({"noise_level": "high"}, "number"),
        ({"kind": "flow_cps", "noise_level": 1.2}, r"\[0, 1\]"),
        ({"kind": "ddim", "noise_level": 1.2}, r"\[0, 1\]"),
        ({"sigma": 0.5, "sigma_next": 0.5}, "decrease"),
        ({"sigma": 0.4}, "decrease"),
        ({"sigma": 800.0}, "1000"),
        ({"sigma_next": -0.1}, "sigma_next"),
        ({"sigma": float("nan")}, "sigma"),
        ({"sigma": torch.tensor([0.8, 0.7, 0.6])}, "batch of 2"),
        ({"sigma": torch.tensor([0.8, 0.4])}, "decrease"),
        ({"sigma": None}, "sigma"),
        ({"sigma": 1.0, "sigma_cap": 1.0}, "sigma_cap"),
        ({"kind": "wan_sde"}, "sigma_cap"),
        ({"log_prob_form": "sum"}, "density"),
        ({"velocity": torch.zeros(2, 4)}, "velocity"),
        ({"noise": torch.zeros(1, 4, 4, 4)}, "noise"),
        ({"prev_sample": torch.zeros(2, 4, 4)}, "prev_sample"),
        ({"noise": torch.zeros(2, 4, 4, 4), "prev_sample": torch.zeros(2, 4, 4, 4)}, "both"),
        ({"velocity": torch.zeros(2, 4, 4, 4, dtype=torch.int64)}, "dtype"),
        ({"sample": torch.zeros(4)}, "sample"),
        ({"sample": torch.zeros(0, 4, 4, 4), "velocity": torch.zeros(0, 4, 4, 4)}, "sample"),
        ({"sample": [1.0]}, "sample"),
        ({"generator": [torch.Generator()]}, "generators"),
        ({"fused": True}, "CUDA"),
    ],
)
def test_bad_input_is_named(change: dict[str, Any], message: str) -> None:
    x, v, _ = tensors()
    arguments = {"sample": x, "velocity": v, **GOOD, **change}
    with pytest.raises(ss.SamplerError, match=message) as caught:
        ss.sde_step(**arguments)
    assert isinstance(caught.value, ValueError)
    assert len(str(caught.value)) > 30


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["sample", "velocity", "noise", "prev_sample"])
@pytest.mark.parametrize("kind", ["flow_sde", "flow_cps", "ode"])
def test_nan_and_inf_are_found(kind: ss.Kind, where: str, bad: float) -> None:
    x, v, z = tensors()
    arguments: dict[str, Any] = {"sample": x, "velocity": v}
    if where in ("noise", "prev_sample"):
        if kind == "ode" and where == "noise":
            return  # an ODE step does not read noise
        arguments[where] = z
    elif kind != "ode":
        arguments["noise"] = z
    arguments[where][1, 0, 2, 2] = bad
    with pytest.raises(ss.NonFiniteError, match=f"{where} of samples \\[1\\]") as caught:
        ss.sde_step(**arguments, sigma=0.8, sigma_next=0.5, kind=kind, noise_level=0.7)
    assert caught.value.samples == (1,)
    ss.sde_step(**arguments, sigma=0.8, sigma_next=0.5, kind=kind, noise_level=0.7, check_finite=False)


def test_errors_survive_pickling() -> None:
    error = pickle.loads(pickle.dumps(ss.NonFiniteError("step 3", 3, (1, 2))))
    assert (str(error), error.step, error.samples) == ("step 3", 3, (1, 2))
    for kind in (ss.SamplerError, ss.ReplayMismatchError):
        again = pickle.loads(pickle.dumps(kind("what")))
        assert type(again) is kind
        assert str(again) == "what"
