"""What a run proved and what went wrong in it, from its rows and its folder `failures`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FAULTS = {
    "reward/failed": "rewards that failed",
    "val/failed": "rewards that failed in validation",
    "rollout/retried": "requests that were asked again",
    "rollout/errors": "requests that went wrong",
    "rollout/timeouts": "requests that took too long",
    "rollout/failed": "requests that were given up",
    "rollout/deaths": "replicas that died",
    "actor/skipped_steps": "optimizer steps left out for a gradient that was not finite",
    "actor/skipped_updates": "updates with nothing to learn from",
    "metrics/non_finite": "metrics that were not finite",
}
"""Metrics that count faults, and what each counts."""


@dataclass(frozen=True)
class Fault:
    """Something that was counted: how often in all, and after which step last."""

    what: str
    total: float
    last_step: int


@dataclass(frozen=True)
class Record:
    """Syncs that were proved, faults by kind, and failed steps with the last line of each one's traceback."""

    syncs: int
    bound: tuple[int, int] | None
    faults: list[Fault]
    failures: list[tuple[int, str]]


def record(run: Path, rows: Sequence[dict[str, float]]) -> Record:
    """The record of a run folder."""
    bound = [int(row["sync/tensors_bound"]) for row in rows if row.get("sync/tensors_bound", 0) > 0]
    faults = []
    for key, what in FAULTS.items():
        counted = [(int(row["step"]), row[key]) for row in rows if row.get(key, 0) > 0]
        if counted:
            faults.append(Fault(what, sum(value for _, value in counted), counted[-1][0]))
    failures = []
    for file in sorted((run / "failures").glob("step_*/error.txt")):
        lines = [line for line in file.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        failures.append((int(file.parent.name.removeprefix("step_")), lines[-1][:400] if lines else "no text"))
    return Record(len(bound), (min(bound), max(bound)) if bound else None, faults, failures)
