"""One run over two machines: two network namespaces with an address each, a cable between them, and a Ray node in each.

Loopback does not reach from one to the other, the second has no Ray before it is started, and it may have a disk or packages of its
own. Needs root on Linux and `ip` (iproute2).
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import lora_sync
import pytest

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
HEAD, OTHER = "10.213.7.1", "10.213.7.2"
# GPUs that are not there: one training process runs on the first machine, two on the second.
GPUS = (1, 2)
NODE = ["--num-cpus=2", "--disable-usage-stats", "--object-store-memory=100000000"]
MICRO = [
    f"ray.address={HEAD}:6379",
    "trainer.num_workers=3",
    "trainer.save_every=1",
    "trainer.val_before_train=false",
    "data.val_max_prompts=1",
    "rollout.val_kwargs.n=1",
    "rollout.n=3",
    "data.prompts_per_step=2",
    "actor.ppo_mini_batch_size=6",
    "rollout.pipeline.num_inference_steps=3",
    "rollout.algo.sde_window_range=[0,2]",
    "rollout.val_kwargs.pipeline.num_inference_steps=3",
    "reward.num_cpus=0.1",
]


def ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=True).stdout


def why_not():
    """Why this machine cannot play two; empty where it can."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        return "two machines are played by network namespaces, which need root and `ip` (iproute2)"
    tried = subprocess.run(["ip", "netns", "exec", "nothing", "true"], capture_output=True, text=True)
    made = subprocess.run(["unshare", "-n", "true"], capture_output=True, text=True)
    return f"no network namespaces here: {made.stderr or tried.stderr}" if made.returncode else ""


# Five starts of a program; on an idle machine two minutes.
pytestmark = [pytest.mark.skipif(bool(why_not()), reason=why_not()), pytest.mark.timeout(900)]


class Machines:
    """Two machines; the head runs from the start."""

    def __init__(self, place, forked):
        self.forked, self.place = forked, place
        self.temp = Path("/tmp") / f"ray-two-{os.getpid()}"  # short: sockets lie in it
        self.names = [f"drl{os.getpid()}{which}" for which in "ab"]
        self.home = place / "home"
        self.home.mkdir()
        self.hidden = place / "own-disk"
        self.hidden.mkdir()
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "GLOO_"))}
        self.env = kept | {"HOME": str(self.home), "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "OMP_NUM_THREADS": "1"}
        ends = ["va", "vb"]
        for name in self.names:
            ip("netns", "add", name)
        ip(
            "link",
            "add",
            ends[0],
            "netns",
            self.names[0],
            "type",
            "veth",
            "peer",
            "name",
            ends[1],
            "netns",
            self.names[1],
        )
        for name, end, address in zip(self.names, ends, (HEAD, OTHER), strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")
        head = [
            "--head",
            "--port=6379",
            f"--node-ip-address={HEAD}",
            "--include-dashboard=false",
            f"--temp-dir={self.temp}",
        ]
        self._do(0, [BIN / "ray", "start", *head, f"--num-gpus={GPUS[0]}", *NODE])

    def _do(self, which, command, **env):
        words = ["ip", "netns", "exec", self.names[which], *map(str, command)]
        done = subprocess.run(words, env=self.env | env, cwd=self.place, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr

    def start_other(self, **env):
        """Ray on the second machine, which has a disk of its own at `hidden`."""
        ray = f"{BIN}/ray start --address={HEAD}:6379 --node-ip-address={OTHER} --num-gpus={GPUS[1]} {' '.join(NODE)}"
        self._do(1, ["sh", "-c", f"mount -t tmpfs none {self.hidden} && exec {ray}"], **env)

    def stop(self, which):
        """As when its power is cut."""
        for number in ip("netns", "pids", self.names[which]).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(number), signal.SIGKILL)

    def program(self, *keys):
        """flowgrpo on the first machine."""
        command = [ROOT / "tests" / "in_namespace.py", self.names[0], ROOT / "apps" / "flowgrpo", *MICRO, *keys]
        return self.forked(command, env=self.env, cwd=self.place)

    def refused(self, *keys):
        """What the program says when it will not start, and after how many seconds."""
        began = time.monotonic()
        process = self.program(*keys)
        _, said = process.communicate(timeout=300)
        assert process.returncode == 2, said
        assert said.count("\n") == 1, said
        return said, time.monotonic() - began

    def close(self):
        for which, name in enumerate(self.names):
            self.stop(which)
            ip("netns", "delete", name)
        shutil.rmtree(self.temp, ignore_errors=True)


@pytest.fixture(scope="module")
def two(tmp_path_factory, forked):
    machines = Machines(tmp_path_factory.mktemp("two"), forked)
    try:
        yield machines
    finally:
        machines.close()


@pytest.fixture(scope="module", autouse=True)
def unanswered(two):
    """What `refused` gives, in the end, of a head that is not there: it waits while other tests run."""
    with ThreadPoolExecutor() as beside:
        yield beside.submit(two.refused, f"ray.address={HEAD[:-1]}9:6379")


def test_more_workers_than_gpus_are_one_line(two):
    said, _ = two.refused("trainer.num_workers=6", f"trainer.run_dir={two.place}/run")
    assert "trainer.num_workers=6 needs 6 GPUs and Ray sees 1; ask for 1 or fewer" in said


def test_a_machine_with_other_packages_is_named(two):
    changed = two.place / "changed"
    shutil.copytree(Path(lora_sync.__file__).parent, changed / "lora_sync")
    (changed / "lora_sync" / "errors.py").write_text(
        (changed / "lora_sync" / "errors.py").read_text() + "# another version\n"
    )
    two.start_other(PYTHONPATH=str(changed))
    said, _ = two.refused(f"trainer.run_dir={two.place}/run")
    assert f"machine {OTHER} has lora_sync source " in said
    assert "use the same checkout" in said
    two.stop(1)


def test_a_head_that_does_not_answer_is_one_line(unanswered):
    said, seconds = unanswered.result()
    assert "no Ray cluster answers at ray.address='10.213.7.9:6379'" in said
    assert seconds < 60


@pytest.mark.nightly
def test_a_run_over_two_machines_ends_clearly_when_one_is_gone_and_goes_on_when_it_is_back(two):
    two.start_other()
    said, _ = two.refused(f"trainer.run_dir={two.hidden}/runs/one")
    assert (
        f"machine {OTHER} does not see '{two.hidden}' of this one; put the run folder on a disk that every machine"
        in said
    )
    assert list(two.hidden.iterdir()) == []

    run = two.place / "run"
    latest = run / "checkpoints" / "latest.json"
    process = two.program(f"trainer.run_dir={run}", "trainer.total_steps=500")
    try:
        deadline = time.monotonic() + 300
        while not latest.exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline, "no first step"
            time.sleep(0.2)
        two.stop(1)
        out, said = process.communicate(timeout=90)
    finally:
        process.kill()
    assert "placement: 3 training processes, a whole copy each" in out
    assert process.returncode == 1, said
    assert "flowgrpo: failed: step " in said
    assert re.search(rf"training process [12] on machine {OTHER} is gone", said)
    assert "trainer.on_existing=resume" in said
    assert "Traceback" not in said

    done = json.loads(latest.read_text())["step"]
    again = [f"trainer.run_dir={run}", "trainer.on_existing=resume", f"trainer.total_steps={done + 1}"]
    two.start_other()
    process = two.program(*again)
    out, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert f"after step {done}" in out
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, done + 2))
