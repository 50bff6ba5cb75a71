"""Running a program as a person would: its own process, real Ray, a folder of its own."""

import contextlib
import dataclasses
import fcntl
import functools
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

ROOT = Path(__file__).resolve().parent.parent
# A run small enough for a test, with every part of the real one.
SMALL = [
    "trainer.total_steps=4",
    "trainer.val_every=4",
    "trainer.save_every=2",
    "data.val_max_prompts=6",
    "data.prompts_per_step=3",
    "rollout.val_kwargs.n=2",
    "rollout.n=8",
    "actor.ppo_mini_batch_size=12",
]
# One as small as they get, with a checkpoint of every step.
MICRO = [
    *("trainer.total_steps=4", "trainer.save_every=1", "trainer.val_before_train=false", "trainer.val_every=0"),
    *("trainer.keep_checkpoints=9", "data.val_max_prompts=1", "rollout.val_kwargs.n=1", "data.prompts_per_step=2"),
    *("rollout.n=3", "actor.ppo_mini_batch_size=6", "actor.ppo_micro_batch_size_per_gpu=6"),
    *("rollout.pipeline.num_inference_steps=3", "rollout.val_kwargs.pipeline.num_inference_steps=2"),
]


@dataclass
class Finished:
    """What a program left behind."""

    code: int
    out: str
    err: str
    seconds: float
    left_over: list[str]


class Program:
    """A running app. `wait` ends with the list of its descendants that are still alive, which should be empty.

    Args:
        forked: its fixture, where the program and what its Ray starts shall be forks; see `forks.py`.
    """

    def __init__(self, app, *arguments, env=None, cwd=None, forked=None):
        self.start = time.monotonic()
        self.seen = set()
        command, environment = [str(ROOT / "apps" / app), *arguments], {**os.environ, **(env or {})}
        if forked:
            self.process = forked([ROOT / "tests" / "forks.py", "program", *command], env=environment, cwd=cwd)
        else:
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            self.process = subprocess.Popen([sys.executable, *command], cwd=cwd, env=environment, **pipes)

    def watch(self):
        """Remember every descendant, so that those who outlive the program are known afterwards."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self.seen |= set(psutil.Process(self.process.pid).children(recursive=True))

    def until(self, condition, timeout=180):
        """Wait for a condition while the program runs."""
        deadline = time.monotonic() + timeout
        while not condition():
            self.watch()
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, "the program did not get there in time"
            time.sleep(0.1)

    def signal(self, number):
        self.watch()
        self.process.send_signal(number)

    def wait(self, timeout=240):
        deadline = time.monotonic() + timeout
        out, err = "", ""
        while True:
            self.watch()
            try:
                out, err = self.process.communicate(timeout=0.5)
                break
            except subprocess.TimeoutExpired:
                if time.monotonic() > deadline:
                    self.process.send_signal(signal.SIGKILL)
                    raise
        _, alive = psutil.wait_procs(self.seen, timeout=10)
        return Finished(self.process.returncode, out, err, time.monotonic() - self.start, [str(p) for p in alive])


@pytest.fixture(scope="session")
def start():
    return Program


@pytest.fixture(scope="session")
def start_forked(forked):
    """A program of which the imports are not what is tested."""
    return functools.partial(Program, forked=forked)


class Hosted:
    """Runs in a process that lives on, so that Ray starts and the driver's libraries are imported once for all of them.

    `folder` is on the path of every process: a test may put a module there.
    """

    def __init__(self, forked, folder):
        self.forked, self.folder, self.process = forked, folder, None

    def __call__(self, app, *arguments, timeout=240):
        """What a run left behind."""
        if self.process is None:
            path = os.pathsep.join(filter(None, [str(self.folder), os.environ.get("PYTHONPATH", "")]))
            self.line, theirs = socket.socketpair()
            self.answers = self.line.makefile()
            command = [ROOT / "tests" / "forks.py", "program", ROOT / "tests" / "one_ray.py"]
            with theirs:
                env = {**os.environ, "PYTHONPATH": path}
                self.process = self.forked(command, env, stdin=theirs, stdout=theirs)
            self.answers.readline()  # Ray is there
        start, before = time.monotonic(), self._processes()
        self.line.sendall(json.dumps([app, arguments]).encode() + b"\n")
        while not select.select([self.line], [], [], 0.1)[0]:
            if time.monotonic() > start + timeout:
                self.close()
                raise subprocess.TimeoutExpired(app, timeout)
        code, out, err = json.loads(self.answers.readline())
        seconds = time.monotonic() - start
        for logs in Path("/tmp").glob(f"drl-{self.process.pid}-*/ray/session_2*/logs") if code else ():
            with contextlib.suppress(shutil.Error):  # why a process was gone; they end with this Ray
                print("Ray's logs:", shutil.copytree(logs, self.folder / "logs", dirs_exist_ok=True, symlinks=True))
        deadline = time.monotonic() + 10
        while (alive := self._processes() - before) and time.monotonic() < deadline:
            time.sleep(0.1)
        return Finished(code, out, err, seconds, [str(p) for p in alive])

    def _processes(self):
        """All that it started; but not Ray's agents, and processes that it keeps for the next actor."""
        found = set()
        for one in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                found |= set() if one.name().endswith(("IDLE", "Agent")) else {one}
        return found

    def close(self):
        if self.process is not None:
            process, self.process = self.process, None
            self.line.shutdown(socket.SHUT_WR)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()  # its keeper ends its Ray


