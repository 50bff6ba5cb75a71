"""Grids: both readings of "shift 3", dynamic shift, terminal stretch, and diffusers' own tables bit for bit."""

from __future__ import annotations

import itertools
import math
import pickle

import diffusers
import numpy as np
import pytest
import sde_samplers as ss
import torch
from diffusers import FlowMatchEulerDiscreteScheduler


def test_the_two_grids_called_shift_3() -> None:
    diffusers, linear = ss.flow_match(10, 3.0, "diffusers"), ss.flow_match(16, 3.0, "linear")
    assert [round(v, 4) for v in diffusers.sigmas.tolist()][:2] == [1.0, 0.9601]
    assert round(float(diffusers.sigmas[-2]), 4) == 0.0089
    assert [round(v, 4) for v in linear.sigmas.tolist()][:2] == [1.0, 0.9783]
    assert round(float(linear.sigmas[-2]), 4) == 0.1667
    assert ss.flow_match(10) == diffusers


CONFIGS = [
    {"shift": 1.0},
    {"shift": 3.0},
    {"shift": 5.0, "shift_terminal": 0.1},
    {"use_dynamic_shifting": True},
    {"use_dynamic_shifting": True, "shift_terminal": 0.02},
    {"use_dynamic_shifting": True, "time_shift_type": "linear"},
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_bit_equality_with_diffusers(config: dict) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(**config)
    untouched = scheduler.sigmas.clone()
    dynamic = config.get("use_dynamic_shifting", False)
    for steps, pipeline_grid in itertools.product((2, 3, 6, 10, 28, 50), (False, True)):
        mu = 0.8 if dynamic else None
        explicit = np.linspace(1.0, 1 / steps, steps) if pipeline_grid else None
        reference = FlowMatchEulerDiscreteScheduler(**config)
        reference.set_timesteps(steps, mu=mu, sigmas=explicit)
        taken = ss.from_diffusers(scheduler, steps, mu=mu, sigmas=explicit)
        assert torch.equal(taken.sigmas, reference.sigmas)
        assert torch.equal(taken.timesteps(), reference.timesteps)
        if dynamic or not pipeline_grid:
            own = ss.flow_match(
                steps,
                config.get("shift", 3.0),
                "linear" if pipeline_grid else "diffusers",
                mu=mu,
                time_shift=config.get("time_shift_type", "exponential"),
                shift_terminal=config.get("shift_terminal"),
            )
            assert torch.equal(own.sigmas, reference.sigmas)
            assert own.hash == taken.hash
    assert torch.equal(scheduler.sigmas, untouched)


def test_set_shift_is_respected() -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0)
    scheduler.set_shift(4.0)
    reference = FlowMatchEulerDiscreteScheduler(shift=1.0)
    reference.set_shift(4.0)
    reference.set_timesteps(9)
    assert torch.equal(ss.from_diffusers(scheduler, 9).sigmas, reference.sigmas)


@pytest.mark.parametrize("terminal", [0.02, 0.3])
def test_the_stretch_ends_at_the_terminal(terminal: float) -> None:
    schedule = ss.flow_match(8, mu=0.7, shift_terminal=terminal)
    assert float(schedule.sigmas[-2]) == pytest.approx(terminal, abs=1e-7)
    assert float(schedule.sigmas[0]) == 1.0


def test_one_step_is_one_to_zero_also_with_a_terminal() -> None:
    qwen = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift_terminal=0.02)
    for schedule in (
        ss.flow_match(1),
        ss.flow_match(1, 3.0, "linear"),
        ss.flow_match(1, mu=0.7, shift_terminal=0.02),
        ss.from_diffusers(qwen, 1, mu=0.7),
        ss.from_diffusers(qwen, 1, mu=0.7, sigmas=[1.0]),
    ):
        assert schedule.sigmas.tolist() == [1.0, 0.0]
        assert schedule.sigma_cap == 0.0
        assert len(schedule) == schedule.num_steps == 1


def test_mu_of_flux_and_qwen_image() -> None:
    assert ss.mu_from_tokens(256, **ss.FLUX_SHIFT) == pytest.approx(0.5)
    assert ss.mu_from_tokens(4096, **ss.FLUX_SHIFT) == pytest.approx(1.15)
    assert ss.mu_from_tokens(8192, **ss.QWEN_IMAGE_SHIFT) == pytest.approx(0.9)
    assert ss.mu_from_tokens(16384, **ss.FLUX_SHIFT) > 1.15  # not clamped
    mu = ss.mu_from_tokens(1024, **ss.FLUX_SHIFT)
    static, dynamic = ss.flow_match(7, math.exp(mu), "linear").sigmas, ss.flow_match(7, mu=mu).sigmas
    torch.testing.assert_close(static, dynamic, rtol=0, atol=2e-7)


