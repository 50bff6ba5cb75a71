"""Ray: started on this machine or joined, and left without a process behind."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from . import keeper
from .config import RayConfig
from .doors import FOLDERS
from .errors import TrainerError

# Read when Ray is imported. Without the first, Ray's uv hook starts every worker through `uv run` with an uploaded copy of the
# working folder, and each worker installs torch again.
ENVIRONMENT = {
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_WAIT_POLICY": "passive",  # spinning OpenMP threads starve the reward workers on a laptop
    "TOKENIZERS_PARALLELISM": "false",
}


FORWARDED = (
    "HF_*", "HUGGINGFACE_*", "TRANSFORMERS_*", "DIFFUSERS_*", "NCCL_*", "GLOO_*", "TORCH_NCCL_*", "WANDB_*", "MLFLOW_*",
    "*_proxy", "*_PROXY", "OPENAI_*", "OMNI_ROLLOUT_*", FOLDERS,
)  # fmt: skip
"""Variables of the command's environment that a cluster's processes get too; no others. Their values are never printed."""


def forwarded() -> dict[str, str]:
    """What a cluster's processes get of this process's environment."""
    return {name: value for name, value in os.environ.items() if any(fnmatchcase(name, one) for one in FORWARDED)}


def prepare_environment() -> None:
    """Set what must be in the environment before Ray is imported. A value that the user has set stays, but for the uv hook."""
    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    # `ray start` demands the token where this machine has one. A driver that joins must then send it, and Ray decides when it is
    # imported whether it does; a cluster without tokens ignores it. Later it may not change: a Ray that this process starts
    # would demand what the process does not send.
    if "RAY_AUTH_MODE" not in os.environ and "ray" not in sys.modules and _has_token():
        os.environ["RAY_AUTH_MODE"] = "token"


def _has_token() -> bool:
    given = any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    return given or (Path.home() / ".ray" / "auth_token").is_file()


@cache
def _own_token() -> str:
    """The token of the Rays that this process starts. One for all: Ray reads it once."""
    return secrets.token_hex(32)


_HEAD_WAIT = "RAY_gcs_rpc_server_reconnect_timeout_s"


@contextmanager
def _own_environment(folder: Path) -> Iterator[None]:
    """What the processes of a local Ray inherit.

    A token that is in no file: Ray would leave ~/.ray/auth_token behind, which later clusters then demand. A mark for `keeper`. And
    20 s of patience with Ray's head, which does not come back once it is gone; Ray's default is a minute.
    """
    names = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", _HEAD_WAIT, keeper.MARK)
    before = {name: os.environ.get(name) for name in names}
    os.environ.setdefault(_HEAD_WAIT, "20")
    os.environ[keeper.MARK] = str(folder)
    if not _has_token() and before["RAY_AUTH_MODE"] in (None, "token"):
        os.environ["RAY_AUTH_TOKEN"] = _own_token()
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _kept(folder: Path) -> Iterator[None]:
    """A `keeper` beside this process: nothing of the session outlives it, even where it is killed."""
    command = [sys.executable, "-IS", keeper.__file__, str(folder)]
    watching = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)  # no Ctrl-C of the terminal
    try:
        yield
    finally:
        watching.communicate()


def memory_mb() -> int:
    """Memory of this machine, or of the container that this process is in, in MiB."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            found.append(int(Path(file).read_text()))
    return min(found) // 2**20


def check_ray(config: RayConfig) -> None:
    """Raise `TrainerError` for settings that a Ray on this machine cannot have. A joined cluster has its own."""
    address = cluster_address(config)
    host, _, port = address.rpartition(":")
    if address not in ("", "auto") and not (host and port.isdigit()):
        raise TrainerError(
            f"ray.address={address!r} (or RAY_ADDRESS) is no address of a Ray cluster; give HOST:PORT, or auto for the one on this "
            "machine, or leave it empty to start one"
        )
    if not address and config.object_store_mb > memory_mb():
        raise TrainerError(
            f"ray.object_store_mb={config.object_store_mb} is out of range: it must be 75 to {memory_mb()}, the memory of this "
            "machine"
        )


def cluster_address(config: RayConfig) -> str:
    """The cluster to join; empty starts a Ray of its own."""
    address = config.address or os.environ.get("RAY_ADDRESS", "")
    return "" if address == "local" else address