@pytest.fixture(scope="session")
def hosted(forked, tmp_path_factory):
    """`hosted(app, *arguments)`: what a run left behind, in a process that other tests use too."""
    host = Hosted(forked, tmp_path_factory.mktemp("modules"))
    yield host
    host.close()


@pytest.fixture(scope="session")
def small():
    return SMALL


@pytest.fixture(scope="session")
def micro():
    return MICRO


def rows(folder):
    """metrics.jsonl without what depends on the clock or the machine."""
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    kept = [json.loads(line) for line in lines]
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "perf/"))} for row in kept]


@pytest.fixture(scope="session")
def metric_rows():
    return rows


@pytest.fixture(scope="session")
def rewound():
    """`rewound(folder, to, step)`: a copy of a run folder as if the run had been killed after that step's checkpoint."""

    def rewound(folder, to, step):
        shutil.copytree(folder, to)
        for later in (folder / "checkpoints").glob("step_*"):
            if int(later.name[5:]) > step:
                shutil.rmtree(to / "checkpoints" / later.name)
        (to / "checkpoints" / "latest.json").write_text(json.dumps({"step": step}))

    return rewound


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory, worker_id):
    """One small run of the main program from beginning to end, shared by all processes of this pytest.

    `home`, beside its folder, is what it had as HOME.
    """
    base = tmp_path_factory.getbasetemp()
    shared = (base if worker_id == "master" else base.parent) / "flowgrpo"
    shared.mkdir(exist_ok=True)
    folder, result = shared / "run", shared / "finished.json"
    with (shared / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not result.exists():
            (shared / "home").mkdir()
            env = {"HOME": str(shared / "home")}
            done = Program("flowgrpo", *SMALL, f"trainer.run_dir={folder}", env=env).wait()
            result.write_text(json.dumps(dataclasses.asdict(done)))
    done = Finished(**json.loads(result.read_text()))
    assert done.code == 0, done.err[-4000:]
    return folder, done


class Here:
    """An actor of this process: its methods run where they are called."""

    _actor_id = b"here"

    def __init__(self, actor):
        self._actor = actor

    def __getattr__(self, name):
        method = getattr(self._actor, name)

        def remote(*arguments):
            answer = method(*arguments)
            several = name in ("generate", "lora_payload")
            return [Answer(one) for one in answer] if several else Answer(answer)

        return SimpleNamespace(remote=remote, options=lambda **_: SimpleNamespace(remote=remote))


class Answer:
    """What such a method returned, as Ray's reference to it."""

    def __init__(self, value):
        self.value = value

    def __await__(self):
        return self.value
        yield


class Ray:
    def get(self, answers, timeout=None):
        return [answer.value for answer in answers]

    def kill(self, actor):
        pass


class Rewards:
    def __init__(self, *_, **__):
        pass

    async def score_all(self, samples):
        return [SimpleNamespace(score=float(sample.index), components={}, error=None, look=()) for sample in samples]

    def shutdown(self):
        pass


@pytest.fixture
def one_process(monkeypatch):
    """The program without Ray: one worker, and rewards that are numbers, the sample's place among those of its prompt.

    Gives the classes that play its parts.
    """
    import ray_trainer.scoring
    import ray_trainer.trainer as loop
    import torch
    from omni_rollout.remote import Remote
    from ray_trainer.group import WorkerGroup
    from ray_trainer.workers import ActorRolloutRefWorker as Worker

    def group(config):
        made = WorkerGroup.__new__(WorkerGroup)
        made.config, made._ray, made.gang = config, Ray(), SimpleNamespace(release=lambda: None, rewards={})
        made.workers = [Remote(Here(Worker(config)), "worker-0")]
        made.placement = SimpleNamespace(lines=[], sharding="replicate")
        made.call(Worker.init_model)
        return made

    monkeypatch.setattr("ray_trainer.cli.ray_session", lambda config: nullcontext())
    monkeypatch.setattr(loop, "WorkerGroup", group)
    monkeypatch.setattr(
        loop,
        "fetched",
        lambda pictures: torch.stack([torch.from_numpy(p.reference.value["pixels"][p.row]) for p in pictures]),
    )
    monkeypatch.setattr(ray_trainer.scoring, "RewardLoopManager", Rewards)
    return SimpleNamespace(Here=Here, Answer=Answer, Rewards=Rewards)
