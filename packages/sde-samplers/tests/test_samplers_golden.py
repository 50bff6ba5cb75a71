"""Every reference vector of schedules, steps, solvers, windows and MixGRPO rollouts.

Where we read a quantity otherwise than a peer, the test converts explicitly; the reasons, in one place:
    std          peers return the std per root of time for flow_sde (and Wan when asked); ours is always the TOTAL std.
    dance, bf16  the peer multiplies sigma and v in bf16, which moves the log-prob by up to 0.15; we upcast v first.
    dance, Mix   MixGRPO's Dance step loses the two constants of the log-prob (a misplaced parenthesis); here they are on
                 by default and off by name.
    ode          MixGRPO also scores its ODE steps against the SDE mean and never uses it; ours have no log-prob, and the
                 peer's numbers come out of sde_step when it is asked to score them.
    windows      MixGRPO's state machine trains nothing for one period at the end of its range; that is edge="empty".
"""

from __future__ import annotations

from typing import Any

import pytest
import sde_samplers as ss
import torch


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-6) -> None:
    torch.testing.assert_close(actual, expected.float().reshape(actual.shape), rtol=tolerance, atol=tolerance)


def schedule_of(params: dict[str, Any]) -> ss.SigmaSchedule:
    if params["schedule"].startswith("sd3"):
        return ss.flow_match(params["N"], 3.0, "diffusers")
    return ss.flow_match(params["N"], mu=ss.mu_from_tokens(1024, **ss.QWEN_IMAGE_SHIFT), shift_terminal=0.02)


def cap_of(vector: Any) -> float:
    """The second entry of the vector's schedule; only steps that start at sigma = 1 depend on it."""
    cap = schedule_of(vector.params).sigma_cap
    first = vector["in.sigma"].flatten() == 1
    if bool(first.any()):
        assert cap == float(vector["in.sigma_next"].flatten()[first][0])
    return cap


def test_schedules(schedules_vector: Any) -> None:
    p = schedules_vector.params
    if "seq" not in p:
        schedule = ss.flow_match(p["N"], p["shift"])
    else:
        preset = ss.FLUX_SHIFT if schedules_vector.case.startswith("flux") else ss.QWEN_IMAGE_SHIFT
        mu = ss.mu_from_tokens(p["seq"], **preset)
        assert mu == float(schedules_vector["out.mu"])
        schedule = ss.flow_match(p["N"], mu=mu, shift_terminal=p["config"].get("shift_terminal"))
    close(schedule.sigmas, schedules_vector["out.sigmas"], 2e-7)  # written on another processor
    close(schedule.timesteps(), schedules_vector["out.timesteps"], 2e-7)


def test_flow_sde(step_flow_sde_vector: Any) -> None:
    g = step_flow_sde_vector
    arguments: dict[str, Any] = {
        "kind": "flow_sde",
        "noise_level": g.params["noise_level"],
        "sigma_cap": cap_of(g),
        "prev_sample": g["in.prev_sample"],
    }
    step = ss.sde_step(g["in.x_t"], g["in.v"], g["in.sigma"], g["in.sigma_next"], **arguments)
    close(step.mean, g["out.mean"])
    close(step.log_prob, g["out.log_prob"])
    close(step.std, g["out.std_dev_t"].flatten() * g["out.sqrt_neg_dt"])  # theirs is per root of time
    bare = ss.sde_step(
        g["in.x_t"], g["in.v"], g["in.sigma"], g["in.sigma_next"], log_prob_form="density_no_constants", **arguments
    )
    close(bare.log_prob, g["out.log_prob_no_normalizer"])


def test_flow_cps(step_cps_vector: Any) -> None:
    g = step_cps_vector
    step = ss.sde_step(
        g["in.x_t"],
        g["in.v"],
        g["in.sigma"],
        g["in.sigma_next"],
        kind="flow_cps",
        noise_level=g.params["noise_level"],
        prev_sample=g["in.prev_sample"],
    )
    close(step.mean, g["out.mean"])
    close(step.std, g["out.std_dev_t"])
    close(step.log_prob, g["out.log_prob"])


def test_dance(step_dance_vector: Any) -> None:
    g = step_dance_vector
    t, u = float(g["in.sigma"]), float(g["in.sigma_next"])
    x, v = g["in.x_t"].float(), g["in.v"]
    arguments: dict[str, Any] = {
        "kind": "dance_sde",
        "noise_level": g.params["eta"],
        "prev_sample": g["in.prev_sample"],
    }
    step = ss.sde_step(x, v, t, u, **arguments)
    close(step.std, g["out.std_times_sqrt_dt_verl"])

    mean = step.mean
    if g.params["input_dtype"] == "bf16":
        # The peer rounds (u - t) v and t v to bf16 (and, on a CPU, the scalars first). Our mean is linear in v, so the
        # two rounded products can be put in afterwards.
        v_drift = _bf16_product(u - t, v) / (u - t)
        v_readout = _bf16_product(t, v) / t
        mean = ss.sde_step(x, v_readout, t, u, **arguments).mean + (u - t) * (v_drift - v_readout)
        close(x - t * v_readout, g["out.pred_x0"], 1e-5)
    # The 1/t² of the correction multiplies a difference the peer takes in fp32, hence the looser bound at small t.
    tolerance = 2e-6 if t > 0.1 else 5e-5
    close(mean, g["out.mean"], tolerance)
    for form, name in (("density", "out.log_prob"), ("density_no_constants", "out.log_prob_mixgrpo_no_constants")):
        close(ss.gaussian_log_prob(g["in.prev_sample"], mean, step.std, form=form), g[name], 4 * tolerance)
        if g.params["input_dtype"] == "f32":
            scored = ss.sde_step(x, v, t, u, log_prob_form=form, **arguments)
            close(scored.log_prob, g[name], 4 * tolerance)


