"""What the fault tests share: the harness, by name; and the table of the trials, after those have run."""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))


FOLDER = Path(os.environ.get("FAULTS_FOLDER", "runs/faults"))


def pytest_terminal_summary(terminalreporter):
    """The tables of what has run."""
    ran = [one for kind in ("passed", "failed", "skipped") for one in terminalreporter.stats.get(kind, [])]
    for part, name, tell in (("test_trials.py", "trials", trials), ("test_long_run.py", "long_run", long_run)):
        file = FOLDER / f"{name}.json"
        if file.exists() and any(part in getattr(one, "nodeid", "") for one in ran):
            terminalreporter.section(name.replace("_", " "))
            tell(terminalreporter, json.loads(file.read_text()))
    told = [one for one in ran if getattr(one, "user_properties", None) and one.when == "call"]
    if told:
        terminalreporter.section("figures")
    for one in told:
        terminalreporter.write_line(one.nodeid.rpartition("::")[2])
        for name, value in one.user_properties:
            terminalreporter.write_line(f"    {name}: {value}")


def long_run(terminalreporter, found):
    """Each number of each process: first after the warm-up, last, growth in 100 steps."""
    terminalreporter.write_line(f"{'process':<28} {'what':<12} {'first':>9} {'last':>9} {'per 100 steps':>14}")
    for name, what, first, last, growth in found["rows"]:
        terminalreporter.write_line(f"{name:<28} {what:<12} {first:>9.1f} {last:>9.1f} {growth:>+14.2f}")
    terminalreporter.write_line(f"{found['seconds_a_step']:.2f} s a step")


def trials(terminalreporter, every):
    """Every trial of `test_trials.py` so far, a row each."""
    told = ("held", "code", "rows", "checkpoint", "ended_after_s", "seconds")
    width = max(map(len, every), default=0)
    terminalreporter.write_line(" ".join([f"{'trial':<{width}}", *(f"{name:>13}" for name in told)]))
    for name, facts in sorted(every.items()):
        cells = (str(facts.get(one, "")) for one in told)
        terminalreporter.write_line(" ".join([f"{name:<{width}}", *(f"{cell:>13}" for cell in cells)]))
    held = sum(facts["held"] for facts in every.values())
    seconds = sum(facts["seconds"] for facts in every.values())
    terminalreporter.write_line(f"{held} of {len(every)} trials held, {seconds:.0f} s in all")
