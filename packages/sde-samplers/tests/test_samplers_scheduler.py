"""The adapter for diffusers pipelines, driven the way a pipeline drives its scheduler."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import sde_samplers as ss
import torch
from diffusers import FlowMatchEulerDiscreteScheduler


def velocity(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x.float()) * (1 - 0.5 * sigma.view(-1, *[1] * (x.ndim - 1)))


def drive(
    scheduler: Any, latents: torch.Tensor, generator: Any = None, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The loop of a pipeline: set_timesteps with its own sigmas and mu, then step per timestep."""
    steps = 6
    accepted = inspect.signature(scheduler.set_timesteps).parameters
    assert {"sigmas", "timesteps", "mu", "device"} <= set(accepted)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), device="cpu", mu=0.7)
    scheduler.set_begin_index(0)
    for t in scheduler.timesteps:
        v = velocity(latents, t.expand(latents.shape[0]) / 1000).to(dtype)
        latents = scheduler.step(v, t, latents, generator=generator, return_dict=False)[0]
    return latents


def base() -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift_terminal=0.02)


def noise(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(3, 8, 4, generator=torch.Generator().manual_seed(0)).to(dtype)


def test_an_empty_window_is_the_wrapped_scheduler_to_the_bit() -> None:
    assert torch.equal(drive(ss.FlowMatchSDEScheduler(base(), window=()), noise()), drive(base(), noise()))


@pytest.mark.parametrize("kind", ["flow_sde", "flow_cps", "dance_sde", "ddim", "wan_sde"])
def test_it_is_rollout_and_replays_exactly(kind: ss.Kind) -> None:
    generators = [ss.sample_generator(0, "u", i) for i in range(3)]
    scheduler = ss.FlowMatchSDEScheduler(base(), kind=kind, noise_level=0.6, window=(1, 3), generators=generators)
    final = drive(scheduler, noise())
    generators = [ss.sample_generator(0, "u", i) for i in range(3)]
    schedule = ss.flow_match(6, mu=0.7, shift_terminal=0.02)
    reference = ss.rollout(
        velocity, noise(), schedule, kind=kind, noise_level=0.6, window=(1, 3), generators=generators
    )
    assert scheduler.schedule == schedule
    torch.testing.assert_close(final, reference.final, rtol=1e-5, atol=1e-5)  # timestep / 1000 rounds once more
    trajectory = scheduler.trajectory()
    assert trajectory.step_index.tolist() == [[1, 3]] * 3
    for w, step in enumerate(ss.replay(lambda x, s: velocity(x, s * 1000 / 1000), trajectory, schedule)):
        torch.testing.assert_close(step.log_prob, trajectory.log_probs[:, w], rtol=1e-4, atol=1e-4)


def test_default_window_leaves_the_last_step_to_the_ode() -> None:
    scheduler = ss.FlowMatchSDEScheduler(base())
    drive(scheduler, noise(), torch.Generator().manual_seed(1))
    assert scheduler.trajectory().step_index[0].tolist() == [0, 1, 2, 3, 4]
    assert scheduler.step_index == 6
    assert scheduler.config.shift_terminal == 0.02
    assert scheduler.order == 1


def test_bf16_pipelines_record_what_the_transformer_saw() -> None:
    scheduler = ss.FlowMatchSDEScheduler(base(), window=(0, 2))
    final = drive(scheduler, noise(torch.bfloat16), torch.Generator().manual_seed(1), torch.bfloat16)
    assert final.dtype == torch.bfloat16
    trajectory = scheduler.trajectory()
    for stored in (trajectory.latents, trajectory.next_latents):
        assert stored.dtype == torch.float32
        assert torch.equal(stored.bfloat16().float(), stored)
    sigma = trajectory.sigmas[0].expand(3)
    x = trajectory.latents[:, 0]
    v = velocity(x.bfloat16(), sigma).bfloat16()
    again = ss.sde_step(
        x,
        v,
        float(trajectory.sigmas[0]),
        float(trajectory.sigmas[1]),
        kind="flow_sde",
        noise_level=0.7,
        prev_sample=trajectory.next_latents[:, 0],
    )
    assert torch.equal(again.log_prob, trajectory.log_probs[:, 0])


def test_set_timesteps_forgets_and_output_has_the_log_prob() -> None:
    scheduler = ss.FlowMatchSDEScheduler(FlowMatchEulerDiscreteScheduler(shift=3.0))
    for _ in range(2):
        scheduler.set_timesteps(4)
        x = noise()
        for k, t in enumerate(scheduler.timesteps):
            out = scheduler.step(x, t, x, generator=torch.Generator().manual_seed(k))
            x = out.prev_sample
            assert (out.log_prob is None) == (k == 3)
        assert scheduler.trajectory().window_size == 3
    with pytest.raises(ss.SamplerError, match="set_timesteps"):
        scheduler.step(x, 0.0, x)


def test_it_can_start_in_the_middle_and_score() -> None:
    scheduler = ss.FlowMatchSDEScheduler(FlowMatchEulerDiscreteScheduler(shift=3.0))
    scheduler.set_timesteps(6)
    x = noise()
    t = scheduler.timesteps[2]
    drawn = scheduler.step(x, t.bfloat16(), x, generator=torch.Generator().manual_seed(3))
    scheduler.set_timesteps(6)
    scored = scheduler.step(x, t, x, prev_sample=drawn.prev_sample)
    assert torch.equal(drawn.log_prob, scored.log_prob)
    assert scheduler.trajectory().step_index.tolist() == [[2]] * 3


def test_bad_use() -> None:
    with pytest.raises(ss.SamplerError, match="FlowMatchEuler"):
        ss.FlowMatchSDEScheduler(object())
    scheduler = ss.FlowMatchSDEScheduler(FlowMatchEulerDiscreteScheduler(), window=(7,))
    with pytest.raises(ss.SamplerError, match="leave the schedule"):
        scheduler.set_timesteps(4)
    fresh = ss.FlowMatchSDEScheduler(FlowMatchEulerDiscreteScheduler())
    with pytest.raises(ss.SamplerError, match="set_timesteps"):
        fresh.step(noise(), 1000.0, noise())
    fresh.set_timesteps(4)
    with pytest.raises(ss.SamplerError, match="no step was recorded"):
        fresh.trajectory()
    with pytest.raises(ss.SamplerError, match="per_token_timesteps"):
        fresh.step(noise(), 1000.0, noise(), per_token_timesteps=torch.ones(3))
    with pytest.raises(AttributeError):
        _ = fresh.no_such_attribute


def test_importing_the_package_loads_torch_only() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import sde_samplers; "
        "print(sorted({m.split('.')[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "['sde_samplers']", done.stdout + done.stderr
