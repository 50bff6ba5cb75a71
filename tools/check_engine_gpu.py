"""What only GPUs show of the training engine and of weight sync, on one machine, without pytest and without a network.

    python tools/check_engine_gpu.py                     # all that this machine has the cards for, within 6 minutes
    python tools/check_engine_gpu.py --parts ranks       # one part
    GPU_CHECKS_DEVICE=cpu OMNI_ROLLOUT_CPU=1 python tools/check_engine_gpu.py    # the same code, small, with gloo

Parts: `one_card` (compiled blocks, bitwise resume, activation offload), `ranks` (two cards through NCCL against one, and a
rank that fails), `live_sync` (a LoRA of 189 M parameters into a live vLLM-Omni engine on the same card) and
`live_broadcast` (the same, from card to card). Each runs in a process group of its own with a deadline. Prints one JSON
line per result, and a verdict; exit code 0 when every result is good.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent / "gpu_checks"
CUDA = os.environ.get("GPU_CHECKS_DEVICE", "cuda") == "cuda"
# (cards that a part needs, seconds that it may take on them, its command)
PARTS = {
    "live_sync": (1, 140.0, ["live_sync.py"]),
    "one_card": (1, 140.0, ["one_card.py"]),
    "ranks": (2, 96.0, ["ranks.py"]),
    "live_broadcast": (2, 120.0, ["live_sync.py", "--transport", "broadcast"]),
}
TOTAL_S = 356.0
SLOWER = 1.0 if CUDA else 3.0  # a CPU that others use as well


class Part:
    """One running part: its output goes to a file, so that what it said before a deadline is kept."""

    def __init__(self, name: str, card: int | None, end: float) -> None:
        self.name, self.started = name, time.monotonic()
        self.limit = min(self.started + PARTS[name][1] * SLOWER, end)
        self.out, self.err = (tempfile.TemporaryFile("w+") for _ in range(2))  # noqa: SIM115 - they live as long as this
        env = {"OMP_NUM_THREADS": "4" if CUDA else "1", **os.environ}
        if card is not None:
            env["CUDA_VISIBLE_DEVICES"] = str(card)
        self.process = subprocess.Popen(
            [sys.executable, *PARTS[name][2]],
            cwd=HERE,
            env=env,
            stdout=self.out,
            stderr=self.err,
            start_new_session=True,
        )

    def running(self) -> bool:
        """Whether it still runs; ends it, and all that it started, at its deadline."""
        if self.process.poll() is not None:
            return False
        if time.monotonic() < self.limit:
            return True
        self.kill()
        return False

    def kill(self) -> None:
        """End the part's processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def results(self) -> list[dict[str, Any]]:
        """Its results; one more when it did not end well."""
        code = self.process.returncode
        self.kill()  # what it may have left behind
        self.out.seek(0)
        found = []
        for line in self.out:
            with contextlib.suppress(ValueError):
                value = json.loads(line)
                found += [value] if isinstance(value, dict) and "check" in value else []
        took = round(time.monotonic() - self.started, 1)
        if code != 0:
            self.err.seek(0)
            why = "was ended at its deadline" if code == -signal.SIGKILL else f"ended with {code}"
            found.append(
                {"check": f"{self.name} {why}", "ok": False, "seconds": took, "stderr": self.err.read()[-1500:]}
            )
        return [{"part": self.name, **result} for result in found] + [{"part": self.name, "took_s": took}]


def plan(wanted: list[str], cards: int) -> tuple[list[list[tuple[str, int | None]]], list[str]]:
    """Parts that run side by side, wave after wave, with their card; and those that this machine is too small for."""
    fit = [name for name in wanted if PARTS[name][0] <= cards]
    single = [name for name in fit if PARTS[name][0] == 1]
    if cards > 1 and CUDA:
        waves: list[list[tuple[str, int | None]]] = (
            [[(name, card) for card, name in enumerate(single)]] if single else []
        )
    else:
        waves = [[(name, None)] for name in single]
    return waves + [[(name, None)] for name in fit if PARTS[name][0] > 1], [n for n in wanted if n not in fit]


def cards_here() -> int:
    """GPUs of this machine; gloo ranks need none."""
    if not CUDA:
        return 2
    import torch

    return torch.cuda.device_count()


def main() -> int:
    """Run the parts and print the verdict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=sorted(PARTS), default=list(PARTS))
    options = parser.parse_args()
    start = time.monotonic()
    waves, left_out = plan(options.parts, cards_here())
    results: list[dict[str, Any]] = []
    for wave in waves:
        parts = [Part(name, card, start + TOTAL_S * SLOWER) for name, card in wave]
        try:
            alive = parts
            while alive := [part for part in alive if part.running()]:
                time.sleep(0.2)
        except BaseException:
            for part in parts:
                part.kill()
            raise
        for part in parts:
            for result in part.results():
                print(json.dumps(result), flush=True)
                results.append(result)
    judged = [result for result in results if result.get("ok") is not None]
    bad = [result["check"] for result in judged if not result["ok"]]
    verdict = {
        "verdict": "ok" if judged and not bad else "failed",
        "checks": len(judged),
        "failed": bad,
        "left_out_for_want_of_cards": left_out,
        "seconds": round(time.monotonic() - start, 1),
    }
    print(json.dumps(verdict), flush=True)
    return 0 if verdict["verdict"] == "ok" else 1


if __name__ == "__main__":
    sys.exit(main())
