"""The Slurm script of docs/cluster.md on a Slurm of two machines: network namespaces with a slurmd each.

Needs root on Linux, `ip` (iproute2) and Slurm (Debian's slurm-wlm). The GPUs are played: /dev/null for Slurm, a number for Ray.
"""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from test_two_machines import HEAD, MICRO, OTHER, ip, why_not  # noqa: E402

CONFIG = """
ClusterName=two
SlurmctldHost={host}({head})
SlurmUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/%n
SlurmdPidFile={place}/%n.pid
SlurmctldPidFile={place}/controller.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SlurmdParameters=config_overrides
ReturnToService=2
NodeName=n1 NodeAddr={head} Gres=gpu:1
NodeName=n2 NodeAddr={other} Gres=gpu:1
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE
"""
KEYS = [key for key in MICRO if not key.startswith(("ray.address", "trainer.num_workers"))]
without = why_not() or ("" if shutil.which("slurmctld") else "no slurmctld here (Debian: slurm-wlm)")
pytestmark = [pytest.mark.nightly, pytest.mark.skipif(bool(without), reason=without), pytest.mark.timeout(1200)]


class Slurm:
    """Two machines that take jobs."""

    def __init__(self, place):
        self.place, self.names = place, [f"slurm{os.getpid()}{which}" for which in "ab"]
        (place / "state").mkdir()
        (place / "slurm.conf").write_text(CONFIG.format(host=socket.gethostname(), place=place, head=HEAD, other=OTHER))
        (place / "gres.conf").write_text("NodeName=n1,n2 Name=gpu File=/dev/null\n")
        (place / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "GLOO_", "SLURM"))}
        played = {"RAY_OVERRIDE_RESOURCES": '{"GPU": 1}', "RAY_TMPDIR": str(place / "ray"), "UV_NO_SYNC": "1"}
        self.env = kept | played | {"SLURM_CONF": f"{place}/slurm.conf", "OMP_NUM_THREADS": "1"}
        for name in self.names:
            ip("netns", "add", name)
        first, second = self.names
        ip(*f"link add va netns {first} type veth peer name vb netns {second}".split())
        for name, end, address in zip(self.names, ("va", "vb"), (HEAD, OTHER), strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")

    def begin(self):
        self.start(0, "slurmctld", "-D")
        for which in (0, 1):
            self.start(which, "slurmd", "-D", "-N", f"n{which + 1}")
        self.until(lambda: self.ask("sinfo", "-h", "-o", "%T %D") == "idle 2", 60)

    def start(self, which, *command):
        words = ["ip", "netns", "exec", self.names[which], *command]
        with (self.place / "daemons").open("a") as log:
            subprocess.Popen(words, env=self.env, stdout=log, stderr=log, start_new_session=True)

    def ask(self, *command):
        words = ["ip", "netns", "exec", self.names[0], *command]
        return subprocess.run(words, env=self.env, cwd=ROOT, capture_output=True, text=True, timeout=60).stdout.strip()

    def until(self, true, seconds):
        deadline = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < deadline, (self.place / "daemons").read_text()[-3000:]
            time.sleep(0.5)

    def close(self):
        for name in self.names:
            for number in ip("netns", "pids", name).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(number), signal.SIGKILL)
            ip("netns", "delete", name)
        shutil.rmtree(self.place, ignore_errors=True)


@pytest.fixture
def slurm():
    made = Slurm(Path(tempfile.mkdtemp(prefix="slurm", dir="/tmp")))  # short: Ray's sockets lie in it
    try:
        made.begin()
        yield made
    finally:
        made.close()


def test_the_pages_script_runs_over_two_machines_stops_when_it_is_told_to_and_goes_on(slurm):
    script = re.search(r"```bash\n(#!/bin/bash\n#SBATCH.*?)```", (ROOT / "docs" / "cluster.md").read_text(), re.S)[1]
    changes = {
        "--gpus-per-node=8 --cpus-per-task=64": f"--gpus-per-node=1 --cpus-per-task=1 --output={slurm.place}/%j",
        "recipe=full_size": " ".join([*KEYS, "trainer.total_steps=$STEPS"]),
        "/shared/runs/one": f"{slurm.place}/run",
        "model.path=/shared/Qwen-Image data.train_file=prompts.jsonl": "",
    }
    for old, new in changes.items():
        assert old in script
        script = script.replace(old, new)
    (slurm.place / "job").write_text(script)
    rows = slurm.place / "run" / "metrics.jsonl"

    def steps():
        return rows.read_text().count("\n") if rows.exists() else 0

    def submitted(total):
        return slurm.ask("sbatch", "--parsable", f"--export=ALL,STEPS={total}", f"{slurm.place}/job")

    def over(job):
        return not re.search("=(PENDING|RUNNING|COMPLETING) ", slurm.ask("scontrol", "show", "job", job))

    def end(job):
        """State, exit code with signal, and what was written."""
        slurm.until(lambda: over(job), 500)
        found = re.search(r"JobState=(\w+) .* ExitCode=(\S+)", slurm.ask("scontrol", "show", "job", job), re.S)
        return *found.groups(), (slurm.place / job).read_text()

    job = submitted(500)
    slurm.until(lambda: steps() >= 2 or over(job), 500)
    slurm.ask("scancel", "--batch", "--signal=TERM", job)
    state, code, said = end(job)
    assert (state, code) == ("FAILED", "130:0"), said
    done = steps()
    assert f"stopped after step {done} of 500" in said

    state, code, said = end(submitted(done + 1))
    assert (state, code) == ("COMPLETED", "0:0"), said
    assert f"after step {done}" in said
    assert steps() == done + 1
