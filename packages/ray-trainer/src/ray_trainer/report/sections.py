"""The picture parts of the report: before beside after, pictures over training, and the table of prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import TypeVar

from .changes import ConfigChange
from .gallery import SampleRecord, Validation
from .sprites import data_uri, position, sheet
from .stats import Change, Estimate, compare, measures, paired_rows, per_prompt
from .svg import number

MAX_ROWS = 64  # prompts shown as pictures; a longer list is thinned evenly
OPEN_ROWS = 12  # of these, so many are in sight before "show all"
MAX_COLUMNS = 8
SHEET_BUDGET = 650_000  # encoded bytes of each of the two big sheets
FILM_BUDGET = 220_000
LOWER_IS_BETTER = {"off"}  # the share of pixels off the palette

_T = TypeVar("_T")


def before_after(before: Validation, after: Validation) -> str:
    """Rows of prompts: pictures of the first validation left, of the last one right, same seeds; green is strict."""
    pairs = paired_rows(before, after)
    chosen = evenly(sorted(pairs), MAX_ROWS)
    if not chosen:
        return '<p class="empty">The first and the last validation hold no prompt with the same seeds.</p>'
    columns = min(before.columns, after.columns, MAX_COLUMNS if before.tile[0] <= 1.5 * before.tile[1] else 3)
    sides = []
    for validation, rows, name in (
        (before, chosen, "a"),
        (after, [pairs[row] for row in chosen], "b"),
    ):
        pictures = [validation.picture(row, column) for row in rows for column in range(columns)]
        uri = data_uri(sheet(pictures, columns), SHEET_BUDGET)
        sides.append(
            f".t.{name}{{background-image:url({uri});background-size:{100 * columns}% {100 * len(rows)}%;"
            f"aspect-ratio:{validation.tile[0]}/{validation.tile[1]}}}"
        )
    lines = []
    opened = set(evenly(list(range(len(chosen))), OPEN_ROWS))
    for index, row in enumerate(chosen):
        cells = []
        for validation, line, name in ((before, row, "a"), (after, pairs[row], "b")):
            tiles = "".join(
                _tile(validation.by_place.get((line, c)), name, position(index * columns + c, columns, len(chosen)))
                for c in range(columns)
            )
            cells.append(f'<div class="strip">{tiles}</div>')
        prompt = next(record.prompt for record in before.records if record.row == row)
        hidden = "" if index in opened else " more"
        tally = _tally(before, row), _tally(after, pairs[row])
        lines.append(
            f'<div class="pair{hidden}"><p class="prompt">{escape(prompt)}<small>{tally[0]} → {tally[1]}</small></p>'
            f'{cells[0]}<span class="arrow" aria-hidden="true">→</span>{cells[1]}</div>'
        )
    button = ""
    if len(opened) < len(chosen):
        button = f'<label class="all"><input type="checkbox" id="show-all"> show all {len(chosen)} prompts</label>'
    head = (
        f'<div class="pair head"><p class="prompt"></p><div>before <small>step {before.step}</small></div>'
        f'<span class="arrow"></span><div>after <small>step {after.step}</small></div></div>'
    )
    hint = '<p class="hint">upper row before, lower row after</p>'
    return f'<style>{"".join(sides)}</style>{button}{hint}<div class="pairs">{head}{"".join(lines)}</div>'


def over_time(validations: Sequence[Validation]) -> str:
    """A film strip: six prompts, evenly spaced, first seed each, at up to eight validations."""
    if len(validations) < 3:
        return ""
    shown = evenly(list(validations), 8)
    maps = [paired_rows(validations[0], validation) for validation in shown]
    common = sorted(set.intersection(*(set(pairs) for pairs in maps)))
    rows = evenly(common, 6)
    if not rows:
        return ""
    pictures = [v.picture(pairs[row], 0) for row in rows for v, pairs in zip(shown, maps, strict=True)]
    uri = data_uri(sheet(pictures, len(shown)), FILM_BUDGET)
    tile = validations[0].tile
    style = (
        f".t.f{{background-image:url({uri});background-size:{100 * len(shown)}% {100 * len(rows)}%;"
        f"aspect-ratio:{tile[0]}/{tile[1]}}}"
    )
    lines = []
    for index, row in enumerate(rows):
        prompt = next(record.prompt for record in validations[0].records if record.row == row)
        tiles = "".join(
            _tile(v.by_place.get((pairs[row], 0)), "f", position(index * len(shown) + c, len(shown), len(rows)))
            for c, (v, pairs) in enumerate(zip(shown, maps, strict=True))
        )
        lines.append(f'<p class="prompt">{escape(prompt)}</p><div class="strip">{tiles}</div>')
    steps = "".join(f"<small>step {validation.step}</small>" for validation in shown)
    head = f'<p class="prompt"></p><div class="strip steps">{steps}</div>'
    return f'<style>{style}</style><div class="film">{head}{"".join(lines)}</div>'


def changes_table(changes: Sequence[Change]) -> str:
    """Reward and components before → after with standard errors; the difference is paired by prompt."""
    lines = []
    for change in changes:
        z = f"{change.z:+.1f}" if math.isfinite(change.z) else "–"
        lines.append(
            f"<tr><th>{escape(change.name)}</th><td>{_with_error(change.before)}</td>"
            f'<td>{_with_error(change.after)}</td><td class="{_direction(change)}">{change.difference.mean:+.3f}'
            f"<small> ± {number(change.difference.stderr)}</small></td><td>{z}</td></tr>"
        )
    head = "<tr><th></th><td>before</td><td>after</td><td>difference</td><td>in standard errors</td></tr>"
    body = "".join(lines)
    return f'<div class="scroll fit"><table class="changes"><thead>{head}</thead><tbody>{body}</tbody></table></div>'


def changes_list(changed: Sequence[ConfigChange]) -> str:
    """Each key that a resumed run has otherwise, with the step from which on."""
    lines = "".join(
        f"<tr><th><code>{escape(change.key)}</code></th><td>{change.step}</td><td>{escape(str(change.before))}</td>"
        f"<td>{escape(str(change.after))}</td></tr>"
        for change in changed
    )
    head = "<tr><th>key</th><td>after step</td><td>before</td><td>since</td></tr>"
    return f'<div class="scroll fit"><table class="changes"><thead>{head}</thead><tbody>{lines}</tbody></table></div>'


def prompt_table(before: Validation, after: Validation) -> str:
    """Each prompt's mean reward and components, before → after; sortable by the column heads."""
    pairs = paired_rows(before, after)
    names = [name for name in measures(before) if name in set(measures(after))]
    values = {name: (per_prompt(before, name), per_prompt(after, name)) for name in names}
    prompts = {record.row: record.prompt for record in before.records}
    lines = []
    for row in evenly(sorted(pairs), 200):
        cells = [f'<th data-v="{row}">{escape(prompts[row])}</th>']
        for name in names:
            old, new = values[name][0][row], values[name][1][pairs[row]]
            bar = _dumbbell(old, new) if name == "reward" else ""
            gain = (old - new) if name in LOWER_IS_BETTER else (new - old)
            tone = "up" if gain > 1e-9 else "down" if gain < -1e-9 else "same"
            text = f"<span>{_fixed(old)} → <b>{_fixed(new)}</b></span>"
            cells.append(f'<td data-v="{new - old:.4f}" class="{tone}">{bar}{text}</td>')
        lines.append(f"<tr>{''.join(cells)}</tr>")
    heads = "".join(f'<td><button type="button">{escape(name)}</button></td>' for name in names)
    head = f'<tr><th><button type="button">prompt</button></th>{heads}</tr>'
    body = "".join(lines)
    return (
        f'<div class="scroll"><table class="prompts sortable"><thead>{head}</thead><tbody>{body}</tbody></table></div>'
    )


