"""Ray: started on this machine or joined, and left without a process behind."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ray_trainer.config import RayConfig
from ray_trainer.errors import TrainerError

# Read when Ray is imported. Without the first, Ray's uv hook starts every worker through `uv run` with an uploaded copy of the
# working folder, and each worker installs torch again.
ENVIRONMENT = {
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_WAIT_POLICY": "passive",  # spinning OpenMP threads starve the reward workers on a laptop
    "TOKENIZERS_PARALLELISM": "false",
}


def prepare_environment() -> None:
    """Set what must be in the environment before Ray is imported. A value that the user has set stays, but for the uv hook."""
    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"


def available_cpus() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


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
    address = config.address or os.environ.get("RAY_ADDRESS", "")
    env: dict[str, Any] = {
        "runtime_env": {"env_vars": dict(ENVIRONMENT)},
        "log_to_driver": False,
        "logging_level": "ERROR",
    }
    if address:
        try:
            ray.init(address=address, **env)
        except ConnectionError as error:
            raise TrainerError(
                f"no Ray cluster answers at ray.address={address!r}: {error}; start one with `ray start --head`, or leave "
                "ray.address (and RAY_ADDRESS) empty to run on this machine"
            ) from error
        try:
            yield
        finally:
            ray.shutdown()
        return
    # Short on purpose: the path of a Unix socket inside it may not exceed 107 bytes.
    place = Path("/tmp" if sys.platform != "win32" else tempfile.gettempdir())
    _sweep(place)
    folder = Path(tempfile.mkdtemp(prefix=f"drl-{os.getpid()}-", dir=place))
    try:
        ray.init(
            num_cpus=config.num_cpus or max(available_cpus(), 2),
            include_dashboard=False,
            object_store_memory=config.object_store_mb * 2**20,
            _temp_dir=str(folder),
            **env,
        )
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def _sweep(place: Path) -> None:
    """Remove what sessions that were killed outright left behind: folders whose process is gone, our own ones only."""
    for folder in place.glob("drl-*-*"):
        try:
            os.kill(int(folder.name.split("-")[1]), 0)
        except ProcessLookupError:
            shutil.rmtree(folder, ignore_errors=True)
        except (ValueError, PermissionError):  # not ours
            continue
