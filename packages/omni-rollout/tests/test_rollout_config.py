"""The configuration: defaults, aliases, refusals, and use without torch and as an OmegaConf schema."""

import subprocess
import sys
from dataclasses import fields

import pytest
from omni_rollout.config import DiffusionPipelineConfig, DiffusionRolloutAlgoConfig, DiffusionRolloutConfig
from omni_rollout.errors import RolloutConfigError
from omni_rollout.sampling import resolve_settings, window_steps


def test_config_imports_without_torch_or_anything_heavy():
    code = (
        "import sys, omni_rollout, omni_rollout.config; print([m for m in ('torch','numpy','ray') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_structured_config_accepts_overrides_and_refuses_unknown_keys():
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    schema = OmegaConf.structured(DiffusionRolloutConfig)
    merged = OmegaConf.merge(schema, {"algo": {"kind": "flow_cps", "sde_window_range": [0, 3]}, "n": 4})
    config = OmegaConf.to_object(merged)
    assert isinstance(config, DiffusionRolloutConfig)
    assert (config.algo.kind, config.n, config.val_kwargs.algo.kind) == ("flow_cps", 4, "ode")
    with pytest.raises(OmegaConfBaseException, match="nonsense"):
        OmegaConf.merge(schema, {"nonsense": 1})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DiffusionRolloutConfig(backend="sglang"), "backend='sglang'.*diffusers, vllm_omni"),
        (lambda: DiffusionRolloutConfig(max_batch_size=0), "max_batch_size=0 is out of range: it must be 1 to"),
        (lambda: DiffusionRolloutAlgoConfig(kind="euler_a"), "kind='euler_a'.*flow_sde"),
        (lambda: DiffusionRolloutAlgoConfig(sde_window_size=3, sde_window_range=[0, 2]), "at most 2"),
        (lambda: DiffusionRolloutAlgoConfig(sde_window_range=[2, 2]), "first < end"),
        (lambda: DiffusionRolloutAlgoConfig(noise_level=-1), "noise_level=-1"),
        (lambda: DiffusionRolloutAlgoConfig(solver="heun"), "solver='heun'.*euler, dpm1, dpm2, dpm3"),
        (lambda: DiffusionRolloutAlgoConfig(tail_ratio=0.0), "tail_ratio=0.0 is out of range: it must be above 0 to 1"),
        (lambda: DiffusionPipelineConfig(num_inference_steps=0), "num_inference_steps=0"),
    ],
)
def test_bad_values_are_named(make, words):
    with pytest.raises(RolloutConfigError, match=words):
        make()


def test_windows_depend_on_seed_and_training_step_only():
    algo = DiffusionRolloutAlgoConfig(sde_window_size=2, sde_window_range=[0, 5], iters_per_group=2, sde_window_seed=3)
    windows = [window_steps(algo, 6, step) for step in range(40)]
    assert windows == [window_steps(algo, 6, step) for step in range(40)]
    assert all(windows[i] == windows[i + 1] for i in range(0, 40, 2))
    assert {w[0] for w in windows} == {0, 1, 2, 3}
    assert all(w[1] == w[0] + 1 for w in windows)


def test_fixed_progressive_and_default_windows():
    fixed = DiffusionRolloutAlgoConfig(sde_window_size=2, sample_strategy="fixed")
    assert window_steps(fixed, 6, 9) == (0, 1)
    moving = DiffusionRolloutAlgoConfig(sde_window_size=2, sample_strategy="progressive", sde_window_range=[1, 6])
    assert [window_steps(moving, 6, step) for step in range(4)] == [(1, 2), (3, 4), (4, 5), (4, 5)]
    assert window_steps(DiffusionRolloutAlgoConfig(), 6) == (0, 1, 2, 3, 4)  # never the last step
    assert window_steps(DiffusionRolloutAlgoConfig(noise_level=0), 6) == ()
    assert window_steps(DiffusionRolloutAlgoConfig(sde_window_size=0), 6) == ()
    with pytest.raises(RolloutConfigError, match="does not fit"):
        window_steps(DiffusionRolloutAlgoConfig(sde_window_range=[0, 7]), 6)


def test_training_and_validation_have_their_own_settings():
    algo = DiffusionRolloutAlgoConfig(solver="dpm2", shared_noise=True, tail_ratio=0.5, sde_window_size=2)
    config = DiffusionRolloutConfig(pipeline=DiffusionPipelineConfig(num_inference_steps=6), algo=algo)
    config.val_kwargs.pipeline.num_inference_steps = 28
    config.val_kwargs.algo.solver = "dpm3"
    train, val = resolve_settings(config), resolve_settings(config, validate=True)
    names = ("num_inference_steps", "kind", "solver", "shared_noise", "tail_ratio")
    assert [getattr(train, name) for name in names] == [6, "flow_sde", "dpm2", True, 0.5]
    assert [getattr(val, name) for name in names] == [28, "ode", "dpm3", False, 1.0]
    assert (len(train.window), val.window) == (2, ())


def test_every_setting_of_the_pipeline_arrives():
    sizes = {"height": 48, "width": 32, "num_inference_steps": 7, "true_cfg_scale": 2.5, "max_sequence_length": 99}
    pipeline = DiffusionPipelineConfig(**sizes, guidance_scale=3.5, num_frames=5)
    settings = resolve_settings(DiffusionRolloutConfig(pipeline=pipeline))
    assert all(
        getattr(settings, f.name) == getattr(pipeline, f.name) for f in fields(pipeline) if f.name != "negative_prompt"
    )


def test_no_noise_is_an_ode():
    settings = resolve_settings(DiffusionRolloutConfig(algo=DiffusionRolloutAlgoConfig(noise_level=0)))
    assert (settings.kind, settings.window, settings.noise_level) == ("ode", (), 0.0)
