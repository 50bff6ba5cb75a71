"""`samples/step_NNNNNN/`: the pictures of one validation, kept with everything that was measured on them.

    samples/step_000040/
        grid.png      a row per prompt, a column per seed, no gaps: tile (r, c) starts at (c·width, r·height)
        index.json    prompt, seed, uid, reward and components of every tile, and where it lies
        full/0000.png whole pictures, only when they are larger than a tile
        full/0000.mp4 videos that play, where PyAV is installed (the extra `video`)

Shapes: N samples, T frames, C H W picture. A video's tile is its first, middle and last frame side by side.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from .errors import ReportError
from .video import write_video

FOLDER = "samples"
MAX_TILE = 256  # longest side of a tile in pixels; larger pictures are scaled down in the grid and kept whole in full/
_RECORD_KEYS = ("prompt", "seed", "uid", "reward", "components")


@dataclass(frozen=True)
class SampleRecord:
    """One tile: what was asked for, what came of it, and where it lies in the grid."""

    prompt: str
    seed: int
    uid: str
    reward: float
    components: dict[str, float]
    row: int
    column: int

    @property
    def strict(self) -> bool | None:
        """Whether the reward's `strict` component says that every part is right; None when it has no such component."""
        value = self.components.get("strict")
        return None if value is None else value >= 1.0

    def value(self, name: str) -> float:
        """A component by name, or the reward itself for "reward"; NaN when there is none."""
        return self.reward if name == "reward" else self.components.get(name, math.nan)


@dataclass(frozen=True)
class Validation:
    """One folder of `samples/`, read back. `tile` is (width, height) in pixels."""

    step: int
    folder: Path
    tile: tuple[int, int]
    rows: int
    columns: int
    frames: int
    records: tuple[SampleRecord, ...] = field(repr=False)

    @cached_property
    def grid(self) -> Image.Image:
        with Image.open(self.folder / "grid.png") as image:
            return image.convert("RGB")

    @cached_property
    def by_place(self) -> dict[tuple[int, int], SampleRecord]:
        return {(record.row, record.column): record for record in self.records}

    @cached_property
    def prompts(self) -> dict[int, str]:
        """The prompt of each row."""
        return {record.row: record.prompt for record in reversed(self.records)}

    def video(self, record: SampleRecord) -> Path | None:
        """The file that plays, of a video."""
        file = self.folder / "full" / f"{self.records.index(record):04d}.mp4"
        return file if self.frames > 1 and file.is_file() else None

    def picture(self, row: int, column: int) -> Image.Image:
        width, height = self.tile
        return self.grid.crop((column * width, row * height, (column + 1) * width, (row + 1) * height))


