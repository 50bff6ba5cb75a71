"""Speed of the denoising step with its log-prob, on a CPU or on CUDA.

    python tools/bench_samplers.py                    CPU: the step against diffusers' Euler step + three passes
    python tools/bench_samplers.py --device cuda      CUDA: the fused kernel against copy bandwidth and the reference
    … --json out.json                                 the same numbers as JSON

Needs torch only (`PYTHONPATH=packages/sde-samplers/src`), and diffusers for the CPU comparison. Random numbers are drawn
before the clock starts. Every figure is the median of several repeats; what is compared is timed in the same run, in turn.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sde_samplers as ss
import torch
from torch import Tensor

SIGMA, SIGMA_NEXT, ETA = 0.9, 0.8, 0.7
SMALL = (16, 1024, 64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda, but torch sees no CUDA device; use --device cpu")
    report = bench_cuda(options.repeats) if device == "cuda" else bench_cpu(options.repeats)
    report["torch"], report["python"] = torch.__version__, platform.python_version()
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


# ---------------------------------------------------------------------------------------------------------------- CPU


def bench_cpu(repeats: int) -> dict[str, Any]:
    """Ours: sample, mean, std, log-prob and the finite check. Theirs: scheduler.step, then three element-wise passes."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    report: dict[str, Any] = {"device": "cpu", "threads": torch.get_num_threads(), "shapes": {}}
    for shape in (SMALL, (4, 16, 128, 128), (2, 16, 8, 60, 104)):
        x, v, z = (torch.randn(shape) for _ in range(3))
        scheduler: Any = FlowMatchEulerDiscreteScheduler(shift=3.0)
        scheduler.set_timesteps(10)
        t, u = float(scheduler.sigmas[3]), float(scheduler.sigmas[4])

        def ours(x: Tensor = x, v: Tensor = v, z: Tensor = z, t: float = t, u: float = u) -> None:
            ss.sde_step(x, v, t, u, kind="flow_sde", noise_level=ETA, noise=z)

        def euler(x: Tensor = x, v: Tensor = v, s: Any = scheduler) -> Tensor:
            s._step_index = 3
            return s.step(v, s.timesteps[3], x, return_dict=False)[0]

        def theirs(x: Tensor = x, z: Tensor = z, euler: Callable[[], Tensor] = euler) -> None:
            mean = euler()
            scaled = z * 0.1  # pass 1
            prev = mean + scaled  # pass 2
            prev - mean  # pass 3

        with torch.no_grad():
            ours_s, theirs_s, euler_s = in_turn([ours, theirs, euler], repeats, cpu_clock)
        row = {"ours_ms": ours_s * 1e3, "euler_plus_3_ms": theirs_s * 1e3, "euler_ms": euler_s * 1e3}
        row["ratio"] = row["ours_ms"] / row["euler_plus_3_ms"]
        report["shapes"][str(list(shape))] = row
        print(
            f"{list(shape)!s:24} ours {row['ours_ms']:7.3f} ms   Euler + 3 passes {row['euler_plus_3_ms']:7.3f} ms"
            f"   ratio {row['ratio']:.2f}   (Euler alone {row['euler_ms']:.3f} ms)"
        )
    return report


