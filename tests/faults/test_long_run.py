"""2,000 steps of one run: memory, descriptors and threads of every process stay flat, and shared memory and temporary files too."""

import json
import math
import os
import statistics
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from harness import Run

STEPS, WARM, EVERY = 2000, 600, 25
"""Steps in all; those before anything is judged; how many lie between two looks."""
LONG = [f"trainer.total_steps={STEPS}", "trainer.val_every=200", "trainer.save_every=100"]
LIMITS = {"memory_mb": 1.0, "shared_mb": 1.0, "descriptors": 0.1, "threads": 0.1, "processes": 0.1, "files": 0.1}
"""Growth in 100 steps, at most."""
DEADLINE_S = 3000
FOLDER = Path(os.environ.get("FAULTS_FOLDER", "runs/faults"))


def role(process):
    """Short name of a process of a run."""
    words = process.cmdline() or [process.name()]
    if words[0].startswith("ray::"):
        return words[0].split()[0].split(".")[0].removeprefix("ray::")
    named = [Path(word).name for word in words if word.endswith((".py", "gcs_server", "raylet"))]
    return named[0] if named else Path(words[0]).name


def look(driver, temporary):
    """What every process has: `memory_mb` without what it has mapped of files; `all` is what they have together."""
    seen, shared = {}, {}
    for one in [driver, *driver.children(recursive=True)]:
        here = Path(f"/proc/{one.pid}")
        try:
            name = "driver" if one == driver else f"{role(one)} {one.pid}"
            rollup, opened = (here / "smaps_rollup").read_text().split(), [*(here / "fd").iterdir()]
            memory = int(rollup[rollup.index("Anonymous:") + 1]) / 1024
            seen[name] = {"memory_mb": memory, "descriptors": len(opened), "threads": one.num_threads()}
            for file in opened:
                if os.readlink(file).startswith("/dev/shm/"):
                    facts = file.stat()
                    shared[facts.st_ino] = facts.st_blocks * 512 / 2**20
        except (psutil.Error, OSError, ValueError):  # it has just ended
            continue
    files = [file for folder in temporary for file in folder.rglob("*") if not file.is_dir()]
    return seen | {"all": {"processes": len(seen), "shared_mb": sum(shared.values()), "files": len(files)}}


def growth(points):
    """In 100 steps, by Theil and Sen: the median slope of all pairs, on which a single jump has no weight."""
    pairs = [(b[1] - a[1]) / (b[0] - a[0]) for i, a in enumerate(points) for b in points[i + 1 :]]
    return 100 * statistics.median(pairs)


def table(looks):
    """Of each process and each number: the first after the warm-up, the last, and the growth in 100 steps."""
    series = {}
    for step, seen in looks:
        for name, facts in seen.items() if step >= WARM else ():
            for what, value in facts.items():
                series.setdefault((name, what), []).append((step, value))
    whole = max(map(len, series.values()), default=0)  # Ray's idle processes come and go
    return {
        key: (points[0][1], points[-1][1], growth(points))
        for key, points in series.items()
        if len(points) > max(whole / 2, 1)
    }


@pytest.mark.nightly
@pytest.mark.timeout(DEADLINE_S + 100)
def test_nothing_grows_in_2000_steps(start, tmp_path):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    run = Run(start, tmp_path, LONG, env={"TMPDIR": str(temporary)})
    process, looks, times = run.program.process, [], []
    driver, metrics, end = psutil.Process(process.pid), run.run / "metrics.jsonl", time.monotonic() + DEADLINE_S
    try:
        while True:
            run.program.watch()
            try:
                _, err = process.communicate(
                    timeout=0.5
                )  # reads all that it says, so that it never waits for a full pipe
                break
            except subprocess.TimeoutExpired:
                assert time.monotonic() < end, looks[-1:]
                step = last_step(metrics)
                if step >= (looks[-1][0] if looks else 0) + EVERY:
                    looks.append((step, look(driver, [temporary, *Path("/tmp").glob(f"drl-{process.pid}-*")])))
                    times.append(time.monotonic())
    finally:
        found = table(looks)
        pace = (times[-1] - times[0]) / (looks[-1][0] - looks[0][0]) if len(looks) > 1 else math.nan
        told = {
            "seconds_a_step": pace,
            "rows": [[*key, *values] for key, values in sorted(found.items())],
            "looks": looks,
        }
        FOLDER.mkdir(parents=True, exist_ok=True)
        (FOLDER / "long_run.json").write_text(json.dumps(told))
    assert process.returncode == 0, err[-3000:]
    assert {"driver", "all"} < {name for name, _ in found}
    assert {key: values for key, values in found.items() if values[2] > LIMITS[key[1]]} == {}


def last_step(metrics):
    """Of the newest whole row; 0 before there is one."""
    if not metrics.exists():
        return 0
    with metrics.open("rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - 20_000, 0))
        whole = [line for line in file.read().split(b"\n")[:-1] if line.startswith(b'{"step":')]
    return json.loads(whole[-1])["step"] if whole else 0
