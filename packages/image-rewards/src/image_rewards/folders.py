"""Read pictures from a folder or a JSON-lines file, a batch at a time."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .base import RewardSample
from .errors import RewardConfigError, RewardError, RewardInputError, require
from .prompt_files import lines_of, text_of, without_nulls
from .wire import decode_picture

FORMATS = ("PNG", "JPEG", "WEBP")
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
NO_PICTURE = np.zeros((3, 0, 0), np.uint8)


@dataclass(frozen=True)
class Item:
    """One entry: its name, its sample, and why it could not be read (the sample then has no pixels)."""

    name: str
    sample: RewardSample
    error: RewardError | None = None


def read_samples(path: Path, root: Path | None, batch_size: int) -> Iterator[list[Item]]:
    """Batches of items.

    A picture: that one. A folder: every .png, .jpg, .jpeg and .webp in it, by name; prompt and metadata from NAME.json
    ({"prompt", "metadata"}) or the prompt from NAME.txt beside it, where there is one.
    A file: JSON lines {"image": PATH, or "frames": [PATH, ...], "prompt", "metadata"}, paths relative to `root`
    (default: the file's folder) and inside it.
    """
    if path.is_dir():
        entries: Iterator[Item] = (
            _from_folder(file) for file in sorted(path.iterdir()) if file.suffix.lower() in SUFFIXES
        )
    elif path.suffix.lower() in SUFFIXES and path.is_file():
        entries = iter([_from_folder(path)])
    elif path.is_file():
        entries = _from_lines(path, (root or path.parent).resolve())
    else:
        raise RewardConfigError(f"{str(path)!r} is neither a folder nor a file.")
    found = False
    while batch := list(itertools.islice(entries, batch_size)):
        found = True
        yield batch
    require(found, f"{str(path)!r} holds no picture ({', '.join(SUFFIXES)}; subfolders are not searched).")


def _from_folder(file: Path) -> Item:
    prompt, metadata = "", dict[str, Any]()
    try:
        beside = file.with_suffix(".json")
        if beside.is_file():
            prompt, metadata = _prompt_of(_parse(text_of(beside), str(beside)), str(beside))
        elif file.with_suffix(".txt").is_file():
            prompt = text_of(file.with_suffix(".txt")).strip()
        return Item(file.name, RewardSample(_read(file), prompt, metadata, uid=file.name))
    except (RewardError, OSError, UnicodeError) as error:
        return Item(file.name, RewardSample(NO_PICTURE, prompt, metadata, uid=file.name), _typed(error))


def _from_lines(path: Path, root: Path) -> Iterator[Item]:
    for number, line in enumerate(lines_of(text_of(path)), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        name, prompt, metadata = f"line {number}", "", dict[str, Any]()
        try:
            row = _parse(line, where)
            prompt, metadata = _prompt_of(row, where)
            given = row.get("frames", row.get("image"))
            paths: list[Any] = given if isinstance(given, list) else [given]
            texts = bool(paths) and all(isinstance(path, str) for path in paths)
            _must(texts, f"{where}: needs 'image': PATH, or 'frames': [PATH, ...].")
            name = paths[0]
            frames = [_read(_inside(root, path, where)) for path in paths]
            _must(all(frame.shape == frames[0].shape for frame in frames), f"{where}: the frames differ in size.")
            image = np.stack(frames) if "frames" in row else frames[0]
            yield Item(name, RewardSample(image, prompt, metadata, uid=name, index=number))
        except (RewardError, OSError, UnicodeError) as error:
            yield Item(name, RewardSample(NO_PICTURE, prompt, metadata, uid=name, index=number), _typed(error))


def _must(holds: bool, message: str) -> None:
    require(holds, message, RewardInputError)


def _inside(root: Path, path: str, where: str) -> Path:
    full = (root / path).resolve()
    out = f"{where}: the path {path!r} leads out of {str(root)!r}. Give --root to allow a larger folder."
    _must(full.is_relative_to(root), out)
    return full


def _read(file: Path) -> np.ndarray:
    return decode_picture(file.read_bytes(), str(file), FORMATS)


def _parse(text: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RewardInputError(f"{where}: not JSON: {error}") from error
    _must(isinstance(row, dict), f"{where}: a {type(row).__name__}, not an object.")
    return dict(without_nulls(row))


def _prompt_of(row: dict[str, Any], where: str) -> tuple[str, dict[str, Any]]:
    prompt, metadata = row.get("prompt", ""), row.get("metadata", {})
    fits = isinstance(prompt, str) and isinstance(metadata, dict)
    _must(fits, f"{where}: 'prompt' must be a text and 'metadata' an object.")
    return prompt, metadata


def _typed(error: Exception) -> RewardError:
    return error if isinstance(error, RewardError) else RewardInputError(f"{type(error).__name__}: {error}")
