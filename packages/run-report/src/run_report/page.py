"""`report.html`: one file that shows a run to a person. Works offline, in light and dark, and without scripts.

Reads `config.yaml`, `metrics.jsonl`, `samples/*/` and `environment.json` of a run folder; whatever is missing is left
out, so it can be written at any moment of a run.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .alarms import load_alarms
from .changes import comparable, load_changes
from .charts import all_metrics, curves, step_seconds
from .environment import load_environment
from .errors import ReportError
from .faults import record
from .gallery import Validation, load_validations
from .highlights import highlights
from .metrics import read_metrics
from .pictures import before_after, over_time, prompt_rows, tone
from .render import duration, render
from .stats import Change, compare

FILE_NAME = "report.html"
_ALARMS = "What the metrics of these steps say of collapse; docs/metrics.md has what to do about each rule."
_CHANGED = (
    "The run went on by another config; a dashed line in each curve marks the step. Validations are compared only with those "
    "that measure the same: pictures and numbers below are of the last stretch."
)
_SAMPLES = (
    "One sample of a prompt each, of the last validation. Its advantage is how far its reward lies above the mean of its prompt's "
    "samples, in their standard deviations."
)
_NUMBERS = "Means over the held-out pictures, errors over prompts; the difference is paired, prompt by prompt."
_PROMPTS = "Means over the samples of each prompt, before → after. Sort by a column's change through its head."


def write_report(run_dir: str | os.PathLike[str], recipe: Sequence[tuple[str, Any, Any]] = ()) -> Path:
    """Write `run_dir/report.html` from what the run has left so far; returns its path.

    Args:
        run_dir: of the run.
        recipe: what its config has otherwise than its recipe: (key, the recipe's value, the run's).

    Raises:
        ReportError: the folder does not exist, or holds a broken metrics.jsonl or validation.
    """
    run = Path(run_dir)
    if not run.is_dir():
        raise ReportError(f"{str(run)!r} is not a folder; give the folder of a run")
    target = run / FILE_NAME
    draft = target.with_suffix(".html.tmp")
    draft.write_text(page(run, recipe), encoding="utf-8")
    os.replace(draft, target)
    return target


def page(run: Path, recipe: Sequence[tuple[str, Any, Any]] = ()) -> str:
    """The page as a string. A section is shown where there is something to show; its id names its macro in sections.html."""
    rows = read_metrics(run)
    changed = load_changes(run)
    validations = comparable(load_validations(run), changed)
    config = run / "config.yaml"
    sections: list[tuple[str, str, str, Any]] = []  # id, title, explanation, content
    moved: list[Change] = []
    if changed:
        sections.append(("changes", "Changed on the way", _CHANGED, changed))
    if alarms := load_alarms(run):
        sections.append(("alarms", "Watchdog", _ALARMS, alarms))
    if validations:
        first, last = validations[0], validations[-1]
        title = "Before and after" if first is not last else "Pictures"
        sections.append(("pictures", title, _explain(first, last), before_after(first, last)))
        if first is not last:
            order = {"strict": 0, "reward": 1}
            moved = sorted(compare(first, last), key=lambda change: order.get(change.name, 2))
            sections.append(("numbers", "What changed", _NUMBERS, moved))
        if looks := highlights(first, last):
            sections.append(("samples", "Samples to look at", _SAMPLES, looks))
    if film := over_time(validations):
        sections.append(("film", "Over training", "One seed of six prompts, evenly picked from the list.", film))
    if charts := curves(rows, [change.step for change in changed]):
        sections.append(("curves", "Curves", "", charts))
    if moved:
        sections.append(("prompts", "Every prompt", _PROMPTS, prompt_rows(first, last)))
    if everything := all_metrics(rows):
        sections.append(("metrics", "All metrics", "", (len(rows), everything)))
    if rows:
        sections.append(("faults", "Receipts and faults", "", record(run, rows)))
    if recipe:
        sections.append(("recipe", "Other than the recipe", "", recipe))
    if config.exists():
        sections.append(("config", "Configuration", "", _yaml(config.read_text(encoding="utf-8", errors="replace"))))
    sections.append(("environment", "Environment", "", load_environment(run)))
    return render(
        "page.html",
        name=run.resolve().name,
        summary=" · ".join(_summary(rows, validations)),
        cards=[change for name in ("strict", "reward", "clean") for change in moved if change.name == name],
        sections=sections,
        tone=tone,
    )


def _summary(rows: Sequence[dict[str, float]], validations: Sequence[Validation]) -> list[str]:
    parts = [f"{int(rows[-1]['step'])} steps"] if rows else []
    total = sum(seconds for seconds in map(step_seconds, rows) if math.isfinite(seconds))
    if total:
        parts.append(f"{duration(total)} of training")
    if validations:
        parts.append(f"{validations[-1].rows} held-out prompts × {validations[-1].columns} seeds")
    return parts


def _explain(first: Validation, last: Validation) -> str:
    text = "Each row is one held-out prompt; each column one noise seed, the same on both sides."
    if any(record.strict is not None for record in last.records):
        text += " A green frame: every part of the caption is right."
    if first.frames > 1:
        text += " A tile shows a video's first, middle and last frame."
    return text


def _yaml(text: str) -> list[tuple[str, str]]:
    """(key, rest) of each line; nothing is parsed, so any YAML shows as it is. A line without a key is all rest."""
    lines = []
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        plain = not colon or not key.strip() or key.lstrip().startswith(("#", "'", '"'))
        lines.append(("", line) if plain else (key, colon + value))
    return lines
