"""Which checkpoint of a run is complete, and how the next one becomes it.

A checkpoint is a folder `step_000040` written by the engine (weights, adapters, optimizer, schedule, random state). Everything
else that decides the next step is a function of (seed, step). `latest.json` is replaced atomically once the folder is whole, so
a run killed at any moment resumes from a complete one.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from .errors import TrainerError


def step_folder(root: Path, step: int) -> Path:
    """Where the checkpoint taken after `step` steps lies."""
    return root / f"step_{step:06d}"


def publish(root: Path, step: int, keep: int) -> None:
    """Make `step` the checkpoint to resume from and drop all but the newest `keep`."""
    pointer = root / "latest.json"
    scratch = pointer.with_suffix(".tmp")
    with scratch.open("w", encoding="utf-8") as file:
        json.dump({"step": step}, file)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(pointer)
    older = sorted(p for p in root.glob("step_*") if p.is_dir() and int(p.name[5:]) < step)
    for folder in older[: max(len(older) - keep + 1, 0)]:
        shutil.rmtree(folder)


def latest(root: Path) -> int | None:
    """Step of the newest complete checkpoint, or None where none was finished.

    Raises:
        TrainerError: the pointer is unreadable or its folder is gone.
    """
    pointer = root / "latest.json"
    if not pointer.exists():
        return None
    try:
        step = int(json.loads(pointer.read_text(encoding="utf-8"))["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise TrainerError(
            f"{pointer} is unreadable ({error!r}); write the step of a whole checkpoint into it"
        ) from error
    if not step_folder(root, step).is_dir():
        raise TrainerError(
            f"{pointer} names step {step}, but {step_folder(root, step)} is gone; start over with "
            "trainer.on_existing=delete"
        )
    return step
