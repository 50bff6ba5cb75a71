"""Trains every tiny recipe of both apps and writes one table: what each algorithm reaches, and what it costs.

    uv run python tools/compare_recipes.py                       # all recipes, seed 0, one after another
    uv run python tools/compare_recipes.py --seeds 0 1 2         # goes on where an earlier call stopped
    uv run python tools/compare_recipes.py --recipes tiny_nft tiny_awm trainer.total_steps=20
    uv run python tools/compare_recipes.py --parallel 8          # on a larger machine: eight at a time, two cores for each

A finished run is not repeated and an interrupted one is resumed, so the command may be stopped at any time. Every run lies in its
own folder under --out, with report and checkpoints; `table.md` there is the table. Exits 1 when a recipe's held-out strict
accuracy does not rise by at least three standard errors of the paired difference; ablations are shown and not judged.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import queue
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from run_report import compare, load_validations, read_metrics

ENVIRONMENT = {**os.environ, "OMP_WAIT_POLICY": "passive"}
ROOT = Path(__file__).resolve().parent.parent
LEAST_ERRORS = 3.0


@dataclass(frozen=True)
class Entry:
    """One line of the table."""

    app: str
    recipe: str
    changes: tuple[str, ...] = ()
    name: str = ""

    @property
    def label(self) -> str:
        return self.name or self.recipe


ENTRIES = (
    *(
        Entry("flowgrpo", f"tiny_{name}")
        for name in (
            "flow_grpo",
            "cps",
            "fast",
            "mix_grpo",
            "mix_grpo_flash",
            "grpo_guard",
            "dance_grpo",
            "flow_dppo",
            "gspo",
        )
    ),
    *(Entry("dpo-online", f"tiny_{name}") for name in ("dpo", "nft", "awm")),
    Entry("dpo-online", "tiny_nft", ("actor.diffusion_loss.nft_negative=false",), "tiny_nft, no negative branch"),
)


def folder_of(out: Path, entry: Entry, seed: int) -> Path:
    """Where this run lives."""
    return out / f"{entry.label.replace(', ', '-').replace(' ', '_')}-seed{seed}"


def train(out: Path, entry: Entry, seed: int, overrides: list[str]) -> None:
    """Run, resume, or do nothing when the run is finished. The minutes of all its parts add up in `minutes.json`."""
    folder = folder_of(out, entry, seed)
    spent = folder.parent / f"{folder.name}.json"
    if spent.is_file() and json.loads(spent.read_text())["finished"]:
        return
    before = json.loads(spent.read_text())["seconds"] if spent.is_file() else 0.0
    fresh = not (folder / "metrics.jsonl").is_file()
    command = [sys.executable, str(ROOT / "apps" / entry.app), f"recipe={entry.recipe}", f"trainer.seed={seed}"]
    command += [*entry.changes, *overrides, f"trainer.run_dir={folder}"]
    command += ["trainer.on_existing=" + ("delete" if fresh and folder.exists() else "resume")]
    print(f"{folder.name} …", flush=True)
    start = time.monotonic()
    try:
        with open(folder.parent / f"{folder.name}.log", "a", encoding="utf-8") as log:
            code = subprocess.run(command, stdout=log, stderr=log, env=ENVIRONMENT).returncode
    finally:
        seconds = before + time.monotonic() - start
        spent.write_text(json.dumps({"seconds": seconds, "finished": False}))
    if code == 130:
        raise KeyboardInterrupt
    spent.write_text(json.dumps({"seconds": seconds, "finished": code == 0}))
    print(f"{folder.name} " + ("done" if code == 0 else f"failed, see {folder.name}.log"), flush=True)


def train_all(out: Path, runs: Sequence[tuple[Entry, int]], overrides: list[str], parallel: int) -> None:
    """Every run, `parallel` at a time; then each of them has two cores to itself."""
    cores = sorted(os.sched_getaffinity(0))
    if parallel > max(len(cores) // 2, 1):
        raise SystemExit(f"--parallel {parallel} needs {2 * parallel} cores, this process may use {len(cores)}")
    pairs: queue.Queue[set[int]] = queue.Queue()
    for place in range(parallel):
        pairs.put(set(cores[2 * place : 2 * place + 2]) if parallel > 1 else set(cores))

    def one(run: tuple[Entry, int]) -> None:
        mine = pairs.get()
        os.sched_setaffinity(0, mine)  # of this thread, which its processes inherit
        try:
            train(out, *run, overrides)
        finally:
            pairs.put(mine)

    with ThreadPoolExecutor(parallel) as pool:
        try:
            list(pool.map(one, runs))
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            raise


def row(out: Path, entry: Entry, seed: int) -> tuple[list[str], float]:
    """The cells of a finished run, and by how many paired standard errors its strict accuracy rose."""
    folder = folder_of(out, entry, seed)
    spent = folder.parent / f"{folder.name}.json"
    if not spent.is_file() or not json.loads(spent.read_text())["finished"]:
        return [entry.label, str(seed), "not finished", *[""] * 7], math.nan
    validations, last = load_validations(folder), read_metrics(folder)[-1]
    changes = {change.name: change for change in compare(validations[0], validations[-1])}
    strict, clean = changes["strict"], changes["clean"]

    def number(key: str, form: str) -> str:
        return format(last[key], form) if key in last else "–"

    log_ratio = f"{number('actor/ratio_std', '.1e')}" if "actor/ratio_std" in last else "–"
    cells = [
        entry.label,
        str(seed),
        f"{strict.before.mean:.3f} → {strict.after.mean:.3f}",
        f"{strict.difference.mean:+.3f} ± {strict.difference.stderr:.3f}",
        f"{strict.z:+.1f}",
        f"{clean.after.mean:.3f}",
        f"{json.loads(spent.read_text())['seconds'] / 60:.1f}",
        number("forwards/per_sample", ".1f"),
        log_ratio,
        number("actor/pg_clipfrac", ".2f"),
    ]
    return cells, strict.z


HEADER = (
    "recipe",
    "seed",
    "strict",
    "gain",
    "errors",
    "clean after",
    "minutes",
    "forwards per sample",
    "ratio std, last step",
    "clipped, last step",
)


def table(rows: list[list[str]]) -> str:
    """Markdown."""
    lines = ["| " + " | ".join(HEADER) + " |", "|" + "---|" * len(HEADER)]
    return "\n".join([*lines, *("| " + " | ".join(cells) + " |" for cells in rows)]) + "\n"


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="*", help="only these (names of recipes; an ablation comes with its recipe)")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0])
    parser.add_argument("--out", type=Path, default=Path("runs/compare"))
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time")
    parser.add_argument("--table-only", action="store_true", help="train nothing, write the table of what is there")
    words = sys.argv[1:]
    overrides = [word for word in words if "=" in word and not word.startswith("-")]
    arguments = parser.parse_args([word for word in words if word not in overrides])
    unknown = set(arguments.recipes or ()) - {entry.recipe for entry in ENTRIES}
    if unknown:
        parser.error(f"unknown recipes {sorted(unknown)}; known are {sorted({entry.recipe for entry in ENTRIES})}")
    entries = [entry for entry in ENTRIES if not arguments.recipes or entry.recipe in arguments.recipes]
    arguments.out.mkdir(parents=True, exist_ok=True)
    try:
        if not arguments.table_only:
            runs = [(entry, seed) for seed in arguments.seeds for entry in entries]
            train_all(arguments.out, runs, overrides, arguments.parallel)
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
    rows = [(entry, *row(arguments.out, entry, seed)) for entry in entries for seed in arguments.seeds]
    text = table([cells for _, cells, _ in rows])
    (arguments.out / "table.md").write_text(text, encoding="utf-8")
    print("\n" + text)
    missed = [cells[0] for entry, cells, errors in rows if not entry.changes and not errors >= LEAST_ERRORS]
    if missed:
        print(f"below {LEAST_ERRORS:g} standard errors: {', '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