JOIN_TIMEOUT_S = 30.0
_JOIN = "import sys, ray; ray.init(address=sys.argv[1], log_to_driver=False, logging_level='CRITICAL')"
# The last counts attempts, one a second: 20 by default, also where the token is refused each time.
_PATIENCE = {
    "RAY_gcs_rpc_server_connect_timeout_s": "3",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
    "RAY_NUM_REDIS_GET_RETRIES": "5",
}


def _check_cluster(address: str) -> None:
    """Join and leave the cluster in another process: to one that is gone, Ray tries for minutes and then ends its process."""
    began = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-c", _JOIN, address],
            env={**os.environ, **_PATIENCE},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=JOIN_TIMEOUT_S - 2,
        )
        if done.returncode == 0:
            return
        said = done.stderr
    except subprocess.TimeoutExpired as error:
        said = error.stderr.decode(errors="replace") if isinstance(error.stderr, bytes) else error.stderr or ""
    if "InvalidAuthToken" in said or "AuthenticationError" in said:
        raise TrainerError(
            f"the Ray cluster at ray.address={address!r} demands a token that this machine does not have: copy ~/.ray/auth_token "
            "of its head node here, or set RAY_AUTH_TOKEN"
        )
    lines = [line.strip() for line in said.splitlines() if "Error" in line] or ["no answer"]
    raise TrainerError(
        f"no Ray cluster answers at ray.address={address!r} within {time.monotonic() - began:.0f} s ({lines[-1][:200]}); start one "
        "with `uv run ray start --head`, or leave ray.address (and RAY_ADDRESS) empty to run on this machine"
    )


def available_cpus() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


SYSTEM = {
    # Ray's head would keep a record of each of the last 100,000 calls, and every process those it has not sent: 60 MB after 18,000
    # calls, for a dashboard that is not there.
    "task_events_report_interval_ms": 0,
    # The head gives a raylet up after five looks that find none. With Ray's 3 s between two, a run ended 19 s after the death of
    # its raylet; now after 8 s.
    "health_check_period_ms": 1000,
    # Ray would start a worker for each core that nobody has asked for.
    "prestart_worker_first_driver": False,
}
"""Settings of a local Ray that differ from Ray's own."""


@contextmanager
def ray_session(config: RayConfig) -> Iterator[None]:
    """Ray for the length of a run.

    A local Ray keeps its files in a temporary folder of its own, so that a second user of the machine is not stopped by
    the first one's files, and removes it at the end. A cluster that was running before is only left.
    """
    prepare_environment()
    import ray

    if ray._private.ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV:
        raise TrainerError(
            "Ray was imported before ray_trainer could set RAY_ENABLE_UV_RUN_RUNTIME_ENV=0; set it in the environment, "
            "or import ray after calling ray_trainer.cluster.prepare_environment()"
        )
    if ray.is_initialized():  # a program that embeds the trainer owns its Ray
        yield
        return
    address = cluster_address(config)
    env: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    hook = {"worker_process_setup_hook": "ray_trainer.doors.search_folders"}
    if address:
        _check_cluster(address)
        ray.init(address=address, runtime_env={"env_vars": ENVIRONMENT | forwarded(), **hook}, **env)
        try:
            yield
        finally:
            ray.shutdown()
        return
    # Short on purpose: the path of a Unix socket inside it may not exceed 107 bytes.
    place = Path("/tmp" if sys.platform != "win32" else tempfile.gettempdir())
    _sweep(place)
    folder = Path(tempfile.mkdtemp(prefix=f"drl-{os.getpid()}-", dir=place))
    with _kept(folder), _own_environment(folder):
        try:
            ray.init(
                address="local",  # whatever RAY_ADDRESS says
                num_cpus=config.num_cpus or max(available_cpus(), 2),
                include_dashboard=False,
                object_store_memory=config.object_store_mb * 2**20,
                # Ray opens its folder to every user, and writes variables of a runtime_env into its logs: the outer one is closed,
                # and the processes inherit what they need.
                _temp_dir=str(folder / "ray"),
                _system_config=SYSTEM,
                runtime_env=hook,
                **env,
            )
            yield
        finally:
            ray.shutdown()


def _sweep(place: Path) -> None:
    """Remove what sessions that were killed outright left behind: folders whose process is gone, our own ones only."""
    for folder in place.glob("drl-*-*"):
        try:
            os.kill(int(folder.name.split("-")[1]), 0)
        except ProcessLookupError:
            shutil.rmtree(folder, ignore_errors=True)
        except (ValueError, PermissionError):  # not ours
            continue
