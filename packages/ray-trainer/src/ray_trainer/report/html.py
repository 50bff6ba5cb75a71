"""`report.html`: one file that shows a run to a person. Works offline, in light and dark, and without scripts.

Reads `config.yaml`, `metrics.jsonl`, `samples/*/` and `environment.json` of a run folder; whatever is missing is left
out, so it can be written at any moment of a run.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path

from .changes import comparable, load_changes
from .charts import all_metrics, curves, step_seconds
from .environment import load_environment
from .errors import ReportError
from .gallery import Validation, load_validations
from .live import duration
from .metrics import read_metrics
from .sections import before_after, changes, changes_list, changes_table, over_time, prompt_table
from .stats import Change
from .svg import number

FILE_NAME = "report.html"


def write_report(run_dir: str | os.PathLike[str]) -> Path:
    """Write `run_dir/report.html` from what the run has left so far; returns its path.

    Raises:
        ReportError: the folder does not exist, or holds a broken metrics.jsonl or validation.
    """
    run = Path(run_dir)
    if not run.is_dir():
        raise ReportError(f"{str(run)!r} is not a folder; give the folder of a run")
    target = run / FILE_NAME
    draft = target.with_suffix(".html.tmp")
    draft.write_text(render(run), encoding="utf-8")
    os.replace(draft, target)
    return target


def render(run: Path) -> str:
    """The page as a string."""
    rows = read_metrics(run)
    changed = load_changes(run)
    validations = comparable(load_validations(run), changed)
    config = run / "config.yaml"
    sections: list[tuple[str, str, str, str]] = []  # id, title, explanation, body
    moved: list[Change] = []
    if changed:
        text = "The run went on by another config; a dashed line in each curve marks the step. Validations are compared only "
        text += "with those that measure the same: pictures and numbers below are of the last stretch."
        sections.append(("changes", "Changed on the way", text, changes_list(changed)))
    if len(validations) > 1:
        first, last = validations[0], validations[-1]
        moved = changes(first, last)
        sections.append(("pictures", "Before and after", _explain(first, last), before_after(first, last)))
        sections.append(
            (
                "numbers",
                "What changed",
                "Means over the held-out pictures, errors over prompts; the difference is paired, prompt by prompt.",
                changes_table(moved),
            )
        )
    elif validations:
        only = validations[0]
        sections.append(("pictures", "Pictures", _explain(only, only), before_after(only, only)))
    film = over_time(validations)
    if film:
        sections.append(("film", "Over training", "One seed of six prompts, evenly picked from the list.", film))
    charts = curves(rows, [change.step for change in changed])
    if charts:
        sections.append(("curves", "Curves", "", charts))
    if len(validations) > 1:
        text = "Means over the samples of each prompt, before → after. Sort by a column's change through its head."
        sections.append(("prompts", "Every prompt", text, prompt_table(validations[0], validations[-1])))
    everything = all_metrics(rows)
    if everything:
        body = f'<details><summary>{len(rows)} rows</summary><div class="scroll">{everything}</div></details>'
        sections.append(("metrics", "All metrics", "", body))
    if config.exists():
        text = config.read_text(encoding="utf-8")
        body = f"<details><summary>config.yaml</summary><pre>{_yaml(text)}</pre></details>"
        sections.append(("config", "Configuration", "", body))
    pairs = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in load_environment(run).items())
    sections.append(("environment", "Environment", "", f'<dl class="environment">{pairs}</dl>'))

    files = resources.files(__package__)
    style = files.joinpath("report.css").read_text(encoding="utf-8")
    script = files.joinpath("report.js").read_text(encoding="utf-8")
    nav = "".join(f'<a href="#{key}">{escape(title)}</a>' for key, title, _, _ in sections)
    body = "".join(
        f'<section id="{key}"><h2>{escape(title)}</h2>{f"<p>{escape(text)}</p>" if text else ""}{content}</section>'
        for key, title, text, content in sections
    )
    name = run.resolve().name
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(name)} · training report</title><style>{style}</style></head><body>"
        f'<header><div class="top"><p class="brand">diffusion-rl</p><nav>{nav}</nav>'
        '<button type="button" id="theme" aria-label="switch between light and dark">◐</button></div>'
        f"<h1>{escape(name)}</h1>{_summary(rows, validations)}{_headline(moved)}</header>"
        f"<main>{body}</main><script>{script}</script></body></html>\n"
    )


def _headline(moved: Sequence[Change]) -> str:
    """Large numbers: what the run was after first, and what had to stay."""
    wanted = [change for name in ("strict", "reward", "clean") for change in moved if change.name == name]
    titles = {"strict": "Strictly right", "reward": "Reward", "clean": "Clean pictures"}
    cards: list[str] = []
    for change in wanted:
        share = change.name != "reward"
        old, new = (_percent(v.mean) if share else number(v.mean) for v in (change.before, change.after))
        delta, error = change.difference.mean, change.difference.stderr
        scale, unit = (100, " points") if share else (1, "")
        digits = 1 if share else 3
        detail = f"{delta * scale:+.{digits}f}{unit}"
        if math.isfinite(error):
            detail += f" ± {error * scale:.{digits}f}"
        if math.isfinite(change.z):
            detail += f" · {abs(change.z):.1f} standard errors"
        lead = " lead" if not cards else ""
        cards.append(
            f'<div class="card{lead}"><h3>{titles[change.name]}</h3>'
            f'<p class="big"><span>{old}</span><i>→</i><b>{new}</b></p>'
            f"<p>{detail}</p></div>"
        )
    return f'<div class="cards">{"".join(cards)}</div>' if cards else ""


def _summary(rows: Sequence[dict[str, float]], validations: Sequence[Validation]) -> str:
    parts = []
    steps = [row["step"] for row in rows]
    if steps:
        parts.append(f"{int(max(steps))} steps")
    total = sum(seconds for seconds in map(step_seconds, rows) if math.isfinite(seconds))
    if total:
        parts.append(f"{duration(total)} of training")
    if validations:
        last = validations[-1]
        parts.append(f"{last.rows} held-out prompts × {last.columns} seeds")
    return f'<p class="sub">{escape(" · ".join(parts))}</p>' if parts else ""


def _explain(first: Validation, last: Validation) -> str:
    text = "Each row is one held-out prompt; each column one noise seed, the same on both sides."
    if any(record.strict is not None for record in last.records):
        text += " A green frame: every part of the caption is right."
    if first.frames > 1:
        text += " A tile shows a video's first, middle and last frame."
    return text


def _percent(value: float) -> str:
    return f"{100 * value:.1f}<small>%</small>" if math.isfinite(value) else "–"


def _yaml(text: str) -> str:
    """Keys set apart from values; nothing is parsed, so any YAML shows as it is."""
    lines = []
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon and key.strip() and not key.lstrip().startswith(("#", "'", '"')):
            lines.append(f"<b>{escape(key)}</b>:{escape(value)}")
        else:
            lines.append(escape(line))
    return "\n".join(lines)
