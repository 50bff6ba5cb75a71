"""The picture parts of the report as data for its templates: before beside after, pictures over training, each prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from .gallery import SampleRecord, Validation
from .render import number
from .sprites import data_uri, position, sheet
from .stats import measures, paired_rows, per_prompt

MAX_ROWS = 64  # prompts shown as pictures; a longer list is thinned evenly
OPEN_ROWS = 12  # of these, so many are in sight before "show all"
MAX_COLUMNS = 8
SHEET_BUDGET = 650_000  # encoded bytes of each of the two big sheets
FILM_BUDGET = 220_000
LOWER_IS_BETTER = {"off"}  # the share of pixels off the palette

_T = TypeVar("_T")


@dataclass(frozen=True)
class Strips:
    """Rows of tiles cut from one embedded image. A tile is its record (None: no picture there) and its CSS position."""

    name: str
    uri: str
    tile: tuple[int, int]
    columns: int
    rows: list[list[tuple[SampleRecord | None, str]]]


@dataclass(frozen=True)
class Gallery:
    """The first validation beside the last: of each pair its prompt, how many are right on both sides, the index of its strips."""

    before: Validation
    after: Validation
    sides: tuple[Strips, Strips]
    prompts: list[tuple[str, str, str]]
    opened: set[int]


@dataclass(frozen=True)
class Film:
    """The same prompts and seed over training."""

    steps: list[int]
    prompts: list[str]
    strips: Strips


def before_after(before: Validation, after: Validation) -> Gallery | None:
    """Pictures of the first validation and of the last one, same seeds; None where they share no prompt."""
    pairs = paired_rows(before, after)
    chosen = evenly(sorted(pairs), MAX_ROWS)
    if not chosen:
        return None
    columns = min(before.columns, after.columns, MAX_COLUMNS if before.tile[0] <= 1.5 * before.tile[1] else 3)
    left = strips("a", [[(before, row, c) for c in range(columns)] for row in chosen], SHEET_BUDGET)
    right = strips("b", [[(after, pairs[row], c) for c in range(columns)] for row in chosen], SHEET_BUDGET)
    prompts = [(before.prompts[row], _tally(before, row), _tally(after, pairs[row])) for row in chosen]
    return Gallery(before, after, (left, right), prompts, set(evenly(list(range(len(chosen))), OPEN_ROWS)))


def over_time(validations: Sequence[Validation]) -> Film | None:
    """Six prompts, evenly spaced, first seed each, at up to eight validations; None with fewer than three."""
    if len(validations) < 3:
        return None
    shown = evenly(list(validations), 8)
    maps = [paired_rows(validations[0], validation) for validation in shown]
    rows = evenly(sorted(set.intersection(*(set(pairs) for pairs in maps))), 6)
    if not rows:
        return None
    cells = [[(v, pairs[row], 0) for v, pairs in zip(shown, maps, strict=True)] for row in rows]
    prompts = [validations[0].prompts[row] for row in rows]
    return Film([v.step for v in shown], prompts, strips("f", cells, FILM_BUDGET))


def prompt_rows(
    before: Validation, after: Validation
) -> tuple[list[str], list[tuple[int, str, list[tuple[float, float]]]]]:
    """Names of the measures that both have, and of each prompt its row, text and (before, after) of each measure."""
    pairs = paired_rows(before, after)
    known = set(measures(after))
    names = [name for name in measures(before) if name in known]
    values = [(per_prompt(before, name), per_prompt(after, name)) for name in names]
    rows = evenly(sorted(pairs), 200)
    return names, [(row, before.prompts[row], [(old[row], new[pairs[row]]) for old, new in values]) for row in rows]


def evenly(items: list[_T], count: int) -> list[_T]:
    """At most `count` of the items, evenly spaced, the first and the last among them."""
    if len(items) <= count:
        return items
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def tone(name: str, change: float) -> str:
    """The CSS class of a change: up is better, whatever the sign."""
    gain = -change if name in LOWER_IS_BETTER else change
    return "up" if gain > 1e-9 else "down" if gain < -1e-9 else "same"


def strips(name: str, cells: list[list[tuple[Validation, int, int]]], budget: int) -> Strips:
    """Tiles, each a validation with its row and column there, as one image of at most `budget` encoded bytes."""
    columns = len(cells[0])
    image = sheet([v.picture(row, column) for line in cells for v, row, column in line], columns)
    rows: list[list[tuple[SampleRecord | None, str]]] = []
    for i, line in enumerate(cells):
        places = [position(i * columns + j, columns, len(cells)) for j in range(columns)]
        rows.append([(v.by_place.get((row, c)), place) for (v, row, c), place in zip(line, places, strict=True)])
    return Strips(name, data_uri(image, budget), cells[0][0][0].tile, columns, rows)


def _tally(validation: Validation, row: int) -> str:
    verdicts = [record.strict for record in validation.records if record.row == row]
    if all(verdict is None for verdict in verdicts):
        return number(per_prompt(validation, "reward")[row])
    return f"{sum(map(bool, verdicts))}/{len(verdicts)}"