def cpu_clock(call: Callable[[], Any]) -> float:
    """Seconds per call: of the process with one thread, which neighbours on the machine disturb least, else of the wall."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    loops = 5
    start = clock()
    for _ in range(loops):
        call()
    return (clock() - start) / loops


def in_turn(calls: list[Callable[[], Any]], repeats: int, clock: Callable[[Callable[[], Any]], float]) -> list[float]:
    """Median seconds of each call; one repeat of each in turn, so that drift hits all alike."""
    for call in calls:
        call()
        call()
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for call, row in zip(calls, times, strict=True):
            row.append(clock(call))
    return [statistics.median(row) for row in times]


# --------------------------------------------------------------------------------------------------------------- CUDA


def bench_cuda(repeats: int) -> dict[str, Any]:
    report: dict[str, Any] = {"device": torch.cuda.get_device_name(), "correct": correctness()}
    report["large"] = [
        large((1, 16, 33, 480, 320), torch.float32, repeats),  # 324 MB: one video latent
        large((8, 16, 21, 160, 208), torch.float32, repeats),  # 358 MB: eight smaller ones
        large((1, 16, 33, 480, 320), torch.bfloat16, repeats),  # velocity in bf16, as a transformer returns it
    ]
    report["small"] = small(repeats)
    return report


def large(shape: tuple[int, ...], velocity_dtype: torch.dtype, repeats: int) -> dict[str, Any]:
    """A step that fills the card: gigabytes per second of the bytes that have to move, against a copy."""
    x, z = (torch.randn(shape, device="cuda") for _ in range(2))
    v = torch.randn(shape, device="cuda").to(velocity_dtype)
    target, copy = x + 0.1 * z, torch.empty_like(x)
    elements, v_bytes = x.numel(), v.element_size()

    def draw(fused: bool) -> Callable[[], Any]:
        return lambda: ss.sde_step(
            x, v, SIGMA, SIGMA_NEXT, kind="flow_sde", noise_level=ETA, noise=z, fused=fused, check_finite=False
        )

    def score(fused: bool) -> Callable[[], Any]:
        return lambda: ss.sde_step(
            x,
            v,
            SIGMA,
            SIGMA_NEXT,
            kind="flow_sde",
            noise_level=ETA,
            prev_sample=target,
            fused=fused,
            check_finite=False,
        )

    def train(fused: bool) -> Callable[[], Any]:
        leaf = v.detach().requires_grad_()

        def call() -> None:
            leaf.grad = None
            step = ss.sde_step(
                x,
                leaf,
                SIGMA,
                SIGMA_NEXT,
                kind="flow_sde",
                noise_level=ETA,
                prev_sample=target,
                fused=fused,
                check_finite=False,
            )
            score_of(step).sum().backward()

        return call

    cases = {
        "draw": (draw, 12 + v_bytes),
        "score": (score, 8 + v_bytes),
        "score+backward": (train, 2 * (8 + v_bytes) + v_bytes),
    }
    calls: list[Callable[[], Any]] = [lambda: copy.copy_(x)]
    for make, _ in cases.values():
        calls += [make(True), make(False)]
    seconds = in_turn(calls, repeats, cuda_clock)
    copy_rate = 8 * elements / seconds[0] / 1e9
    row: dict[str, Any] = {
        "shape": list(shape),
        "latent_mb": 4 * elements / 1e6,
        "velocity": str(velocity_dtype).removeprefix("torch."),
        "copy_gb_s": copy_rate,
    }
    print(f"{list(shape)} {row['latent_mb']:.0f} MB, velocity {row['velocity']}: copy {copy_rate:.0f} GB/s")
    for index, (name, (_, per_element)) in enumerate(cases.items()):
        fused, plain = seconds[1 + 2 * index], seconds[2 + 2 * index]
        rate = per_element * elements / fused / 1e9
        row[name] = {
            "fused_ms": fused * 1e3,
            "plain_ms": plain * 1e3,
            "gb_s": rate,
            "share_of_copy": rate / copy_rate,
            "speedup": plain / fused,
        }
        print(
            f"  {name:15} fused {fused * 1e3:7.3f} ms  {rate:6.0f} GB/s = {rate / copy_rate:5.1%} of copy"
            f"   plain {plain * 1e3:7.3f} ms   {plain / fused:.1f}x"
        )
    return row


def small(repeats: int) -> dict[str, Any]:
    """[16, 1024, 64]: x, v, noise and the new sample are 16 MB together; launches decide. In a CUDA graph, and eager."""
    x, v, z = (torch.randn(SMALL, device="cuda") for _ in range(3))
    per_sample = torch.full((SMALL[0],), SIGMA, device="cuda")

    def step(fused: bool | None, sigma: float | Tensor = SIGMA) -> Callable[[], Any]:
        return lambda: ss.sde_step(
            x, v, sigma, SIGMA_NEXT, kind="flow_sde", noise_level=ETA, noise=z, fused=fused, check_finite=False
        )

    half, whole = torch.randn(2 * x.numel(), device="cuda"), torch.randn(4 * x.numel(), device="cuda")
    calls = {
        "fused": step(True),
        "plain": step(False),
        "clone_4mb": x.clone,  # one latent: moves 8 MB
        "clone_8mb": half.clone,  # moves the 16 MB that the step has to move
        "clone_16mb": whole.clone,  # as large as the step's four tensors: moves 32 MB
    }
    graphs = {name: graph_of(call, 20) for name, call in calls.items()}
    warm_up(0.3)
    seconds = in_turn([g.replay for g in graphs.values()], repeats, cuda_clock)
    row: dict[str, Any] = {f"graph_{name}_us": s / 20 * 1e6 for name, s in zip(graphs, seconds, strict=True)}
    for name in ("clone_4mb", "clone_8mb", "clone_16mb"):
        row[f"fused_over_{name}"] = row["graph_fused_us"] / row[f"graph_{name}_us"]
    eager = in_turn(
        [step(True), step(False), step(True, per_sample), step(True, per_sample.cpu())], repeats, host_clock
    )
    for name, s in zip(("fused", "plain", "fused_sigma_on_gpu", "fused_sigma_on_cpu"), eager, strict=True):
        row[f"eager_{name}_us"] = s * 1e6
    print(f"{list(SMALL)} in a CUDA graph: " + ", ".join(f"{n} {row[f'graph_{n}_us']:.2f} us" for n in calls))
    print("  fused over clone: " + ", ".join(f"{n} {row[f'fused_over_{n}']:.2f}" for n in list(calls)[2:]))
    print("  eager: " + ", ".join(f"{n[6:-3]} {value:.0f} us" for n, value in row.items() if n.startswith("eager_")))
    return row


def warm_up(seconds: float) -> None:
    """Bring the clocks up: after a pause they are low."""
    a = torch.randn(4096, 4096, device="cuda")
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        for _ in range(10):
            a @ a
        torch.cuda.synchronize()


def host_clock(call: Callable[[], Any]) -> float:
    """Seconds per call for a host that launches one after another."""
    loops = 30
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(loops):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / loops


def graph_of(call: Callable[[], Any], copies: int) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.no_grad():
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        for _ in range(copies):
            call()
    return graph


def cuda_clock(call: Callable[[], Any]) -> float:
    """Seconds per call on the card: the work is queued behind a pause, so that the host's launch time stays out."""
    loops = 10
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(10_000_000)  # some 5 ms
    start.record()
    for _ in range(loops):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / loops


