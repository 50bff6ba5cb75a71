"""Counted operations equal those of `torch.utils.flop_counter` within 1 %: tiny on the CPU, full size on meta."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from model_specs import get_spec, training_flops
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

TINY = ["qwen_image", "sd3", "sd35", "flux", "flux_schnell", "z_image", "wan", "wan_5b"]


@pytest.mark.parametrize("name", TINY)
def test_formula_equals_flop_counter(load: Callable[[str], Any], name: str) -> None:
    loaded = load(name)
    spec, frames = loaded.spec, 9 if name.startswith("wan") else 1
    size = {"height": 128, "width": 96, "num_frames": frames}
    cond = loaded.encoder.encode(["three red circles on a black background"], 64)
    x = torch.randn(2, *spec.latent_shape(**size))
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        loaded.velocity(loaded.transformer, x, torch.full((2,), 0.9), cond, guidance_scale=3.5, **size)
    formula = spec.flops(loaded.transformer.config, 2, SimpleNamespace(**size), cond.embeds.shape[1])
    assert formula == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_full_size_qwen_image_on_meta() -> None:
    """The 20 B network itself, without its memory: 1024 x 1024 pixels, 128 text tokens."""
    from diffusers import QwenImageTransformer2DModel

    with torch.device("meta"):
        network = QwenImageTransformer2DModel().requires_grad_(False)
    assert sum(p.numel() for p in network.parameters()) == pytest.approx(20.4e9, rel=0.01)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        network(
            hidden_states=torch.empty(1, 4096, 64, device="meta"),
            timestep=torch.empty(1, device="meta"),
            encoder_hidden_states=torch.empty(1, 128, 3584, device="meta"),
            img_shapes=[[(1, 64, 64)]],
        )
    formula = get_spec("qwen_image").flops({}, 1, SimpleNamespace(height=1024, width=1024, num_frames=1), 128)
    assert formula == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_training_multiplies_the_forward() -> None:
    assert training_flops(1.0) == 2.0  # LoRA: backward costs what forward does
    assert training_flops(1.0, full=True) == 3.0
    assert training_flops(1.0, full=True, gradient_checkpointing=True) == 4.0


def test_defaults_are_the_published_models() -> None:
    """An empty config means the full-size model."""
    for name, tokens in (("qwen_image", 128), ("sd3", 333), ("flux", 512), ("z_image", 96), ("wan", 512)):
        spec = get_spec(name)
        size = SimpleNamespace(height=512, width=512, num_frames=81 if name == "wan" else 1)
        assert spec.flops({}, 2, size, tokens) == pytest.approx(2 * spec.flops({}, 1, size, tokens))
