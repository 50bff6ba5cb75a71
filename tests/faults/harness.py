"""Faults in a real tiny run: real Ray, real processes, one chosen call of one chosen function.

`Fault` says where and what; `Run` starts a program with it, does things to its processes and looks at what is left.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
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
    "reward.name=jpeg_compressibility",
]
"""A run of a few seconds, with every part of the real one. No two of its pictures have one reward, so that every step learns."""

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
        action: "kill" the process, "hold" it there until `Run.go`, "full" (a full disk), "memory" (out of memory), "nan" (in
            what it returns), "nan_in" (in its first argument after self).
        call: which call of a process, from 1.
        rank: of the training process, where only one shall fail.
        seconds: of "hold", at most.
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

    def __init__(
        self,
        start: Any,
        folder: Path,
        keys: Sequence[str] = (),
        fault: Fault | None = None,
        app: str = "flowgrpo",
        env: dict[str, str] | None = None,
    ):
        self.folder, self.run, self.fault = folder, folder / "run", fault
        folder.mkdir(parents=True, exist_ok=True)
        for note in ("fault_happened", "fault_happened.go"):
            (folder / note).unlink(missing_ok=True)
        env = {**SECRETS, **(env or {}), **(fault.environment(folder) if fault else {})}
        resume = ["trainer.on_existing=resume"] if (self.run / "config.yaml").exists() else []
        self.program = start(app, *MICRO, *keys, *resume, f"trainer.run_dir={self.run}", env=env)

    def reached(self, timeout: float = 240) -> None:
        """Wait for the fault's place."""
        self.program.until((self.folder / "fault_happened").exists, timeout)

    def go(self) -> None:
        """Let go of what the fault holds."""
        (self.folder / "fault_happened.go").touch()

    def processes(self, role: str) -> list[psutil.Process]:
        """Processes of this run: "driver", "worker", "reward", "replica", "engine", "raylet" or "gcs"."""
        driver = psutil.Process(self.program.process.pid)
        if role == "driver":
            return [driver]
        marks = {
            "worker": "ActorRolloutRefWorker",
            "reward": "RewardLoopWorker",
            "replica": "HostedDiffusersBackend",
            "engine": "vLLMOmniHttpServer",
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
        """kill -9 of the first process of a role."""
        self.program.watch()
        self.processes(role)[0].kill()

    def rows(self) -> dict[int, dict[str, float]]:
        """See `rows_of`."""
        return rows_of(self.run)


def free_port() -> int:
    """One that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Service:
    """Scorer service in a process of its own, which can be killed and started again at its port."""

    def __init__(self, reward: str):
        self.reward, self.port = reward, free_port()
        self.start()

    def start(self) -> None:
        """Start it, and wait until it listens."""
        command = [sys.executable, "-m", "image_rewards", "serve", "--reward", self.reward, "--port", str(self.port)]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        self.said: list[str] = []
        while line := self.process.stderr.readline():
            self.said.append(line)
            if "is served on" in line:
                # Read on: who writes into a full pipe stands still.
                threading.Thread(target=self.said.extend, args=(self.process.stderr,), daemon=True).start()
                return
        raise AssertionError("".join(self.said))

    def stop(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.wait()


class Cluster:
    """A Ray cluster of two nodes on this machine. All cores are the second one's, so that every process of a run is there."""

    def __init__(self) -> None:
        # In /tmp: the path of a socket may not be long.
        self.folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
        kept = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        self.environment = {**kept, "HOME": str(self.folder), "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
        self.nodes: list[subprocess.Popen[str]] = []
        ports = ("--port", str(free_port()), "--ray-client-server-port", str(free_port()))
        said = self._node("--head", "--num-cpus=0", "--include-dashboard=false", *ports, "--temp-dir", str(self.folder))
        self.address = re.findall(r"--address='([^']+)'", said)[0]
        self.join()

    def _node(self, *options: str) -> str:
        ray = [sys.executable, "-m", "ray.scripts.scripts"]
        command = [*ray, "start", "--block", "--disable-usage-stats", "--object-store-memory=100000000", *options]
        log = self.folder / f"node{len(self.nodes)}.log"
        with log.open("w") as out:
            self.nodes.append(subprocess.Popen(command, env=self.environment, stdout=out, stderr=out, text=True))
        end = time.monotonic() + 120
        while "--block" not in (said := log.read_text()):  # the last that it says
            assert self.nodes[-1].poll() is None, said
            assert time.monotonic() < end, said
            time.sleep(0.2)
        return said

    def join(self) -> None:
        """Start a second node."""
        self._node("--address", self.address, "--num-cpus=4")

    def kill_node(self) -> None:
        """kill -9 of the raylet of the newest node."""
        every = psutil.Process(self.nodes[-1].pid).children()
        (raylet,) = [one for one in every if "raylet/raylet" in one.cmdline()[0]]
        raylet.kill()

    def stop(self) -> list[str]:
        """End all nodes; the processes that are left."""
        every = [
            c for node in self.nodes if node.poll() is None for c in psutil.Process(node.pid).children(recursive=True)
        ]
        for node in reversed(self.nodes):
            node.terminate()
        for node in self.nodes:
            node.wait(60)
        _, alive = psutil.wait_procs(every, timeout=20)
        shutil.rmtree(self.folder, ignore_errors=True)
        return [str(one) for one in alive]


def rows_of(run: Path) -> dict[int, dict[str, float]]:
    """Rows of a run's metrics.jsonl by step, without what depends on the clock or the machine."""
    file, kept = run / "metrics.jsonl", {}
    for line in file.read_text().splitlines() if file.exists() else []:
        row = json.loads(line)
        clocked = ("time/", "perf/", "metrics/", "rollout/")
        kept[int(row["step"])] = {name: value for name, value in row.items() if not name.startswith(clocked)}
    return kept


def find_secret(folder: Path, text: str = CANARY) -> list[str]:
    """Files under a folder that hold the planted secret, or another text."""
    found = []
    for file in folder.rglob("*"):
        try:
            if file.is_file() and text.encode() in file.read_bytes():
                found.append(str(file))
        except OSError:
            continue
    return found
