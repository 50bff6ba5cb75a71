"""Which checkpoint of a run is whole, and how the next one becomes it.

A checkpoint is a folder `step_000040` written by the engine (weights, adapters, optimizer, schedule, random state). Everything
else that decides the next step is a function of (seed, step). Once the folder is complete, `files.json` in it gets the size and the
checksum of each file, and then `latest.json` is replaced atomically. So a run killed at any moment resumes from a whole one, and
one that a disk has damaged since is known, and the one before it is taken.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from .errors import TrainerError

_FILES = "files.json"


def step_folder(root: Path, step: int) -> Path:
    """Where the checkpoint taken after `step` steps lies."""
    return root / f"step_{step:06d}"


def publish(root: Path, step: int, keep: int) -> None:
    """Make `step` the checkpoint to resume from and drop all but the newest `keep`."""
    _write(step_folder(root, step) / _FILES, _contents(step_folder(root, step)))
    _write(root / "latest.json", {"step": step})
    older = [one for one in _steps(root) if one < step]
    for one in older[keep - 1 :]:
        shutil.rmtree(step_folder(root, one))


def latest(root: Path) -> int | None:
    """Step of the newest whole checkpoint, or None where none was finished.

    Raises:
        TrainerError: the pointer is unreadable, its folder is gone, or no checkpoint is whole.
    """
    pointed = _pointed(root)
    if pointed is None:
        return None
    for step in _steps(root):
        if step <= pointed and not damage(step_folder(root, step)):
            return step
    raise TrainerError(
        f"{step_folder(root, pointed)} is damaged ({damage(step_folder(root, pointed))}), and no older checkpoint is whole; "
        "start over with trainer.on_existing=delete"
    )


def before(root: Path, step: int) -> int | None:
    """The newest whole checkpoint of no more than `step` steps; None where there is none."""
    return next((one for one in _steps(root) if one <= step and not damage(step_folder(root, one))), None)


def passed_over(root: Path) -> list[str]:
    """A line for each damaged checkpoint that is newer than the one of `latest`."""
    pointed, taken = _pointed(root), latest(root)
    if pointed is None or taken is None:
        return []
    return [
        f"warning: checkpoint {step_folder(root, step)} is damaged ({damage(step_folder(root, step))}); the one of step {taken} is "
        "taken"
        for step in _steps(root)
        if taken < step <= pointed
    ]


def damage(folder: Path) -> str:
    """What is wrong with a published checkpoint: a file of another size or content, or none. Empty when it is whole, and for
    a folder of an older version, which has no list of its files."""
    listed = folder / _FILES
    if not listed.exists():
        return ""
    try:
        wanted, found = json.loads(listed.read_bytes()), _contents(folder)
        for name, (size, checksum) in wanted.items():
            if name not in found:
                return f"{name} is gone"
            if found[name][0] != size:
                return f"{name} has {found[name][0]} bytes and was written with {size}"
            if found[name][1] != checksum:
                return f"{name} holds other bytes than were written"
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        return f"{error.__class__.__name__} while reading it: {error}"
    return ""


def _pointed(root: Path) -> int | None:
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


def _steps(root: Path) -> list[int]:
    """Of all checkpoints, the newest first."""
    return sorted((int(p.name[5:]) for p in root.glob("step_*") if p.is_dir()), reverse=True)


def _contents(folder: Path) -> dict[str, list[int]]:
    """Size and checksum of every file; large ones are read beside each other."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p != folder / _FILES)
    with ThreadPoolExecutor(8) as pool:
        sums = list(pool.map(lambda p: _checksum(p, (stat := p.stat()).st_size, stat.st_mtime_ns), files))
    return {p.relative_to(folder).as_posix(): [p.stat().st_size, s] for p, s in zip(files, sums, strict=True)}


@cache
def _checksum(file: Path, size: int, changed: int) -> int:
    """CRC-32 of a file that has this size and time of change: each state of a file is read once."""
    value = 0
    with file.open("rb") as opened:
        # Small: the C library may keep a block of every thread that there ever was.
        while block := opened.read(1 << 18):
            value = zlib.crc32(block, value)
    return value


def _write(file: Path, content: Any) -> None:
    """JSON that is there as a whole or not at all."""
    scratch = file.with_suffix(".tmp")
    with scratch.open("w", encoding="utf-8") as opened:
        json.dump(content, opened)
        opened.flush()
        os.fsync(opened.fileno())
    scratch.replace(file)