def correctness() -> dict[str, Any]:
    """Fused against the reference on the card, and both against float64 on the CPU: worst relative differences."""
    worst = {
        "sample_bits_equal": True,
        "log_prob": 0.0,
        "mean": 0.0,
        "grad": 0.0,
        "grad_fp64": 0.0,
        "log_prob_fp64": 0.0,
    }
    count = 0
    for shape in ((3, 16, 8), (2, 4, 33, 17), (2, 4, 3, 40, 41), SMALL, (1, 16, 9, 64, 64)):
        for kind in ("flow_sde", "dance_sde", "flow_cps", "ddim", "wan_sde"):
            for dtype in (torch.float32, torch.bfloat16):
                for per_sample in (False, True):
                    count += 1
                    compare(shape, kind, dtype, per_sample, worst)
    schedule = ss.flow_match(8, 3.0)
    generators = [ss.sample_generator(0, "bench", i) for i in range(4)]
    noise = ss.initial_noise(generators, (16, 32, 32), "cuda")
    trajectory = ss.rollout(
        lambda x, s: torch.tanh(x), noise, schedule, window=[0, 2, 5], generators=generators, fused=True
    )
    replayed = torch.stack(
        [score_of(s) for s in ss.replay(lambda x, s: torch.tanh(x), trajectory, schedule, fused=True)], 1
    )
    assert trajectory.log_probs is not None
    worst["replay_log_ratio"] = float((replayed - trajectory.log_probs).abs().max())
    good = (
        worst["sample_bits_equal"]
        and worst["replay_log_ratio"] == 0.0
        and max(v for k, v in worst.items() if isinstance(v, float)) < 1e-4
    )
    print(f"correctness over {count} cases: {worst} -> {'ok' if good else 'FAILED'}")
    return {"cases": count, "ok": good, **worst}