def _bf16_product(scalar: float, v: torch.Tensor) -> torch.Tensor:
    return (torch.tensor(scalar).bfloat16().float() * v.float()).bfloat16().float()


def test_wan_sde(step_wan_sde_vector: Any) -> None:
    g = step_wan_sde_vector
    k = g.params["step_index"]
    sigmas = g["in.sigmas"].tolist()
    step = ss.sde_step(
        g["in.x_t"],
        g["in.v"],
        sigmas[k],
        sigmas[k + 1],
        kind="wan_sde",
        noise_level=1.0,
        sigma_cap=sigmas[1],
        prev_sample=g["in.prev_sample"],
    )
    close(step.mean, g["out.mean"])
    close(step.std, (g["out.std_dev_t"] * g["out.sqrt_neg_dt"]).flatten())
    close(step.log_prob, g["out.log_prob"])


def test_ode(step_ode_vector: Any) -> None:
    g = step_ode_vector
    sigmas = schedule_of(g.params).sigmas
    k = g.params["step_index"]
    step = ss.sde_step(g["in.x_t"], g["in.v"], sigmas[k], sigmas[k + 1], kind="ode", noise_level=0.7)
    close(step.prev_sample, g["out.next"], 3e-7)
    assert step.log_prob is None


def test_sampled(step_sampled_vector: Any) -> None:
    g = step_sampled_vector
    sigmas = schedule_of(g.params).sigmas
    k = g.params["step_index"]
    kind = {"sde": "flow_sde", "dance_sde": "dance_sde", "cps": "flow_cps"}[g.params["sde_type"]]
    drawn = ss.draw_noise(g["in.x_t"], torch.Generator().manual_seed(g.params["seed"]))
    close(drawn, g["in.noise"], 1e-6)  # torch turns the same random bits into normals with other instructions elsewhere
    t, u = float(sigmas[k]), float(sigmas[k + 1])
    for source in ({"noise": g["in.noise"]}, {"generator": torch.Generator().manual_seed(g.params["seed"])}):
        step = ss.sde_step(
            g["in.x_t"],
            g["in.v"],
            t,
            u,
            kind=kind,
            noise_level=g.params["noise_level"],
            sigma_cap=float(sigmas[1]),
            **source,
        )
        tolerance = 5e-5 if kind == "dance_sde" and t < 0.1 else 3e-6
        close(step.mean, g["out.mean"], tolerance)
        close(step.prev_sample, g["out.prev_sample"], tolerance)
        close(step.log_prob, g["out.log_prob"], tolerance)
        per_root_time = (t - u) ** 0.5 if kind == "flow_sde" else 1.0
        close(step.std, g["out.std_dev_t"].flatten() * per_root_time)


def test_solvers(step_dpm_vector: Any) -> None:
    g, p = step_dpm_vector, step_dpm_vector.params
    sigmas = g["in.sigmas"].tolist()
    if "out.traj" in g:
        order = p["order"] if "order" in p else {"dpm1": 1, "dpm2": 2, "ddim": 1, "flow": 1}[p["solver"]]
        x, history = g["in.x_init"], ()
        for k in range(p["N"]):
            v = g["in.v_all"][k]
            result = ss.dpm_step(
                x,
                v,
                sigmas[k],
                sigmas[k + 1],
                history,
                order=ss.effective_order(order, k, p["N"]),
                solver_type=p.get("solver_type", "midpoint"),
            )
            # The history has to keep what the full order needs, also where a step uses a lower one.
            history = (ss.read_out(x, v, sigmas[k]), *history)[: order - 1]
            x = result.prev_sample
            close(x, g["out.traj"][k + 1])
            if order == 1:
                euler = ss.sde_step(
                    g["out.traj"][k], g["in.v_all"][k], sigmas[k], sigmas[k + 1], kind="ode", noise_level=0
                )
                close(euler.prev_sample, g["out.traj"][k + 1])
    else:
        k = p["step_index"]
        velocity = (g["in.x"] - g["in.x0"]) / sigmas[k]  # the peer is handed x̂0
        step = ss.sde_step(
            g["in.x"], velocity, sigmas[k], sigmas[k + 1], kind="ddim", noise_level=p["eta"], noise=g["in.noise"]
        )
        close(step.prev_sample, g["out.next"])
        close(step.mean, g["out.mean"])
        total = float(g["out.std_dev_t"]) * float(g["out.dt_sqrt"])  # theirs is split into a rate and a root of time
        assert float(step.std[0]) == pytest.approx(total, rel=1e-6)


