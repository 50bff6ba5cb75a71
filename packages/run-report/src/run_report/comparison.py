"""`compare.html`: two sets of pictures of the same prompts and seeds, one over the other with a slider. One file, works offline."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from .gallery import SampleRecord, Validation
from .pictures import Strips, evenly, strips, tone
from .render import render
from .stats import compare, paired_rows

FILE_NAME = "compare.html"
SHOWN = 96
SHEET_BUDGET = 1_200_000


@dataclass(frozen=True)
class Pair:
    """A sample on both sides, each with the CSS position of its tile."""

    left: SampleRecord
    right: SampleRecord
    places: tuple[str, str]

    @property
    def change(self) -> float:
        """Of the reward."""
        return self.right.reward - self.left.reward


def write_comparison(
    folder: str | os.PathLike[str], names: tuple[str, str], left: Validation, right: Validation
) -> Path:
    """Write `folder/compare.html`; returns its path.

    Args:
        folder: where to.
        names: of the two sides.
        left, right: their pictures and scores; those of the same prompt and seeds are laid over each other.
    """
    rows = paired_rows(left, right)
    places = [(row, c) for row in sorted(rows) for c in range(min(left.columns, right.columns))]
    places = [p for p in places if p in left.by_place and (rows[p[0]], p[1]) in right.by_place]
    shown = evenly(places, SHOWN)
    sides: tuple[Strips, ...] = ()
    if shown:
        sides = (
            strips("a", [[(left, *place)] for place in shown], SHEET_BUDGET),
            strips("b", [[(right, rows[row], column)] for row, column in shown], SHEET_BUDGET),
        )
    pairs = []
    for i in range(len(shown)):
        (old, at), (new, there) = sides[0].rows[i][0], sides[1].rows[i][0]
        assert old is not None
        assert new is not None
        pairs.append(Pair(old, new, (at, there)))
    order = {"strict": 0, "reward": 1}
    moved = sorted(compare(left, right), key=lambda change: order.get(change.name, 2))
    target = Path(folder) / FILE_NAME
    text = render("compare.html", names=names, moved=moved, sides=sides, pairs=pairs, tone=tone)
    target.write_text(text, encoding="utf-8")
    return target
