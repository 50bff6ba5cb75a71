"""What is set before any test imports Ray or starts a process, and how the two processes of a run share the files."""

import os
import sys

import pytest
from xdist.scheduler import LoadFileScheduling

# Ray's hook would start every worker through `uv run` in an uploaded copy of the folder.
os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
# Where this is set, each of the many processes that the tests start would compile torch anew: 18 s for what takes 6.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Several processes share the cores: a thread that waits for the others of its pool sleeps instead of turning in a loop.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Files that use one live vLLM-Omni engine and one Ray cluster: together in one process, so that they start once.
ENGINE = ("test_rollout_nodes", "test_rollout_vllm_")
# What takes longest comes first, so that the two processes end together.
LONG = ("test_flowgrpo_end_to_end", *ENGINE, "end_to_end", "test_wheels", "test_readmes", "test_engine_ranks")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long files first, in the order of `LONG`."""
    items.sort(key=lambda item: next((i for i, part in enumerate(LONG) if part in item.path.name), len(LONG)))


class FilesAndEngine(LoadFileScheduling):
    """A file in one piece, and the files of the live engine as if they were one."""

    def _split_scope(self, nodeid: str) -> str:
        return "engine" if any(part in nodeid for part in ENGINE) else super()._split_scope(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> FilesAndEngine | None:
    return FilesAndEngine(config, log) if config.getoption("dist") == "loadfile" else None