def evenly(items: list[_T], count: int) -> list[_T]:
    """At most `count` of the items, evenly spaced, the first and the last among them."""
    if len(items) <= count:
        return items
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def changes(before: Validation, after: Validation) -> list[Change]:
    """Changes with "strict" first, as the headline wants them."""
    found = compare(before, after)
    return sorted(found, key=lambda change: (change.name != "strict", change.name != "reward"))


def _tile(record: SampleRecord | None, sheet_name: str, where: str) -> str:
    if record is None:
        return '<i class="t none"></i>'
    tone = {True: " ok", False: " no", None: ""}[record.strict]
    parts = " · ".join(f"{key} {_compact(value)}" for key, value in record.components.items())
    title = f"{record.prompt}\nseed {record.seed} · reward {number(record.reward)}\n{parts}"
    return f'<i class="t {sheet_name}{tone}" style="background-position:{where}" title="{escape(title)}"></i>'


def _tally(validation: Validation, row: int) -> str:
    records = [record for record in validation.records if record.row == row]
    if all(record.strict is None for record in records):
        return number(per_prompt(validation, "reward")[row])
    return f"{sum(bool(record.strict) for record in records)}/{len(records)}"


def _dumbbell(old: float, new: float) -> str:
    if not (0 <= old <= 1 and 0 <= new <= 1):
        return ""
    a, b = 3 + 58 * old, 3 + 58 * new
    return (
        '<svg class="dumbbell" viewBox="0 0 64 12" aria-hidden="true"><line class="rail" x1="3" x2="61" y1="6" y2="6"/>'
        f'<line class="move" x1="{a:.1f}" x2="{b:.1f}" y1="6" y2="6"/><circle class="old" cx="{a:.1f}" cy="6" r="2.6"/>'
        f'<circle class="new" cx="{b:.1f}" cy="6" r="3"/></svg>'
    )


def _with_error(value: Estimate) -> str:
    return f"{number(value.mean)}<small> ± {number(value.stderr)}</small>"


def _direction(change: Change) -> str:
    """Up or down only beyond two standard errors."""
    if not abs(change.z) >= 2:
        return "same"
    return "up" if (change.z > 0) != (change.name in LOWER_IS_BETTER) else "down"


def _compact(value: float) -> str:
    return (
        "–"
        if not math.isfinite(value)
        else f"{value:.2f}".rstrip("0").rstrip(".")
        if abs(value) < 100
        else number(value)
    )


def _fixed(value: float) -> str:
    """Two decimals, so that columns line up."""
    return f"{value:.2f}" if math.isfinite(value) else "–"
