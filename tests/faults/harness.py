"""Faults in a real tiny run: real Ray, real processes, one chosen call of one chosen function.

`Fault` says where and what; `Run` starts a program with it, does things to its processes and looks at what is left.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
MICRO = [
    "trainer.total_steps=6",
    "trainer.val_every=3",
    "trainer.save_every=2",
    "data.val_max_prompts=2",
    "data.prompts_per_step=2",
    "rollout.val_kwargs.n=1",
    "rollout.n=2",
    "actor.ppo_mini_batch_size=4",
    "rollout.pipeline.num_inference_steps=3",
    "rollout.val_kwargs.pipeline.num_inference_steps=2",
    "rollout.algo.sde_window_size=1",
    "actor.fsdp_config.device=cpu",
]
"""A run of a few seconds, with every part of the real one."""

CANARY = "canary-5d41402abc4b2a76"
SECRETS = dict.fromkeys(
    ("HF_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY", "MLFLOW_TRACKING_PASSWORD", "IMAGE_REWARDS_TOKEN"), CANARY
)
"""Environment variables that hold secrets; every run here has them, and none may be seen anywhere."""


@dataclass
class Fault:
    """One fault.

    Args:
        point: "module:function" or "module:Class.method".
        action: "kill" the process, "hold" it there, "full" (a full disk), "memory" (out of memory), "nan" (in what it returns),
            "nan_in" (in its first argument after self).
        call: which call of a process, from 1.
        rank: of the training process, where only one shall fail.
        seconds: of "hold".
    """

    point: str
    action: str
    call: int = 1
    rank: int | None = None
    seconds: float = 60.0
    once: str = field(default="", repr=False)

    def environment(self, folder: Path) -> dict[str, str]:
        """What a program needs to have it."""
        self.once = str(folder / "fault_happened")
        path = os.pathsep.join(filter(None, [str(HERE / "site"), os.environ.get("PYTHONPATH", "")]))
        return {"FAULT": json.dumps(asdict(self)), "PYTHONPATH": path}


class Run:
    """A program of this repository with a fault in it.

    Args:
        start: the fixture of that name.
        folder: for the run folder and notes.
        keys: config keys beside `MICRO`, such as those of another sampler or of the asynchronous mode.
        fault: None for a run without one.
    """

    def __init__(self, start: Any, folder: Path, keys: Sequence[str] = (), fault: Fault | None = None, app="flowgrpo"):
        self.folder, self.run, self.fault = folder, folder / "run", fault
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "fault_happened").unlink(missing_ok=True)
        env = {**SECRETS, **(fault.environment(folder) if fault else {})}
        resume = ["trainer.on_existing=resume"] if (self.run / "config.yaml").exists() else []
        self.program = start(app, *MICRO, *keys, *resume, f"trainer.run_dir={self.run}", env=env)

    def reached(self, timeout: float = 240) -> None:
        """Wait for the fault's place."""
        self.program.until((self.folder / "fault_happened").exists, timeout)

    def processes(self, role: str) -> list[psutil.Process]:
        """Processes of this run: "driver", "worker", "reward", "replica", "raylet" or "gcs"."""
        driver = psutil.Process(self.program.process.pid)
        if role == "driver":
            return [driver]
        marks = {
            "worker": "ActorRolloutRefWorker",
            "reward": "RewardLoopWorker",
            "replica": "HostedDiffusersBackend",
            "raylet": "raylet/raylet",
            "gcs": "gcs/gcs_server",
        }
        found = []
        for one in driver.children(recursive=True):
            try:
                command = one.cmdline()
            except psutil.Error:
                continue
            if command and marks[role] in command[0]:
                found.append(one)
        return found

    def kill(self, role: str) -> None:
        """kill -9 of one process of a role; of the driver where there is none yet."""
        self.program.watch()
        (self.processes(role) or self.processes("driver"))[0].kill()

    def rows(self) -> dict[int, dict[str, float]]:
        """See `rows_of`."""
        return rows_of(self.run)


def rows_of(run: Path) -> dict[int, dict[str, float]]:
    """Rows of a run's metrics.jsonl by step, without what depends on the clock or the machine."""
    file, kept = run / "metrics.jsonl", {}
    for line in file.read_text().splitlines() if file.exists() else []:
        row = json.loads(line)
        clocked = ("time/", "perf/", "metrics/", "rollout/")
        kept[int(row["step"])] = {name: value for name, value in row.items() if not name.startswith(clocked)}
    return kept


def find_secret(folder: Path) -> list[str]:
    """Files under a folder that hold the planted secret."""
    found = []
    for file in folder.rglob("*"):
        try:
            if file.is_file() and CANARY.encode() in file.read_bytes():
                found.append(str(file))
        except OSError:
            continue
    return found
