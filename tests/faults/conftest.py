"""What the fault tests share: the harness, by name; and the table of the trials, after those have run."""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))


def pytest_terminal_summary(terminalreporter):
    """Every trial of `test_trials.py` so far, a row each."""
    ran = [one for kind in ("passed", "failed", "skipped") for one in terminalreporter.stats.get(kind, [])]
    file = Path(os.environ.get("FAULTS_FOLDER", "runs/faults")) / "trials.json"
    if not file.exists() or not any("test_trials.py" in getattr(one, "nodeid", "") for one in ran):
        return
    every = json.loads(file.read_text())
    told = ("held", "code", "rows", "checkpoint", "ended_after_s", "seconds")
    width = max(map(len, every), default=0)
    terminalreporter.section("trials")
    terminalreporter.write_line(" ".join([f"{'trial':<{width}}", *(f"{name:>13}" for name in told)]))
    for name, facts in sorted(every.items()):
        cells = (str(facts.get(one, "")) for one in told)
        terminalreporter.write_line(" ".join([f"{name:<{width}}", *(f"{cell:>13}" for cell in cells)]))
    held = sum(facts["held"] for facts in every.values())
    seconds = sum(facts["seconds"] for facts in every.values())
    terminalreporter.write_line(f"{held} of {len(every)} trials held, {seconds:.0f} s in all")
