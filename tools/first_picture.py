"""Counts the time from a clone to the first improved picture, as a newcomer has it.

    python tools/first_picture.py                        # of this repository's last commit
    python tools/first_picture.py URL --limit-s 900 --keep FOLDER

Clones into an empty folder, takes an empty home (so nothing is cached: PyTorch is downloaded) and an environment of its own, types
the README's first command as it stands, and waits until a validation after training has a higher reward than the one before it.
Then it stops the run as Ctrl-C does. Needs Python, git and a network, and nothing else of the machine.

exit code 0: within the limit (ten minutes); 1: not, or the command ended before
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

LIMIT_S = 600.0
KEY = "val/reward_mean"
OWN = ("VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH", "PYTHONHOME", "UV_CACHE_DIR", "PIP_CACHE_DIR", "RAY_ADDRESS")
"""Variables of the caller that a newcomer does not have. XDG_* neither."""


def first_command(readme: Path) -> str:
    """The first command that a README tells to type.

    Raises:
        SystemExit: there is none.
    """
    found = re.search(r"^```(?:bash|sh)?\n(.+?)\n", readme.read_text(encoding="utf-8"), re.M)
    if found is None:
        raise SystemExit(f"{readme} has no command")
    return found[1]


def validations(run: Path) -> list[tuple[int, float]]:
    """(step, mean reward) of each validation that a run has written down so far."""
    file = run / "metrics.jsonl"
    whole = file.read_text(encoding="utf-8").rpartition("\n")[0] if file.is_file() else ""
    rows = [json.loads(line) for line in whole.splitlines() if line.strip()]
    return [(row["step"], row[KEY]) for row in rows if row.get(KEY) is not None]


def improved(found: list[tuple[int, float]]) -> tuple[int, float] | None:
    """The first validation that is better than the one before training."""
    return next((one for one in found[1:] if one[1] > found[0][1]), None)


def environment(home: Path) -> dict[str, str]:
    """A newcomer's: the network's settings stay, caches and environments do not."""
    kept = {name: value for name, value in os.environ.items() if name not in OWN and not name.startswith("XDG_")}
    python = home / "python"
    venv.create(python, with_pip=True)
    return {**kept, "HOME": str(home), "PATH": f"{python / 'bin'}{os.pathsep}{os.environ['PATH']}"}


def wait(checkout: Path, process: subprocess.Popen[bytes], until: float) -> tuple[int, float] | None:
    """The first improvement of any run in the checkout; None where the time is over or the command has ended without one."""
    while True:
        ended = process.poll() is not None
        for run in sorted(checkout.glob("runs/*")):
            better = improved(validations(run))
            if better is not None:
                before = validations(run)[0][1]
                print(f"{KEY} {before:.3f} before, {better[1]:.3f} after step {better[0]}: {run}", flush=True)
                return better
        if ended or time.monotonic() > until:
            print(f"the command ended with {process.poll()}" if ended else "the time is over", flush=True)
            return None
        time.sleep(1)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("source", nargs="?", default=str(Path(__file__).resolve().parent.parent), help="what is cloned")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S)
    parser.add_argument("--keep", type=Path, default=None, metavar="FOLDER", help="clone into it and leave it there")
    given = parser.parse_args(argv)
    place = given.keep or Path(tempfile.mkdtemp(prefix="first-picture-"))
    home, checkout = (place / name for name in ("home", "checkout"))
    home.mkdir(parents=True)
    env = environment(home)
    try:
        began = time.monotonic()
        subprocess.run(["git", "clone", "--quiet", given.source, str(checkout)], check=True, env=env)
        command = first_command(checkout / "README.md")
        print(f"cloned after {time.monotonic() - began:.0f} s; typing: {command}", flush=True)
        process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=checkout,
            env=env,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background ignores it
        )
        better = wait(checkout, process, began + given.limit_s)
        took = time.monotonic() - began
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
            try:
                process.wait(120)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
        print(
            f"{'first improved picture' if better else 'no improved picture'} after {took:.0f} s on {os.cpu_count()} cores"
        )
        return 0 if better and took <= given.limit_s else 1
    finally:
        if given.keep is None:
            shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
