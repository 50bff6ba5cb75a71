"""Single samples that a person should look at: the best and the worst of the last validation, and those that changed most."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .gallery import SampleRecord, Validation
from .pictures import Strips, strips
from .stats import paired_rows

SHOWN = 6
SHEET_BUDGET = 160_000
VIDEO_BUDGET = 1_000_000  # encoded bytes of the videos of one group


@dataclass(frozen=True)
class Look:
    """A sample, the same one before training where it is shown too, how it stands within its prompt, and its video."""

    record: SampleRecord
    before: SampleRecord | None
    advantage: float
    video: str


@dataclass(frozen=True)
class Group:
    """Samples of one kind, with a strip of tiles for each."""

    title: str
    strips: Strips
    looks: list[Look]


def highlights(first: Validation, last: Validation) -> list[Group]:
    """Best, worst and, where there are two validations, most changed; one sample of a prompt in each."""
    advantage = advantages(last)
    scored = [record for record in last.records if math.isfinite(record.reward)]

    def rank(record: SampleRecord) -> tuple[float, float]:
        return record.reward, advantage[record.row, record.column]

    groups = [
        _group("Best", "hb", _one_each(sorted(scored, key=rank, reverse=True)), last, advantage),
        _group("Worst", "hw", _one_each(sorted(scored, key=rank)), last, advantage),
    ]
    if first is not last:
        old = _before(first, last)
        moved = [
            r for r in scored if (b := old.get((r.row, r.column))) and math.isfinite(b.reward) and b.reward != r.reward
        ]
        moved.sort(key=lambda r: -abs(r.reward - old[r.row, r.column].reward))
        groups.append(_group("Most changed", "hc", _one_each(moved), last, advantage, first, old.get))
    return [group for group in groups if group is not None]


def advantages(validation: Validation) -> dict[tuple[int, int], float]:
    """(row, column) → how far a sample's reward lies above the mean of its prompt's, in standard deviations of those; 0 where all
    are equal, as the trainer counts them."""
    by_row: dict[int, list[SampleRecord]] = {}
    for record in validation.records:
        by_row.setdefault(record.row, []).append(record)
    found = {}
    for records in by_row.values():
        values = np.array([record.reward for record in records])
        spread = np.nanstd(values, ddof=1) if np.isfinite(values).sum() > 1 else 0.0
        for record, value in zip(
            records, values - np.nanmean(values) if np.isfinite(values).any() else values, strict=True
        ):
            found[record.row, record.column] = float(value / (spread + 1e-4))
    return found


def _one_each(records: Sequence[SampleRecord]) -> list[SampleRecord]:
    """The first of each prompt, `SHOWN` of them."""
    found: dict[int, SampleRecord] = {}
    for record in records:
        found.setdefault(record.row, record)
    return list(found.values())[:SHOWN]


def _before(first: Validation, last: Validation) -> dict[tuple[int, int], SampleRecord]:
    """(row, column) of `last` → the sample of the same prompt and seed in `first`."""
    rows = {new: old for old, new in paired_rows(first, last).items()}
    pairs = {(r.row, r.column): first.by_place.get((rows.get(r.row, -1), r.column)) for r in last.records}
    return {place: record for place, record in pairs.items() if record is not None}


def _group(
    title: str,
    name: str,
    records: list[SampleRecord],
    last: Validation,
    advantage: dict[tuple[int, int], float],
    first: Validation | None = None,
    before: Callable[[tuple[int, int]], SampleRecord | None] = lambda place: None,
) -> Group | None:
    if not records:
        return None
    looks, cells, left = [], [], VIDEO_BUDGET
    for record in records:
        place = record.row, record.column
        old, film = before(place), b""
        if (file := last.video(record)) is not None and file.stat().st_size * 4 / 3 <= left:
            film = file.read_bytes()
            left -= len(film) * 4 // 3
        looks.append(Look(record, old, advantage[place], base64.b64encode(film).decode("ascii")))
        cells.append([(first, old.row, old.column)] if first and old else [])
        cells[-1].append((last, *place))
    return Group(title, strips(name, cells, SHEET_BUDGET), looks)
