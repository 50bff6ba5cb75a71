"""The config must be readable where torch is not installed, and an import must do nothing."""

from __future__ import annotations

import pickle
import subprocess
import sys

import diffusion_losses
import pytest
from diffusion_losses import LossError

CHEAP = """
import sys
import diffusion_losses
from diffusion_losses.config import DiffusionLossConfig
from diffusion_losses import LossError
DiffusionLossConfig("grpo_guard", clip_ratio=2e-6, ref_kl_coef=0.5).reference_key
assert "torch" not in sys.modules and "numpy" not in sys.modules, "the config pulled in a heavy module"
"""


def test_the_config_imports_without_torch():
    subprocess.run([sys.executable, "-c", CHEAP], check=True)


def test_every_public_name_loads():
    for name in diffusion_losses.__all__:
        assert getattr(diffusion_losses, name) is not None
    assert dir(diffusion_losses) == sorted(diffusion_losses.__all__)
    with pytest.raises(AttributeError, match="no attribute 'flow_grpoo'"):
        _ = diffusion_losses.flow_grpoo


def test_the_error_survives_pickling():
    error = pickle.loads(pickle.dumps(LossError("clip_ratio=0 must be above zero")))
    assert isinstance(error, ValueError)
    assert str(error) == "clip_ratio=0 must be above zero"
