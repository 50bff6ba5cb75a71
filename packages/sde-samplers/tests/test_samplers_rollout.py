"""Rollout and replay: exact parity, windows of every shape, refusal of what does not match."""

from __future__ import annotations

import dataclasses

import pytest
import sde_samplers as ss
import torch


def velocity(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    t = sigma.view(-1, *[1] * (x.ndim - 1))
    return torch.tanh(x) * (1.0 - 0.4 * t) + 0.1 * t


def noise_for(batch: int, shape: tuple[int, ...], seed: int = 0) -> tuple[list[torch.Generator], torch.Tensor]:
    generators = [ss.sample_generator(seed, "prompt", i) for i in range(batch)]
    return generators, ss.initial_noise(generators, shape)


@pytest.mark.parametrize("kind", [k for k in ss.KINDS if k != "ode"])
@pytest.mark.parametrize("shape", [(16, 8), (4, 4, 4), (4, 2, 4, 4)])
def test_replay_reproduces_the_rollout_to_the_bit(kind: ss.Kind, shape: tuple[int, ...]) -> None:
    schedule = ss.flow_match(8, 3.0)
    generators, noise = noise_for(3, shape)
    trajectory = ss.rollout(
        velocity,
        noise,
        schedule,
        kind=kind,
        noise_level=0.6,
        window=[0, 1, 4, 6],
        generators=generators,
        return_means=True,
    )
    assert trajectory.log_probs is not None
    assert trajectory.means is not None
    for w, step in enumerate(ss.replay(velocity, trajectory, schedule)):
        assert torch.equal(step.log_prob, trajectory.log_probs[:, w])
        assert torch.equal(step.mean, trajectory.means[:, w])
        assert torch.equal(step.std, trajectory.std[:, w])
        assert torch.equal(step.prev_sample, trajectory.next_latents[:, w])


def test_a_window_may_differ_per_sample() -> None:
    schedule = ss.flow_match(6, 3.0)
    window = torch.tensor([[0, 1], [2, 4], [1, 5]])
    generators, noise = noise_for(3, (4, 4, 4))
    together = ss.rollout(velocity, noise, schedule, window=window, generators=generators)
    for b in range(3):
        generators, noise = noise_for(3, (4, 4, 4))
        alone = ss.rollout(velocity, noise[b : b + 1], schedule, window=window[b].tolist(), generators=[generators[b]])
        torch.testing.assert_close(together.final[b], alone.final[0], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(together.latents[b], alone.latents[0], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(together.log_probs[b], alone.log_probs[0], rtol=1e-6, atol=1e-6)
    for w, step in enumerate(ss.replay(velocity, together, schedule, window=window)):
        assert torch.equal(step.log_prob, together.log_probs[:, w])


def test_replay_carries_the_gradient() -> None:
    schedule = ss.flow_match(5, 3.0)
    generators, noise = noise_for(2, (6, 3))
    trajectory = ss.rollout(velocity, noise, schedule, window=[1, 3], generators=generators)
    weight = torch.ones((), requires_grad=True)
    for step in ss.replay(lambda x, s: weight * velocity(x, s), trajectory, schedule):
        weight.grad = None
        step.log_prob.sum().backward()
        assert weight.grad is not None
        assert float(weight.grad.abs()) > 0
        assert not step.prev_sample.requires_grad


def test_no_window_is_the_ode() -> None:
    schedule = ss.flow_match(7, 3.0)
    _, noise = noise_for(2, (4, 4, 4))
    trajectory = ss.rollout(velocity, noise, schedule)
    x = noise
    for k in range(7):
        s, u = schedule.sigmas[k], schedule.sigmas[k + 1]
        x = x + (u - s) * velocity(x, s.expand(2))
    assert torch.equal(trajectory.final, x)
    assert trajectory.latents.shape == (2, 0, 4, 4, 4)
    assert list(ss.replay(velocity, trajectory, schedule)) == []


def test_samples_do_not_depend_on_the_batch() -> None:
    schedule = ss.flow_match(5, 3.0)
    generators, noise = noise_for(4, (4, 4, 4))
    all_four = ss.rollout(velocity, noise, schedule, window=[0, 2], generators=generators)
    order = [2, 0]
    generators = [ss.sample_generator(0, "prompt", i) for i in order]
    two = ss.rollout(velocity, ss.initial_noise(generators, (4, 4, 4)), schedule, window=[0, 2], generators=generators)
    torch.testing.assert_close(two.final, all_four.final[order], rtol=1e-6, atol=1e-6)


def test_replay_refuses_what_was_not_sampled() -> None:
    schedule = ss.flow_match(6, 3.0)
    generators, noise = noise_for(2, (4, 4))
    trajectory = ss.rollout(velocity, noise, schedule, window=[1, 2], generators=generators)
    with pytest.raises(ss.ReplayMismatchError, match="schedule"):
        ss.replay(velocity, trajectory, ss.flow_match(6, 3.0, "linear"))
    with pytest.raises(ss.ReplayMismatchError, match="window"):
        ss.replay(velocity, trajectory, schedule, window=[1, 3])
    with pytest.raises(ss.ReplayMismatchError, match="float32"):
        dataclasses.replace(trajectory, latents=trajectory.latents.bfloat16())
    with pytest.raises(ss.ReplayMismatchError, match="verbatim"):
        ss.replay(velocity, dataclasses.replace(trajectory, sigmas=trajectory.sigmas * 0.5), schedule)
    with pytest.raises(ss.ReplayMismatchError, match="leaves the schedule"):
        ss.replay(velocity, dataclasses.replace(trajectory, step_index=trajectory.step_index + 6), schedule)


@pytest.mark.parametrize("bad_step", [0, 3])
def test_the_first_bad_step_is_named(bad_step: int) -> None:
    schedule = ss.flow_match(5, 3.0)

    def broken(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        v = velocity(x, sigma)
        if float(sigma[0]) <= float(schedule.sigmas[bad_step]):
            v[1] = float("inf")
        return v

    generators, noise = noise_for(3, (4, 4))
    with pytest.raises(ss.NonFiniteError, match=f"step {bad_step} of the schedule") as caught:
        ss.rollout(broken, noise, schedule, window=[1, 2], generators=generators)
    assert caught.value.step == bad_step
    assert caught.value.samples == (1,)


@pytest.mark.parametrize(
    ("window", "message"),
    [
        ([5], "leaves"),
        ([-1], "leaves"),
        ([1, 1], "twice"),
        (torch.zeros(3, 1, dtype=torch.int64), "batch"),
        (torch.rand(2), "dtype"),
        (ss.Fixed((1,)), "steps"),
        (3, "steps"),
    ],
)
def test_bad_windows(window: object, message: str) -> None:
    _, noise = noise_for(2, (4, 4))
    with pytest.raises(ss.SamplerError, match=message):
        ss.rollout(velocity, noise, ss.flow_match(5), window=window)
