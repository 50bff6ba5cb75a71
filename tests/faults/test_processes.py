"""Processes that are killed: what is left, what goes on, what is said."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
from harness import SECRETS, find_secret

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
PATIENCE = {"RAY_NUM_REDIS_GET_RETRIES": "1"}  # it would try 20 times


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
