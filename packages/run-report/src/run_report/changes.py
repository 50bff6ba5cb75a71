"""`changes.jsonl`: what a resumed run does by another config than before, and from which step on.

A row is `{"step": 40, "key": "reward.name", "before": "ocr", "after": "shapes"}`. Curves show the step as a line. Validations
before and after a change of what they measure are two kinds of numbers and are never compared.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from .errors import ReportError
from .gallery import Validation

FILE_NAME = "changes.jsonl"
MEASURES = ("reward", "data.val_file", "data.sources", "data.val_max_prompts", "rollout.val_kwargs")
"""Keys and sections that decide what a validation's numbers mean."""

_T = TypeVar("_T", bound=Validation)


@dataclass(frozen=True)
class ConfigChange:
    """One key that has another value after `step` steps; None on a side that lacks it."""

    step: int
    key: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.key}: {self.before} → {self.after}"


def within(key: str, sections: Sequence[str]) -> bool:
    """Whether the key is one of these or lies in a section that is."""
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def load_changes(run_dir: str | os.PathLike[str]) -> list[ConfigChange]:
    """Every change of a run, in the order of its steps.

    Raises:
        ReportError: the file is damaged.
    """
    file = Path(run_dir) / FILE_NAME
    if not file.exists():
        return []
    try:
        changes = [ConfigChange(**json.loads(line)) for line in file.read_bytes().splitlines()]
        if all(isinstance(change.step, int) and isinstance(change.key, str) for change in changes):
            return changes
        reason = "a step or a key is none"
    except (ValueError, TypeError, RecursionError) as error:
        reason = str(error)
    raise ReportError(f"{file} is damaged ({reason}); delete it to go on without the list of changes")


def save_changes(run_dir: str | os.PathLike[str], step: int, new: Sequence[ConfigChange]) -> None:
    """Keep the changes up to `step` and add the new ones: what came later is trained anew. The file is replaced in one move."""
    kept = [change for change in load_changes(run_dir) if change.step <= step and step > 0]
    target = Path(run_dir) / FILE_NAME
    if not (kept or new):
        target.unlink(missing_ok=True)
        return
    draft = target.with_suffix(".jsonl.tmp")
    draft.write_text("".join(json.dumps(asdict(change)) + "\n" for change in [*kept, *new]), encoding="utf-8")
    os.replace(draft, target)


def comparable(validations: Sequence[_T], changes: Sequence[ConfigChange]) -> list[_T]:
    """The validations that measure the same as the next one will: those after the last change of what is measured."""
    since = max((change.step for change in changes if within(change.key, MEASURES)), default=-1)
    return [validation for validation in validations if validation.step > since]
