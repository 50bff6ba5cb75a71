"""Settings that travel: refused when they contradict each other, equal keys for rows that may share a batch, no torch."""

import pickle
import subprocess
import sys

import pytest
import sde_samplers
from sde_samplers import SamplerError, SamplerSettings

BASE = {"height": 64, "width": 64, "num_inference_steps": 6, "kind": "flow_sde", "noise_level": 0.7, "window": [0, 1]}


def test_names_and_settings_import_without_torch():
    code = "import sys; from sde_samplers import KINDS, SOLVERS, SamplerError, SamplerSettings; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"
    assert callable(sde_samplers.replay)
    assert callable(sde_samplers.rollout)


def test_settings_are_values():
    settings = SamplerSettings(**BASE)
    assert settings.window == (0, 1)
    assert pickle.loads(pickle.dumps(settings)) == settings == settings.replace(window=[0, 1])
    assert hash(settings) == hash(settings.replace())
    assert (settings.window_end, settings.replace(window=(), kind="ode").window_end) == (2, 0)
    assert not settings.guided
    assert settings.replace(true_cfg_scale=(1.0, 3.0)).guided


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"window": (0, 6)}, "distinct step numbers in 0..5"),
        ({"window": (1, 0)}, "ascending"),
        ({"window": (1, 1)}, "distinct"),
        ({"start_step": 2, "window": (1,)}, "in 2..5"),
        ({"kind": "ode"}, "no noise to train on"),
        ({"noise_level": 0.0}, "no noise to train on"),
        ({"kind": "euler_a"}, "kind='euler_a' is unknown; use one of flow_sde"),
        ({"solver": "heun"}, "solver='heun'"),
        ({"tail_ratio": 1.5}, "tail_ratio=1.5"),
        ({"height": 0}, "height=0 must be at least 1"),
    ],
)
def test_contradictions_are_refused(changes, words):
    with pytest.raises(SamplerError, match=words):
        SamplerSettings(**{**BASE, **changes})


def test_rows_that_move_alike_have_one_key():
    settings = SamplerSettings(**BASE)
    for same in ({"window": (3, 4)}, {"shared_noise": True}):
        assert settings.replace(**same).batch_key == settings.batch_key
    for other in ({"window": (0,)}, {"noise_level": 0.3}, {"height": 32}, {"start_step": 1, "window": (1, 2)}):
        assert settings.replace(**other).batch_key != settings.batch_key
    for bound in ({"solver": "dpm2"}, {"tail_ratio": 0.5}):
        here, there = settings.replace(**bound), settings.replace(**bound, window=(2, 3))
        assert here.batch_key != there.batch_key
