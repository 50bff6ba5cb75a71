"""`metrics.jsonl`: one row per step, written so that a run killed at any moment leaves a file that can be continued.

Every row goes to the disk (flush and fsync) before `append` returns. A row that a kill tore in half is cut off when the
file is opened again; `truncate_after` drops the rows that a resumed run will write anew. NaN and infinity are not JSON:
they are stored as null and counted in the row under `metrics/non_finite`; the curves show a gap.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, SupportsFloat

from .errors import ReportError

FILE_NAME = "metrics.jsonl"
NON_FINITE_KEY = "metrics/non_finite"


class MetricsWriter:
    """Appends rows to `run_dir/metrics.jsonl`.

    Args:
        run_dir: folder of the run; made if it is missing. A path that ends in `.jsonl` is taken as the file itself.

    Raises:
        ReportError: the file holds a broken row (other than a torn last one), or a step is appended twice.
    """

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        self.path = metrics_path(run_dir)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.non_finite = 0
        _cut_torn_row(self.path)
        rows = read_metrics(self.path) if self.path.exists() else []
        self.last_step: int | None = int(rows[-1]["step"]) if rows else None
        self._file = self.path.open("a", encoding="utf-8")

    def append(self, step: int, metrics: Mapping[str, SupportsFloat]) -> dict[str, float | int | None]:
        """Write the row of `step`, in the order the metrics come; returns what was stored.

        Values are anything `float()` takes (numbers, numpy scalars, 0-dim tensors). Steps must increase.
        """
        if self.last_step is not None and step <= self.last_step:
            raise ReportError(
                f"step {step!r} follows step {self.last_step!r} in {self.path.name}; steps must increase: "
                f"merge the metrics of one step into one row, or call truncate_after({step - 1}) before a resume"
            )
        row: dict[str, float | int | None] = {"step": int(step)}
        bad = 0
        for key, value in metrics.items():
            number = _number(key, value)
            if isinstance(number, float) and not math.isfinite(number):
                bad += 1
                row[key] = None
            else:
                row[key] = number
        if bad:
            row[NON_FINITE_KEY] = bad
            self.non_finite += bad
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.last_step = int(step)
        return row

    def truncate_after(self, step: int) -> int:
        """Drop every row whose step is greater than `step`; returns how many. The file is replaced in one move."""
        self._file.close()
        lines = self.path.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if line.strip() and _row(line)["step"] <= step]
        replacement = self.path.with_suffix(".jsonl.tmp")
        with replacement.open("wb") as file:
            file.writelines(kept)
            file.flush()
            os.fsync(file.fileno())
        os.replace(replacement, self.path)
        self._file = self.path.open("a", encoding="utf-8")
        self.last_step = int(_row(kept[-1])["step"]) if kept else None
        return len(lines) - len(kept)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def metrics_path(run_dir: str | os.PathLike[str]) -> Path:
    """`run_dir/metrics.jsonl`, or the path itself when it names a .jsonl file."""
    path = Path(run_dir)
    return path if path.suffix == ".jsonl" else path / FILE_NAME


def read_metrics(run_dir: str | os.PathLike[str]) -> list[dict[str, float]]:
    """The rows of a run, in order; nulls come back as NaN, a torn last row is left out, no file gives no rows.

    Raises:
        ReportError: a row in the middle is not a JSON object with a `step`; the message names the line.
    """
    path = metrics_path(run_dir)
    if not path.exists():
        return []
    rows: list[dict[str, float]] = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append(_row(line))
        except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
            if number == len(lines):  # no newline after it: the write was cut short
                break
            raise ReportError(
                f"{path.name} line {number} is not a metrics row: {line[:80].decode(errors='replace')!r}; mend or delete it"
            ) from error
    return rows


def _row(line: bytes) -> dict[str, float]:
    """One row; nulls come back as NaN. Raises for anything else than numbers under names, one of them a whole `step`."""
    raw = {"step": math.nan, **json.loads(line)}
    if not isinstance(raw["step"], int) or not all(v is None or isinstance(v, int | float) for v in raw.values()):
        raise ValueError("no row of numbers")
    return {name: math.nan if value is None else value for name, value in raw.items()}


def _number(key: str, value: Any) -> float | int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    try:
        if isinstance(value, str):
            raise TypeError("a string")
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: a tensor of several elements
        raise ReportError(f"metric {key!r} is {value!r}, which is no number; log a float or leave it out") from error


def _cut_torn_row(path: Path) -> None:
    """Remove what follows the last newline: the half row of a process that was killed while writing."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        content = file.read()
        end = content.rfind(b"\n") + 1
        if end != len(content):
            file.truncate(end)
