"""Processes that are killed: what is left, what goes on, what is said."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from harness import SECRETS, Fault, Run, find_secret, rows_of

SESSION = """
import time
from ray_trainer.cluster import prepare_environment, ray_session
prepare_environment()
from ray_trainer.config import RayConfig
with ray_session(RayConfig(num_cpus=2, object_store_mb=80)):
    import ray
    @ray.remote
    class Waits:
        def started(self): return True
    ray.get((actor := Waits.remote()).started.remote())
    print(ray.get_runtime_context().gcs_address, flush=True)
    time.sleep(600)
"""
JOIN = "import sys, ray; ray.init(address=sys.argv[1], log_to_driver=False, logging_level='CRITICAL'); print('joined')"
PATIENCE = {"RAY_gcs_rpc_server_connect_timeout_s": "3", "RAY_gcs_rpc_server_reconnect_timeout_s": "5"}


def until(condition, timeout):
    """Wait for a condition; False when it did not come."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.2)
    return False


def test_a_local_ray_is_closed_to_others_and_nothing_of_it_outlives_a_kill():
    clean = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    program = subprocess.Popen(
        [sys.executable, "-c", SESSION], env={**clean, **SECRETS}, stdout=subprocess.PIPE, text=True
    )
    try:
        address = program.stdout.readline().strip()
        driver = psutil.Process(program.pid)
        (folder,) = Path("/tmp").glob(f"drl-{program.pid}-*")
        assert folder.stat().st_mode & 0o077 == 0
        assert find_secret(folder) == []
        every = driver.children(recursive=True)
        boards = [one for one in every if "dashboard.py" in " ".join(one.cmdline())]
        assert not [c for one in boards for c in one.net_connections("inet") if c.status == psutil.CONN_LISTEN]
        stranger = subprocess.run(
            [sys.executable, "-c", JOIN, address],
            env={**clean, **PATIENCE, "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert "joined" not in stranger.stdout
        assert "uth" in stranger.stderr  # it lacks the token
        every = driver.children(recursive=True)
        assert len(every) >= 4
        program.kill()
        assert until(lambda: not [one for one in every if one.is_running() and one.status() != "zombie"], 30)
        assert until(lambda: not folder.exists(), 30)
    finally:
        program.kill()
        program.wait()


POINTS = {
    "load": ("ray_trainer.workers:ActorRolloutRefWorker.init_model", 1),
    "first step": ("ray_trainer.workers:ActorRolloutRefWorker.generate", 2),
    "update": ("fsdp_diffusers_engine.engine:DiffusersFSDPEngine.optimizer_step", 1),
    "sync": ("ray_trainer.workers:ActorRolloutRefWorker.update_weights", 2),
    "validation": ("run_report.gallery:save_validation", 1),
    "row": ("run_report.metrics:MetricsWriter.append", 2),
    "checkpoint": ("fsdp_diffusers_engine.checkpoint:write_record", 1),
    "rename": ("ray_trainer.checkpoint:_write", 2),
    "end": ("ray_trainer.workers:ActorRolloutRefWorker.export", 1),
    "report": ("run_report.page:page", 1),
}
"""Where a trial stops the run: a function, and which of its calls after the start."""
ROLES = ("driver", "worker", "reward", "raylet", "gcs")
TRIALS = [(point, role) for point in POINTS for role in ROLES] + [("random", role) for role in ROLES for _ in range(2)]
DEADLINE_S = 300
FOLDER = Path(os.environ.get("FAULTS_FOLDER", "runs/faults"))
"""Where trials lie, so that the same command goes on where it was stopped."""


def trial(start, place, number, keys=()):
    """Kill one process at one point of a run in `place`, going on with what the trial before left. Returns what was seen."""
    point, role = TRIALS[number]
    chosen = POINTS.get(point, ("ray_trainer.workers:ActorRolloutRefWorker.generate", 1 + number % 4))
    run = Run(start, place, keys, Fault(*chosen[:1], "hold", call=chosen[1], seconds=3.0))
    began = time.monotonic()
    try:
        run.reached()
        run.kill(role)
    except AssertionError:  # the run was over before it came there
        assert run.program.process.poll() == 0, f"{point}/{role}: {run.program.process.poll()}"
    done = run.program.wait(DEADLINE_S)  # a run that hangs fails here
    assert done.left_over == [], f"{point}/{role}: {done.left_over}"
    assert find_secret(place) == []
    assert done.code in ((0,) if role == "reward" else (0, 1, -signal.SIGKILL)), f"{point}/{role}: {done.err[-3000:]}"
    rows, saved = run.rows(), run.run / "checkpoints" / "latest.json"
    kept = json.loads(saved.read_text())["step"] if saved.exists() else 0
    assert kept >= (max([1, *rows]) - 1) // 2 * 2, f"{point}/{role}: rows to {max(rows)}, checkpoint of {kept}"
    seconds = round(time.monotonic() - began, 1)
    return {
        "trial": number,
        "point": point,
        "role": role,
        "code": done.code,
        "checkpoint": kept,
        "seconds": seconds,
    }, run


@pytest.fixture(scope="module")
def undisturbed(start):
    """Rows of the run that nobody kills."""
    place = FOLDER / "undisturbed"
    if len(rows_of(place / "run")) < 7:
        shutil.rmtree(place, ignore_errors=True)
        done = Run(start, place).program.wait(DEADLINE_S)
        assert done.code == 0, done.err[-3000:]
    return rows_of(place / "run")


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", range(len(TRIALS)), ids=["-".join(one).replace(" ", "-") for one in TRIALS])
def test_a_kill_anywhere_loses_no_step_and_leaves_nothing(start, undisturbed, number):
    """Each trial goes on with the run that the one before has left; a finished run makes room for the next."""
    log, place = FOLDER / "trials.jsonl", FOLDER / "run"
    seen = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    if number in {one["trial"] for one in seen}:
        pytest.skip("done before; remove runs/faults to begin anew")
    told, run = trial(start, place, number)
    rows = run.rows()
    assert [step for step, row in rows.items() if row != undisturbed[step]] == []
    with log.open("a") as file:
        file.write(json.dumps(told) + "\n")
    if told["code"] == 0:
        assert sorted(rows) == list(range(7))
        shutil.rmtree(place)
