"""The fused kernel. On CUDA it is run; elsewhere Triton's interpreter runs the same kernel code on the CPU.

The interpreter has to be chosen before triton is imported, so without a GPU this file runs itself once more in a process
of its own. It rounds casts to bf16 towards zero, unlike the hardware, hence the loose comparison of bf16 gradients.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import sde_samplers as ss
import torch
from sde_samplers.fast import kernels
from sde_samplers.steps import reference_step

pytest.importorskip("triton")
ON_GPU = torch.cuda.is_available()
RUNS_HERE = ON_GPU or os.environ.get("TRITON_INTERPRET") == "1"
runs_kernels = pytest.mark.skipif(not RUNS_HERE, reason="runs in the process with the interpreter")
DEVICE = "cuda" if ON_GPU else "cpu"


def test_without_a_gpu_the_kernels_run_in_the_interpreter() -> None:
    if RUNS_HERE:
        pytest.skip("this process runs the kernels")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--import-mode=importlib",
        "-q",
        "-p",
        "no:cacheprovider",
        "-n0",
        __file__,
    ]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[0].count(".") >= 20  # ran, and not skipped


def inputs(shape: tuple[int, ...], dtype: torch.dtype, per_sample: bool, kind: ss.Kind) -> tuple[Any, ...]:
    g = torch.Generator().manual_seed(sum(shape))
    x, v, z = (torch.randn(shape, generator=g).to(DEVICE) for _ in range(3))
    sigma: Any = torch.linspace(1.0, 0.5, shape[0]) if per_sample else 0.9
    sigma_next: Any = torch.linspace(0.8, 0.0, shape[0]) if per_sample else 0.7
    coefficients = ss.step_coefficients(kind, sigma, sigma_next, 0.6, 0.95)
    return x.to(dtype).requires_grad_(), v.to(dtype).requires_grad_(), z, coefficients


@runs_kernels
@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize("mode", ["draw", "score"])
@pytest.mark.parametrize(
    ("shape", "kind", "form"),
    [
        ((3, 16, 8), "flow_sde", "density"),  # packed tokens
        ((2, 3, 5, 7), "flow_cps", "squared_error"),  # image, not a multiple of the block
        ((2, 3, 2, 20, 21), "ddim", "density_no_constants"),  # video, several blocks
        ((1, 1), "dance_sde", "density"),
    ],
)
def test_fused_is_the_reference(shape: Any, kind: ss.Kind, form: ss.LogProbForm, mode: str, per_sample: bool) -> None:
    x, v, z, coefficients = inputs(shape, torch.float32, per_sample, kind)
    noise, target = (z, None) if mode == "draw" else (None, z)
    prev, mean, std, log_prob = kernels.step(x, v, coefficients, noise=noise, prev_sample=target, form=form)
    expected_prev, expected_mean, expected_std, expected = reference_step(
        x, v, coefficients, noise=noise, prev_sample=target, form=form
    )
    assert torch.equal(prev, expected_prev)
    torch.testing.assert_close(log_prob, expected, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(std, expected_std, rtol=0, atol=0)
    assert not prev.requires_grad
    assert not std.requires_grad
    weights = torch.linspace(1, 2, shape[0], device=DEVICE)
    fused_grads = torch.autograd.grad((log_prob * weights).sum(), (x, v))
    reference_grads = torch.autograd.grad((expected * weights).sum(), (x, v), retain_graph=True)
    for ours, theirs in zip(fused_grads, reference_grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)

    assert torch.equal(mean, expected_mean)
    for ours, theirs in zip(
        torch.autograd.grad(mean.square().sum(), (x, v)),
        torch.autograd.grad(expected_mean.square().sum(), (x, v)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_inputs_are_computed_in_fp32(dtype: torch.dtype) -> None:
    x, v, z, coefficients = inputs((2, 6, 50), dtype, True, "flow_sde")
    prev, _, _, log_prob = kernels.step(x, v, coefficients, noise=z, prev_sample=None, form="density")
    step = reference_step(x, v, coefficients, noise=z, prev_sample=None, form="density")
    expected_prev, expected = step.prev_sample, step.log_prob
    assert prev.dtype == torch.float32
    assert torch.equal(prev, expected_prev)
    torch.testing.assert_close(log_prob, expected, rtol=2e-6, atol=2e-6)
    (grad,) = torch.autograd.grad(log_prob.sum(), v)
    (expected_grad,) = torch.autograd.grad(expected.sum(), v)
    assert grad.dtype == dtype
    torch.testing.assert_close(grad, expected_grad, rtol=1e-2, atol=1e-6)


@runs_kernels
def test_late_mean_refuses_changed_inputs_and_keeps_the_grad_mode() -> None:
    x, v, z, coefficients = inputs((2, 6, 5), torch.float32, False, "flow_sde")

    def step(x: torch.Tensor = x) -> ss.SdeStep:
        return kernels.step(x, v, coefficients, noise=z, prev_sample=None, form="density")

    changed = x.detach().clone()
    late = step(changed)
    changed.add_(1)
    with pytest.raises(ss.SamplerError, match="in place"):
        _ = late.mean
    with torch.no_grad():
        frozen = step()
    assert not frozen.mean.requires_grad
    alive = step()
    with torch.no_grad():
        assert alive.mean.requires_grad
    with torch.inference_mode():
        assert step(x.clone()).mean is not None


@runs_kernels
def test_nothing_is_computed_for_gradients_nobody_asks_for() -> None:
    x, v, z, coefficients = inputs((2, 6, 5), torch.float32, False, "flow_sde")
    x.requires_grad_(False)
    log_prob = kernels.step(x, v, coefficients, noise=None, prev_sample=z, form="density").log_prob
    (grad,) = torch.autograd.grad(log_prob.sum(), v)
    assert bool(torch.isfinite(grad).all())
    with torch.no_grad():
        log_prob = kernels.step(x, v, coefficients, noise=None, prev_sample=z, form="density").log_prob
    assert not log_prob.requires_grad


@runs_kernels
def test_a_nan_reaches_the_log_prob() -> None:
    x, v, z, coefficients = inputs((2, 6, 50), torch.float32, False, "flow_sde")
    v = v.detach().clone()
    v[1, 3, 7] = float("nan")
    log_prob = kernels.step(x.detach(), v, coefficients, noise=z, prev_sample=None, form="density").log_prob
    assert torch.isfinite(log_prob).tolist() == [True, False]


def test_block_sizes_are_powers_of_two_and_depend_on_the_sample_only() -> None:
    for elements in (1, 3, 255, 257, 5000, 1 << 16, 1 << 20, 1 << 22, 1 << 30):
        grid, block, warps = kernels.launch_grid(torch.empty(3, elements, device="meta"))
        assert grid == (-(-elements // block), 3)
        assert block & (block - 1) == 0
        assert 256 <= block <= 16384
        assert warps in (4, 8, 16)


def test_reasons_to_stay_with_plain_torch() -> None:
    cpu = torch.zeros(2, 3)
    assert "CUDA" in str(kernels.why_unavailable(cpu))
    if ON_GPU:
        gpu = cpu.cuda()
        assert kernels.why_unavailable(gpu) is None
        assert "float64" in str(kernels.why_unavailable(gpu.double()))


@pytest.mark.skipif(not ON_GPU, reason="needs CUDA")
def test_rollout_and_replay_take_the_fused_path_and_agree() -> None:
    schedule = ss.flow_match(8, 3.0)
    generators = [ss.sample_generator(0, "u", i) for i in range(4)]
    noise = ss.initial_noise(generators, (16, 32, 32), "cuda")
    trajectory = ss.rollout(lambda x, s: torch.tanh(x), noise, schedule, window=[0, 2, 5], generators=generators)
    for w, step in enumerate(ss.replay(lambda x, s: torch.tanh(x), trajectory, schedule)):
        assert torch.equal(step.log_prob, trajectory.log_probs[:, w])
