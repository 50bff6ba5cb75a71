"""The registry, entry points, and what bad folders, sizes and tensors are told."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from model_specs import (
    PromptEmbeds,
    QwenImageSpec,
    SpecError,
    UnknownArchitectureError,
    available,
    get_spec,
    get_spec_for,
    registry,
)


@pytest.fixture
def clean_registry() -> Iterator[None]:
    """Entry points are read again, and forgotten afterwards."""
    registry._installed.cache_clear()
    yield
    registry._installed.cache_clear()


def test_found_by_any_name() -> None:
    for name in ("qwen_image", "QwenImageTransformer2DModel", "QwenImagePipeline"):
        assert isinstance(get_spec(name), QwenImageSpec)
    assert available() == ["flux", "qwen_image", "sd3", "wan", "z_image"]


def test_unknown_name_lists_known_and_nearest() -> None:
    with pytest.raises(UnknownArchitectureError, match="Did you mean 'qwen_image'") as caught:
        get_spec("qwen_imge")
    for name in available():
        assert name in str(caught.value)


class Third(QwenImageSpec):
    """Someone else's architecture."""

    name = "third"
    transformer_class = "ThirdTransformer"
    pipeline_class = "ThirdPipeline"


@pytest.mark.usefixtures("clean_registry")
def test_third_party_through_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("someones_package")
    module.Spec = Third  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "someones_package", module)
    entry = EntryPoint("third", "someones_package:Spec", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry] if group == "model_specs" else [])
    assert isinstance(get_spec("ThirdTransformer"), Third)
    assert "third" in available()


@pytest.mark.usefixtures("clean_registry")
def test_broken_entry_point_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("broken", "no_such_module:Spec", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry])
    with pytest.raises(SpecError, match=r"'broken' = 'no_such_module:Spec'"):
        get_spec("nothing")
    assert isinstance(get_spec("qwen_image"), QwenImageSpec)  # the built-in ones still work


@pytest.mark.usefixtures("clean_registry")
def test_names_are_not_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    class Thief(QwenImageSpec):
        name = "flux"

    module = types.ModuleType("a_thief")
    module.Thief, module.other = Thief, object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_thief", module)
    entry = EntryPoint("flux", "a_thief:Thief", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry])
    with pytest.raises(SpecError, match="is taken by"):
        available()
    with pytest.raises(SpecError, match="not a subclass"):
        get_spec("a_thief:other")
    assert type(get_spec("a_thief:Thief")) is Thief  # one that is named itself needs no names of its own


def test_bad_folders(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="There is no folder"):
        get_spec_for(tmp_path / "none")
    with pytest.raises(SpecError, match=r"no model_index\.json"):
        get_spec_for(tiny_folder("qwen_image") / "transformer")
    index = tmp_path / "model_index.json"
    index.write_text("{")
    with pytest.raises(SpecError, match="Cannot read"):
        get_spec_for(tmp_path)
    index.write_text("{}")
    with pytest.raises(SpecError, match="names no pipeline class"):
        get_spec_for(tmp_path)
    index.write_text(json.dumps({"_class_name": "StableDiffusionPipeline"}))
    with pytest.raises(UnknownArchitectureError, match="Did you mean 'StableDiffusion3Pipeline'"):
        get_spec_for(tmp_path)
    index.write_text(json.dumps({"_class_name": "QwenImagePipeline"}))
    (tmp_path / "vae").mkdir()
    spec = get_spec_for(tmp_path)
    with pytest.raises(SpecError, match=r"no transformer/config\.json; its parts are \['vae'\]"):
        spec.load_transformer(tmp_path)
    with pytest.raises(SpecError, match="no tokenizer/tokenizer_config"):
        spec.load_encoder(tmp_path)
    (tmp_path / "transformer").mkdir()
    config = "transformer/config.json"
    (tmp_path / config).write_text((tiny_folder("qwen_image") / config).read_text())
    with pytest.raises(SpecError, match="Cannot load QwenImageTransformer2DModel"):
        spec.load_transformer(tmp_path)


def test_sizes() -> None:
    spec = get_spec("qwen_image")
    assert spec.latent_shape(512, 768) == (32 * 48, 64)
    assert get_spec("sd3").latent_shape(512, 768) == (16, 64, 96)
    assert get_spec("wan").latent_shape(480, 832, 81) == (16, 21, 60, 104)
    with pytest.raises(SpecError, match=r"multiples of 16\. The nearest size is 512x768"):
        spec.latent_shape(510, 768)
    with pytest.raises(SpecError, match="single images"):
        spec.latent_shape(512, 512, 5)
    with pytest.raises(SpecError, match=r"1 more than a multiple of 4, e\.g\. 81"):
        get_spec("wan").latent_shape(480, 832, 80)
    with pytest.raises(SpecError, match="position table"):
        get_spec("sd3").latent_shape(4096, 512)


def test_wan_refuses_a_schedule_of_noise_prediction(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tmp_path / "wan"
    shutil.copytree(tiny_folder("wan_unipc"), folder)
    file = folder / "scheduler" / "scheduler_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"use_flow_sigmas": False}))
    with pytest.raises(SpecError, match="use_flow_sigmas=False"):
        get_spec_for(folder).load_scheduler(folder)


def test_5b_sizes(tiny_folder: Callable[[str], Path]) -> None:
    spec = get_spec_for(tiny_folder("wan_5b"))
    assert spec.latent_shape(704, 1280, 121) == (48, 31, 44, 80)
    with pytest.raises(SpecError, match="multiples of 32"):
        spec.latent_shape(720, 1280, 121)


def test_velocity_refuses_what_does_not_fit(load: Callable[[str], Any]) -> None:
    loaded = load("flux")
    cond = loaded.encoder.encode(["a cat"], 16)
    x, sigma, size = torch.zeros(2, 16, 64), torch.ones(2), {"height": 64, "width": 64}

    def velocity(x: torch.Tensor, sigma: torch.Tensor, cond: PromptEmbeds, **options: Any) -> None:
        loaded.velocity(loaded.transformer, x, sigma, cond, **size, **options)

    velocity(x, sigma, cond, guidance_scale=1.0)
    with pytest.raises(SpecError, match=r"Latents \(2, 15, 64\) do not fit 64x64"):
        velocity(x[:, 1:], sigma, cond, guidance_scale=1.0)
    with pytest.raises(SpecError, match=r"sigma \(\) must be \[2\]"):
        velocity(x, torch.tensor(0.5), cond, guidance_scale=1.0)
    with pytest.raises(SpecError, match="guidance_scale=None"):
        velocity(x, sigma, cond)
    with pytest.raises(SpecError, match="needs negative prompts"):
        velocity(x, sigma, cond, guidance_scale=1.0, true_cfg_scale=2.0)
    with pytest.raises(SpecError, match="pooled"):
        velocity(x, sigma, PromptEmbeds(cond.embeds, cond.mask), guidance_scale=1.0)
    with pytest.raises(SpecError, match=r"no text mask and got prompt rows with padding, \[16, 16\] of 20"):
        velocity(x, sigma, cond.pad_to(20), guidance_scale=1.0)


def test_import_is_light() -> None:
    """No torch, diffusers, transformers or peft until something is loaded: a check of a command line must be quick."""
    code = (
        "import sys, model_specs; model_specs.get_spec('wan').latent_shape(64, 64, 5); "
        "print([m for m in ('torch', 'diffusers', 'transformers', 'peft', 'accelerate') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