def test_windows(windows_vector: Any) -> None:
    case, p = windows_vector.case, windows_vector.params
    if case.startswith("mix"):
        steps, size = p["iters"], p["group_size"]
        arguments: dict[str, Any] = {
            "size": size,
            "range": (0, p["max_timesteps"]),
            "period": p["iters_per_group"],
            "stride": 1 if p["prog_overlap"] else size,
            "at_end": "roll_back" if p["roll_back"] else "clamp",
            "edge": "empty",
        }
        window = ss.Progressive(**arguments)
        for i in range(steps):
            start, end = int(windows_vector["out.start"][i]), int(windows_vector["out.end"][i])
            assert window.start(i) == int(windows_vector["out.cur"][i])
            assert window.steps(i) == (() if start < 0 else tuple(range(start, end)))
    else:
        size = p.get("size", p.get("sde_window_size"))
        bounds = tuple(p.get("range", p.get("sde_window_range")))
        drawn = ss.Random(size, bounds, seed=p.get("sde_window_seed", 0))
        for i, (low, high) in enumerate(windows_vector["out.window"].tolist()):
            assert drawn.steps(i) == tuple(range(low, high))


def test_mixgrpo_rollouts(rollout_mixgrpo_vector: Any) -> None:
    g, p = rollout_mixgrpo_vector, rollout_mixgrpo_vector.params
    options = p["args"]
    window = [k for k, deterministic in enumerate(p["deterministic"]) if not deterministic]
    flash = options["dpm_algorithm_type"] != "null"
    kind: ss.Kind = "flow_sde" if options["flow_grpo_sampling"] else "dance_sde"
    full = ss.flow_match(p["N"], options["shift"], "linear")
    close(full.sigmas, g["in.sigmas"], 2e-7)
    schedule = full
    if flash:
        schedule = published_tail(full, window[-1] + 1, options["shift"], options["dpm_post_compress_ratio"])
    expected = g["out.all_latents"]
    steps = schedule.num_steps
    assert expected.shape[1] == steps + 1

    # Flow-SDE draws noise in every step, used or not; the Dance step draws only where it is stochastic.
    noise = g["in.noise"]
    if kind == "dance_sde":
        noise = torch.zeros_like(noise)
        noise[window] = g["in.noise"][: len(window)]

    seen: list[torch.Tensor] = []

    def velocity(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        seen.append(x.clone())
        return _toy(x, sigma)

    trajectory = ss.rollout(
        velocity,
        g["in.z0"],
        schedule,
        kind=kind,
        noise_level=options["eta"],
        window=window,
        step_noise=noise[:steps],
        solver="dpm2" if flash else "euler",
        solver_type=options["dpm_solver_type"],
        solver_steps="post",
    )
    close(torch.stack([*seen, trajectory.final], dim=1), expected, 3e-6)
    close(trajectory.final, g["out.final"], 3e-6)
    form: ss.LogProbForm = "density" if kind == "flow_sde" else "density_no_constants"
    scored = ss.rollout(
        _toy,
        g["in.z0"],
        schedule,
        kind=kind,
        noise_level=options["eta"],
        window=window,
        step_noise=noise[:steps],
        log_prob_form=form,
    )
    assert scored.log_probs is not None
    close(scored.log_probs, g["out.log_probs"][:, window], 1e-5)

    # The steps outside the window: no log-prob here; scored on request, they are the peer's for Flow-SDE. (Its Dance step
    # reports 0 there, since it scores the sample against itself, and its DPM steps are not Flow-SDE steps.)
    for k in set(range(steps)) - set(window):
        if kind == "flow_sde" and not flash:
            x = expected[:, k]
            step = ss.sde_step(
                x,
                _toy(x, schedule.sigmas[k : k + 1]),
                schedule.sigmas[k],
                schedule.sigmas[k + 1],
                kind=kind,
                noise_level=options["eta"],
                sigma_cap=schedule.sigma_cap,
                prev_sample=expected[:, k + 1],
            )
            close(step.log_prob, g["out.log_probs"][:, k], 1e-5)


def published_tail(full: ss.SigmaSchedule, end: int, shift: float, ratio: float) -> ss.SigmaSchedule:
    """MixGRPO-Flash's own grid: the points of the tail lie evenly before the shift."""
    points = max(int((full.num_steps - (end - 1)) * ratio), 2)
    even = torch.linspace(float(torch.linspace(1.0, 0.0, full.num_steps + 1)[end]), 0.0, points)
    shifted = shift * even / (1 + (shift - 1) * even)
    return ss.SigmaSchedule(torch.cat([full.sigmas[: end + 1], shifted[1:]]))


def _toy(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    return (0.7 * x + 0.3 * torch.sin(3 * x)) * (1 - 0.4 * int(1000 * sigma[0]) / 1000)  # the peer truncates the time