def compare(shape: tuple[int, ...], kind: ss.Kind, dtype: torch.dtype, per_sample: bool, worst: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(len(shape) + shape[0])
    x, v, z = (torch.randn(shape, generator=generator).to("cuda") for _ in range(3))
    x, v = x.to(dtype), v.to(dtype)
    upstream = torch.linspace(1, 2, shape[0], device="cuda")
    sigma: float | Tensor = torch.linspace(0.9, 0.85, shape[0], device="cuda") if per_sample else SIGMA
    common: dict[str, Any] = {"kind": kind, "noise_level": ETA, "sigma_cap": 0.95, "check_finite": False}
    fused, plain = (ss.sde_step(x, v, sigma, SIGMA_NEXT, noise=z, fused=f, **common) for f in (True, False))
    worst["sample_bits_equal"] &= bool(torch.equal(fused.prev_sample, plain.prev_sample))
    again = ss.sde_step(x, v, sigma, SIGMA_NEXT, noise=z, fused=True, **common)
    worst["sample_bits_equal"] &= bool(torch.equal(score_of(fused), score_of(again)))
    target = plain.prev_sample + 0.01 * z
    results = []
    for f in (True, False):
        a, b = x.clone().requires_grad_(), v.clone().requires_grad_()
        step = ss.sde_step(a, b, sigma, SIGMA_NEXT, prev_sample=target, fused=f, **common)
        loss = (score_of(step) * upstream).sum() + 1e-3 * step.mean.square().sum()
        grads = [grad.float() for grad in torch.autograd.grad(loss, (a, b))]
        results.append((score_of(step).detach(), step.mean.detach(), *grads))
    for name, index in (("log_prob", 0), ("mean", 1), ("grad", 2), ("grad", 3)):
        if dtype == torch.float32 or index < 2:
            worst[name] = max(worst[name], relative(results[0][index], results[1][index]))
    if dtype == torch.float32:
        exact = exact_step(x, v, sigma, target, common, upstream)
        worst["log_prob_fp64"] = max(worst["log_prob_fp64"], relative(results[0][0], exact[0]))
        worst["grad_fp64"] = max(worst["grad_fp64"], relative(results[0][3], exact[1]))


def exact_step(
    x: Tensor, v: Tensor, sigma: float | Tensor, target: Tensor, common: dict[str, Any], upstream: Tensor
) -> tuple[Tensor, Tensor]:
    """log-prob and gradient of v in float64, by autograd."""
    a, b, s = ss.step_coefficients(common["kind"], sigma, SIGMA_NEXT, common["noise_level"], common["sigma_cap"])
    rows = (-1, *[1] * (x.ndim - 1))
    a, b, s = (
        torch.as_tensor(c, dtype=torch.float64, device=x.device).expand(x.shape[0]).reshape(rows) for c in (a, b, s)
    )
    leaf = v.double().requires_grad_()
    mean = a * x.double() + b * leaf
    square = (target.double() - mean).square().flatten(1).mean(1)
    s = s.flatten()
    log_prob = -square if common["kind"] == "flow_cps" else -square / (2 * s * s) - s.log() - ss.HALF_LOG_TWO_PI
    ((log_prob * upstream).sum() + 1e-3 * mean.square().sum()).backward()
    assert leaf.grad is not None
    return log_prob.detach(), leaf.grad


def score_of(step: ss.SdeStep) -> Tensor:
    assert step.log_prob is not None
    return step.log_prob


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30))


if __name__ == "__main__":
    main()
