"""Says whether finished runs of full weights, merged LoRAs or averages raised held-out strict accuracy. See docs/weights.md.

    uv run python tools/check_weights.py runs/full runs/merged runs/merged_engine

Promised of each: strict rises by at least 4 standard errors of the paired difference, and what samples was within 1e-5 of the
trainer's log-probs at every step. Exits 1 when a run breaks a promise.
"""

from __future__ import annotations

import sys
from pathlib import Path

from run_report import compare, load_validations, read_metrics

LEAST_ERRORS = 4.0
LARGEST_GAP = 1e-5


def kept(folder: Path) -> bool:
    """Print what a run reached; whether that is what was promised."""
    validations, rows = load_validations(folder), read_metrics(folder)
    if len(validations) < 2:
        print(f"{folder}: {len(validations)} validations, and two are compared; let it run to its end")
        return False
    strict = {change.name: change for change in compare(validations[0], validations[-1])}["strict"]
    gap = max(row.get("actor/rollout_log_prob_diff_max", 0.0) for row in rows)
    tensors = {int(row["sync/tensors_bound"]) for row in rows if "sync/tensors_bound" in row}
    print(
        f"{folder}: strict {strict.before.mean:.3f} -> {strict.after.mean:.3f} ({strict.difference.mean:+.3f}, "
        f"{strict.z:.1f} errors), log-prob gap {gap:.1e}, tensors in a sync {sorted(tensors)}"
    )
    return strict.z >= LEAST_ERRORS and gap <= LARGEST_GAP


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    verdicts = [kept(Path(folder)) for folder in sys.argv[1:]]
    sys.exit(0 if all(verdicts) else 1)
