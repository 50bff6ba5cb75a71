"""What is set before any test imports Ray or starts a process, and how the two processes of a run share the files."""

import functools
import gc
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest
from xdist.scheduler import LoadFileScheduling

ROOT = Path(__file__).parent
sys.path.append(str(ROOT / "tests"))
from forks import FORKS, Forked  # noqa: E402

# Ray's hook would start every worker through `uv run` in an uploaded copy of the folder.
os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
# Where this is set, each of the many processes that the tests start would compile torch anew: 18 s for what takes 6.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Several processes share the cores: a thread that waits for the others of its pool sleeps instead of turning in a loop.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# A shell lets what it starts in the background ignore Ctrl-C, and so would every program that the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Files that share something that takes long to start run in one process, one after the other: a live vLLM-Omni engine and its Ray
# cluster; and the process with one Ray in which runs follow each other.
TOGETHER = {
    "engine": (
        "test_reward_gpus",  # which needs a Ray of its own, with other GPUs, and whose workers are no forks
        "test_rollout_nodes",
        "test_rollout_vllm_",
        "test_reward_loop",
        "test_lora_transport",
        "test_wrong_base",
        "test_own_parts",
    ),
    "one ray": (
        "test_flowgrpo_end_to_end",
        "test_several_rewards_end",
        "test_dpo_online_end",
        "test_weights_end",
        "test_latent_rewards_end",
        "test_trials",
        "test_equal_ranks",
    ),
}
# What takes longest comes first, so that the two processes end together.
LONG = (
    *TOGETHER["one ray"], *TOGETHER["engine"], "end_to_end", "test_cluster", "test_wheels",
    "test_engine_ranks", "test_notebooks", "test_bench_gpu", "test_processes", "test_two_machines",
)  # fmt: skip


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What the files import is no garbage: looking through it takes a fifth of the time, here and in all tests."""
    gc.disable()
    found = yield
    gc.freeze()
    gc.enable()
    return found


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long files first, in the order of `LONG`."""
    items.sort(key=lambda item: next((i for i, part in enumerate(LONG) if part in item.path.name), len(LONG)))


class FilesTogether(LoadFileScheduling):
    """A file in one piece, and those of `TOGETHER` as if they were one."""

    def _split_scope(self, nodeid: str) -> str:
        groups = (name for name, parts in TOGETHER.items() if any(part in nodeid for part in parts))
        return next(groups, super()._split_scope(nodeid))


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> FilesTogether | None:
    return FilesTogether(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_configure(config: pytest.Config) -> None:
    """One process for all of this run that others are forked from; it imports nothing before it is asked."""
    if FORKS not in os.environ:  # the two processes of a run find it there
        folder = Path(tempfile.mkdtemp(prefix="forks-", dir="/tmp"))  # short: sockets lie in it
        os.environ[FORKS] = str(folder / "0")
        command = [sys.executable, ROOT / "tests" / "forks.py", "serve", os.environ[FORKS]]
        # It ends with this process, whose pipe it reads.
        server = subprocess.Popen(command, stdin=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"})
        config.forks = folder, server


def pytest_unconfigure(config: pytest.Config) -> None:
    if hasattr(config, "forks"):
        folder, server = config.forks
        server.communicate()
        shutil.rmtree(folder)
        del os.environ[FORKS]


@pytest.fixture(scope="session")
def forked():
    """`forked(arguments, …)`: what a new Python would do, in a fork of a process that has imported torch, diffusers and so on."""
    return functools.partial(Forked, os.environ[FORKS])


@pytest.fixture(scope="session")
def forked_engine(forked):
    """`forked` of a process that has imported vLLM-Omni too, where that is there."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        yield forked
        return
    file, place = ROOT / "tests" / "forks.py", f"{os.environ[FORKS]}.engine.{os.getpid()}"
    engines = {"OMNI_ROLLOUT_CPU": "1", "HUMMING_DISABLE_PARALLEL_BUILD": "1"}  # as `launch.start_engine` has it
    life, held = os.pipe()
    with open(life) as life, open(held):
        forked([file, "serve", place, "omni_rollout.vllm_omni.cpu.worker"], env=os.environ | engines, stdin=life)
        yield functools.partial(Forked, place)
