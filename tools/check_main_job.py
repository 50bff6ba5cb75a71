"""Says whether finished runs of `apps/flowgrpo` reached what the tiny recipe promises.

    for s in 0 1 2; do uv run apps/flowgrpo trainer.seed=$s trainer.run_dir=runs/seed$s; done
    uv run python tools/check_main_job.py runs/seed0 runs/seed1 runs/seed2

Promised, on 48 held-out prompts × 8 seeds: strict accuracy rises by at least 0.25 and by at least 4 standard errors of the paired
difference; count, colour, shape and background each fall by no more than two such errors; clean pictures stay at 0.94 or above;
rollout and trainer agree on log-probs to 1e-6 at every step. Exits 1 when a run breaks a promise.
"""

from __future__ import annotations

import sys
from pathlib import Path

from run_report import compare, load_validations, read_metrics


def broken_promises(folder: Path) -> list[str]:
    """One sentence for each promise that the run in `folder` breaks."""
    validations, rows = load_validations(folder), read_metrics(folder)
    changes = {change.name: change for change in compare(validations[0], validations[-1])}
    strict, clean = changes["strict"], changes["clean"]
    broken = []
    if strict.difference.mean < 0.25 or strict.z < 4:
        broken.append(f"strict rose by {strict.difference.mean:+.3f}, {strict.z:.1f} standard errors")
    for name in ("count", "color", "shape", "background"):
        if changes[name].z < -2:
            broken.append(f"{name} fell by {changes[name].difference.mean:+.3f}, {changes[name].z:.1f} standard errors")
    if clean.after.mean < 0.94:
        broken.append(f"clean is {clean.after.mean:.3f}")
    gap = max(row.get("actor/rollout_log_prob_diff_max", 0.0) for row in rows)
    if gap > 1e-6:
        broken.append(f"log-probs of rollout and trainer differ by up to {gap:.1e}")
    print(
        f"{folder}: strict {strict.before.mean:.3f} -> {strict.after.mean:.3f} "
        f"({strict.difference.mean:+.3f}, {strict.z:.1f} errors), "
        f"clean {clean.after.mean:.3f}, log-prob gap {gap:.1e}: " + ("; ".join(broken) or "every promise kept")
    )
    return broken


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(1 if sum(len(broken_promises(Path(folder))) for folder in sys.argv[1:]) else 0)
