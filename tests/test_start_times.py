"""What a person waits for before anything happens: help, and the import of a package. In seconds of a processor, which other
programs on a machine hardly change."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LEAVES = ["sde_samplers", "diffusion_losses", "lora_sync", "image_rewards", "model_specs", "run_report"]
TRIES = 5


def cost(*arguments):
    """Processor seconds of a Python with these arguments, above those of one that does nothing."""

    def seconds(*words):
        before = os.times()
        subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
        after = os.times()
        return sum(after[2:4]) - sum(before[2:4])

    return seconds(*map(str, arguments)) - seconds("-c", "pass")


@pytest.mark.parametrize("app", ["flowgrpo", "dpo-online"])
def test_help_comes_within_a_second(app):
    found = []
    while len(found) < TRIES and min(found, default=1.0) >= 1.0:
        found.append(cost(ROOT / "apps" / app, "--help"))
    assert min(found) < 1.0, found


def test_importing_a_leaf_costs_little_more_than_torch():
    torch = cost("-c", "import torch")
    for name in LEAVES:
        found = []
        while len(found) < TRIES and min(found, default=2 * torch) > 1.2 * torch:
            found.append(cost("-c", f"import {name}"))
        assert min(found) <= 1.2 * torch, (name, found, torch)