def test_a_schedule_is_frozen_hashed_and_comparable() -> None:
    table = ss.flow_match(6).sigmas
    schedule = ss.SigmaSchedule(table)
    table_before = schedule.sigmas.clone()
    table[1] = 0.5  # the caller's tensor; the schedule holds its own
    assert torch.equal(schedule.sigmas, table_before)
    again = ss.SigmaSchedule.from_values(schedule.sigmas.tolist())
    assert again == schedule
    assert hash(again) == hash(schedule)
    assert len(schedule.hash) == 16
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    nudged = schedule.sigmas.clone()
    nudged[2] = torch.nextafter(nudged[2], torch.tensor(0.0))
    assert ss.SigmaSchedule(nudged) != schedule
    assert schedule != "schedule"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0, 0.5, 0.1], "exactly 0"),
        ([1.0, 0.5, 0.5, 0.0], "strictly"),
        ([0.2, 0.5, 0.0], "strictly"),
        ([1000.0, 500.0, 0.0], "timestep"),
        ([1.0, float("nan"), 0.0], "finite"),
        ([0.0], "K\\+1"),
    ],
)
def test_bad_tables(values: list[float], message: str) -> None:
    with pytest.raises(ss.SamplerError, match=message):
        ss.SigmaSchedule.from_values(values)


def test_bad_arguments() -> None:
    with pytest.raises(ss.SamplerError, match="float32"):
        ss.SigmaSchedule(torch.tensor([1.0, 0.0], dtype=torch.float64))
    with pytest.raises(ss.SamplerError, match="num_steps"):
        ss.flow_match(0)
    with pytest.raises(ss.SamplerError, match="num_steps"):
        ss.flow_match(2.5)  # type: ignore[arg-type]
    with pytest.raises(ss.SamplerError, match="grid"):
        ss.flow_match(4, 3.0, "karras")  # type: ignore[arg-type]
    with pytest.raises(ss.SamplerError, match="shift"):
        ss.flow_match(4, 0.0)
    with pytest.raises(ss.SamplerError, match="mu"):
        ss.flow_match(4, mu=float("inf"))
    with pytest.raises(ss.SamplerError, match="time_shift"):
        ss.flow_match(4, mu=1.0, time_shift="cubic")  # type: ignore[arg-type]
    with pytest.raises(ss.SamplerError, match="shift_terminal"):
        ss.flow_match(4, mu=1.0, shift_terminal=1.5)
    with pytest.raises(ss.SamplerError, match="tokens"):
        ss.mu_from_tokens(0, **ss.FLUX_SHIFT)
    with pytest.raises(ss.SamplerError, match="use_dynamic_shifting"):
        ss.from_diffusers(FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True), 5)
    with pytest.raises(ss.SamplerError, match="one per step"):
        ss.from_diffusers(FlowMatchEulerDiscreteScheduler(), 5, sigmas=[1.0, 0.5])
    with pytest.raises(ss.SamplerError, match="FlowMatchEuler"):
        ss.from_diffusers(object(), 5)
    with pytest.raises(ss.SamplerError):  # a grid that runs towards 1
        ss.from_diffusers(FlowMatchEulerDiscreteScheduler(invert_sigmas=True), 5)


def test_a_first_entry_that_misses_one_by_rounding_becomes_one() -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=0.2)
    scheduler.set_timesteps(6)
    assert float(scheduler.sigmas[0]) > 1.0
    taken = ss.from_diffusers(scheduler, 6)
    assert float(taken.sigmas[0]) == 1.0
    assert torch.equal(taken.sigmas[1:], scheduler.sigmas[1:])
    assert taken == ss.flow_match(6, 0.2)


def test_a_scheduler_that_draws_its_own_noise_is_refused() -> None:
    noisy = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, stochastic_sampling=True)
    for scheduler in (noisy, diffusers.FlowMatchLCMScheduler(shift=3.0)):
        with pytest.raises(ss.SamplerError, match="draws noise of its own"):
            ss.from_diffusers(scheduler, 4)


@pytest.mark.parametrize("spacing", ["use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas"])
def test_other_spacings_are_those_of_the_stock_scheduler(spacing: str) -> None:
    if spacing == "use_beta_sigmas":
        pytest.importorskip("scipy")
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, **{spacing: True})
    schedule = ss.from_diffusers(scheduler, 6)
    scheduler.set_timesteps(6)
    assert torch.equal(schedule.sigmas, scheduler.sigmas.float())