def save_validation(
    run_dir: str | os.PathLike[str], step: int, images: np.ndarray, records: Sequence[Mapping[str, Any]]
) -> Path:
    """Write the pictures of a validation; a folder of the same step is replaced. Returns the folder.

    Args:
        images: uint8 [N, C, H, W], or [N, T, C, H, W] for videos; C is 1 or 3.
        records: N mappings with `prompt`, `seed`, `uid`, `reward` and `components` (name → number). Samples of one
            prompt share a `uid` and become one row, in the order in which the uids first appear.

    Raises:
        ReportError: wrong dtype or shape, as many records as there are not images, or a record without one of its keys.
    """
    images = np.asarray(images)
    _check(images, records)
    frames = _frames(images)  # [N, F, H, W, 3], F = 1 or 3
    count, strip, height, width, _ = frames.shape
    pictures = frames.transpose(0, 2, 1, 3, 4).reshape(count, height, strip * width, 3)
    scale = min(1.0, MAX_TILE / max(height, width))
    tile_w, tile_h = strip * max(1, round(width * scale)), max(1, round(height * scale))

    placed = _place(records)
    rows, columns = 1 + max(r.row for r in placed), 1 + max(r.column for r in placed)
    grid = Image.new("RGB", (columns * tile_w, rows * tile_h), (127, 127, 127))

    folder = Path(run_dir) / FOLDER / f"step_{step:06d}"
    work = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    for number, (record, pixels) in enumerate(zip(placed, pictures, strict=True)):
        picture = Image.fromarray(pixels)
        if scale < 1:
            (work / "full").mkdir(exist_ok=True)
            picture.save(work / "full" / f"{number:04d}.png")
            picture = picture.resize((tile_w, tile_h), Image.Resampling.LANCZOS)
        grid.paste(picture, (record.column * tile_w, record.row * tile_h))
    if images.ndim == 5 and find_spec("av") is not None:
        (work / "full").mkdir(exist_ok=True)
        for number, frames_of in enumerate(images):
            write_video(work / "full" / f"{number:04d}.mp4", frames_of)
    grid.save(work / "grid.png", optimize=True)
    index = {
        "step": int(step),
        "tile": [tile_w, tile_h],
        "rows": rows,
        "columns": columns,
        "frames": int(images.shape[1]) if images.ndim == 5 else 1,
        "records": [_to_json(record) for record in placed],
    }
    (work / "index.json").write_text(json.dumps(index, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(work, folder)
    return folder


def load_validation(folder: str | os.PathLike[str]) -> Validation:
    """Read one `samples/step_NNNNNN` folder; the picture itself is opened when it is first asked for."""
    folder = Path(folder)
    try:
        raw = json.loads((folder / "index.json").read_text(encoding="utf-8"))
        records = []
        for r in raw["records"]:
            components = {key: _from_json(value) for key, value in r["components"].items()}
            records.append(SampleRecord(**{**r, "reward": _from_json(r["reward"]), "components": components}))
        return Validation(
            raw["step"],
            folder,
            (raw["tile"][0], raw["tile"][1]),
            raw["rows"],
            raw["columns"],
            raw["frames"],
            tuple(records),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ReportError(
            f"{folder} is no validation folder ({error!r}); delete it or run the validation again"
        ) from error


def load_validations(run_dir: str | os.PathLike[str]) -> list[Validation]:
    """Every validation of a run, by step."""
    folders = sorted((Path(run_dir) / FOLDER).glob("step_*/index.json"))
    return sorted((load_validation(path.parent) for path in folders), key=lambda v: v.step)


def truncate_validations(run_dir: str | os.PathLike[str], step: int) -> int:
    """Delete the validations after `step`, as `MetricsWriter.truncate_after` does with rows; returns how many."""
    late = [v for v in load_validations(run_dir) if v.step > step]
    for validation in late:
        shutil.rmtree(validation.folder)
    return len(late)


def _check(images: np.ndarray, records: Sequence[Mapping[str, Any]]) -> None:
    if images.dtype != np.uint8 or images.ndim not in (4, 5) or images.shape[-3] not in (1, 3) or images.size == 0:
        raise ReportError(
            f"images are {images.dtype} {images.shape!r}; "
            "give uint8 [N, C, H, W], or [N, T, C, H, W] for videos, with C = 1 or 3"
        )
    if len(records) != len(images):
        raise ReportError(f"{len(records)} records for {len(images)} images; give one record per image")
    for number, record in enumerate(records):
        missing = [key for key in _RECORD_KEYS if key not in record]
        if missing:
            raise ReportError(f"record {number} lacks {missing!r}; a record has {list(_RECORD_KEYS)!r}")


def _frames(images: np.ndarray) -> np.ndarray:
    """[N, F, H, W, 3]: the picture itself, or the first, middle and last frame of a video."""
    if images.ndim == 4:
        chosen = images[:, None]
    else:
        length = images.shape[1]
        chosen = images[:, sorted({0, (length - 1) // 2, length - 1})]
    pixels = chosen.transpose(0, 1, 3, 4, 2)
    return np.repeat(pixels, 3, axis=-1) if pixels.shape[-1] == 1 else pixels


def _place(records: Sequence[Mapping[str, Any]]) -> list[SampleRecord]:
    rows: dict[str, int] = {}
    filled: dict[str, int] = {}
    placed = []
    for record in records:
        uid = str(record["uid"])
        row = rows.setdefault(uid, len(rows))
        column = filled.get(uid, 0)
        filled[uid] = column + 1
        components = {str(key): float(value) for key, value in record["components"].items()}
        placed.append(
            SampleRecord(
                str(record["prompt"]), int(record["seed"]), uid, float(record["reward"]), components, row, column
            )
        )
    return placed


def _to_json(record: SampleRecord) -> dict[str, Any]:
    def clean(value: float) -> float | None:
        return value if math.isfinite(value) else None

    components = {key: clean(value) for key, value in record.components.items()}
    return {**asdict(record), "reward": clean(record.reward), "components": components}


def _from_json(value: float | None) -> float:
    return math.nan if value is None else float(value)
