"""What a run ran on, as plain text pairs; versions are read from package metadata, so nothing heavy is imported."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from .errors import ReportError

FILE_NAME = "environment.json"
_PACKAGES = (
    "torch",
    "diffusers",
    "transformers",
    "peft",
    "accelerate",
    "ray",
    "tensordict",
    "omegaconf",
    "numpy",
    "pillow",
)


def environment() -> dict[str, str]:
    """Python, system, processor count and the versions of the packages that change results."""
    found = {
        "python": sys.version.split()[0],
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpus": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
    }
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def save_environment(run_dir: str | os.PathLike[str], extra: Mapping[str, str] | None = None) -> Path:
    """Write `environment.json` for the report to show: what `environment` finds, then `extra` (the device, say)."""
    path = Path(run_dir) / FILE_NAME
    path.write_text(json.dumps({**environment(), **(extra or {})}, indent=1) + "\n", encoding="utf-8")
    return path


def load_environment(run_dir: str | os.PathLike[str]) -> dict[str, str]:
    """The stored environment of a run; where none was stored, this process's own."""
    path = Path(run_dir) / FILE_NAME
    if not path.exists():
        return environment()
    try:
        return {str(key): str(value) for key, value in json.loads(path.read_bytes()).items()}
    except (ValueError, AttributeError, RecursionError) as error:
        raise ReportError(f"{path} is damaged ({error}); delete it, it is written anew") from error
