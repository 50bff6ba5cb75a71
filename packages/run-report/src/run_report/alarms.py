"""`watchdog.jsonl`: what a run's watchdog saw, a row for each alarm: the step, the rule, what was done, and why."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

FILE_NAME = "watchdog.jsonl"


@dataclass(frozen=True)
class Alarm:
    """A rule that was broken after `step` steps."""

    step: int
    rule: str
    action: str
    reason: str


def load_alarms(run_dir: str | os.PathLike[str]) -> list[Alarm]:
    """Every alarm of a run, in the order of its steps."""
    file = Path(run_dir) / FILE_NAME
    if not file.exists():
        return []
    return [Alarm(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]


def save_alarms(run_dir: str | os.PathLike[str], up_to: int, new: list[Alarm]) -> None:
    """Keep the alarms up to a step and add new ones. The file is replaced in one move."""
    kept = [alarm for alarm in load_alarms(run_dir) if alarm.step <= up_to] + new
    target = Path(run_dir) / FILE_NAME
    draft = target.with_suffix(".jsonl.tmp")
    draft.write_text("".join(json.dumps(asdict(alarm)) + "\n" for alarm in kept), encoding="utf-8")
    os.replace(draft, target)
