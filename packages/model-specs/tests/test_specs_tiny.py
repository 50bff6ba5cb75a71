"""The tiny pipelines: from a seed, without touching the caller's random state; and the single-frame convolutions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_specs import SpecError, tiny
from model_specs.single_frame import single_frame_convolutions
from safetensors.torch import load_file


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")


def test_same_seed_same_weights(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    state = torch.random.get_rng_state()
    again, other = tiny.build("wan_5b", tmp_path / "again"), tiny.build("wan_5b", tmp_path / "other", seed=1)
    assert torch.equal(torch.random.get_rng_state(), state)
    first = weights(tiny_folder("wan_5b"))
    assert all(torch.equal(first[key], value) for key, value in weights(again).items())
    assert not all(torch.equal(first[key], value) for key, value in weights(other).items())
    assert sum(file.stat().st_size for file in again.rglob("*")) < 8e6


def test_unknown_name_lists_the_known(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"'sdxl'.*qwen_image"):
        tiny.build("sdxl", tmp_path)


@pytest.mark.parametrize("name", ["qwen_image", "wan", "wan_5b"])
def test_single_frame_shortcut_is_exact_and_stays_on_its_instance(load: Callable[[str], Any], name: str) -> None:
    loaded = load(name)
    plain, quick = loaded.spec.load_vae(loaded.folder), loaded.spec.load_vae(loaded.folder)
    assert single_frame_convolutions(single_frame_convolutions(quick)) is quick
    changed = [m for m in quick.modules() if "forward" in vars(m)]
    assert changed
    assert not any("forward" in vars(m) for m in plain.modules())
    generator = torch.Generator().manual_seed(0)
    for frames in (1, 3):  # videos come out the same, too
        z = torch.randn(2, loaded.spec.latent_channels, frames, 4, 6, generator=generator)
        with torch.no_grad():
            torch.testing.assert_close(quick.decode(z).sample, plain.decode(z).sample, rtol=0, atol=1e-4)
    image = torch.rand(1, 3, 1, 64, 64, generator=generator) * 2 - 1
    with torch.no_grad():
        ours, theirs = quick.encode(image).latent_dist.mode(), plain.encode(image).latent_dist.mode()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
