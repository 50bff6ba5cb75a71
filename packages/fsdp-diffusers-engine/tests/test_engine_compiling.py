"""What the compiler is given: no complex numbers, the same rotation; and adapters whose scale costs backward nothing."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fsdp_diffusers_engine import compiling, gelu, rotary
from torch import nn


def test_rotation_without_complex_numbers_is_the_same() -> None:
    from diffusers.models.transformers.transformer_qwenimage import apply_rotary_emb_qwen

    draw = torch.Generator().manual_seed(0)
    freqs = torch.polar(torch.ones(12, 8), torch.randn(12, 8, generator=draw))
    for dtype, limit in ((torch.float32, 1e-6), (torch.bfloat16, 0.0)):
        x = torch.randn(2, 12, 3, 16, generator=draw).to(dtype)
        found, wanted = rotary.rotated(x, freqs), apply_rotary_emb_qwen(x, freqs, use_real=False)
        assert found.dtype == dtype
        assert (found - wanted).abs().max() <= limit


@pytest.mark.parametrize("model", ["qwen_image", "z_image"])
def test_compiled_blocks_hold_no_complex_product(model: str) -> None:
    """Inductor runs a product of complex numbers by itself, in fp32, between its kernels. And they compute what the stock ones do,
    with and without a mask."""
    from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformerBlock
    from diffusers.models.transformers.transformer_z_image import ZImageTransformerBlock

    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        values = [node.meta.get("example_value") for node in graph.graph.nodes if node.op != "placeholder"]
        seen.extend(str(value.dtype) for value in values if isinstance(value, torch.Tensor))
        return graph.forward

    torch.manual_seed(0)
    x, temb = torch.randn(2, 7, 48), torch.randn(2, 48)
    mask = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])
    if model == "z_image":
        block: nn.Module = ZImageTransformerBlock(0, 48, 3, 3, 1e-5, True)
        freqs: Any = torch.polar(torch.ones(2, 7, 8), torch.randn(2, 7, 8))
        given = [(x, m, freqs, temb) for m in (None, mask)]
    else:
        block = QwenImageTransformerBlock(48, 3, 16)
        freqs = [torch.polar(torch.ones(n, 8), torch.randn(n, 8)) for n in (5, 7)]
        given = [(torch.randn(2, 5, 48), x, m, temb, freqs) for m in (None, mask)]
    stock = copy.deepcopy(block)
    compiling.compile_blocks([])
    block.compile(backend=backend, fullgraph=True)
    for each in given:
        for found, wanted in zip(block(*each), stock(*each), strict=True):
            assert (found - wanted).abs().max() < 1e-6 * wanted.abs().max()
    assert "torch.float32" in seen
    assert not [dtype for dtype in seen if "complex" in dtype]


def test_compiled_blocks_of_wan_turn_each_channel_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """And compute what the stock ones do, gradients too."""
    from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed, WanTransformerBlock

    calls: list[int] = []
    attend = rotary.attend_wan
    monkeypatch.setattr(rotary, "attend_wan", lambda *given: calls.append(1) or attend(*given))
    torch.manual_seed(0)
    block = WanTransformerBlock(32, 64, 2, cross_attn_norm=True)
    for norm in (block.attn1.norm_q, block.attn1.norm_k):
        nn.init.normal_(norm.weight, 1.0, 0.2)
    stock = copy.deepcopy(block)
    compiling.compile_blocks([])
    block.compile(backend="eager", fullgraph=True)
    angles = WanRotaryPosEmbed(16, (1, 2, 2), 32)(torch.zeros(1, 1, 2, 4, 4))
    found = []
    for module in (block, stock):
        x, text = (torch.randn(2, n, 32, generator=torch.Generator().manual_seed(n)).requires_grad_() for n in (8, 3))
        temb = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(1))
        out = module(x, text, temb, angles)
        found.append([out, *torch.autograd.grad(out.square().sum(), [x, text, *module.parameters()])])
    assert calls == [1]
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max() + 1e-6


def test_the_kernel_of_heads_takes_powers_of_two() -> None:
    """Triton's programs have no other sizes; the compiler has."""
    tokens, processor = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16), SimpleNamespace(_parallel_config=None)
    names = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")
    for width, taken in ((128, True), (24, False)):
        norm = nn.RMSNorm(width, dtype=torch.bfloat16).requires_grad_(False)
        across = nn.RMSNorm(40 * width, dtype=torch.bfloat16)
        attn = SimpleNamespace(heads=40, **dict.fromkeys(names, norm))
        with torch.no_grad():
            assert rotary.takes_turned_heads(processor, attn, across, tokens) == taken
        assert rotary.takes_joined_heads(processor, attn, tokens) == taken


def test_blocks_that_sample_have_gelu_inside_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in updates, not beside an adapter, not where GELU has another form. On a CPU that product has the exact form."""
    from diffusers.models.activations import GELU
    from torch.nn import functional as F

    targets: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    class Adapted(nn.Linear):
        pass

    monkeypatch.setattr(gelu, "takes_product", lambda *_: True)
    torch.manual_seed(0)
    x = torch.randn(3, 5, 8)
    for approximate, kind, samples, wanted in (
        ("tanh", nn.Linear, True, True),
        ("tanh", nn.Linear, False, False),
        ("tanh", Adapted, True, False),
        ("none", nn.Linear, True, False),
    ):
        block = nn.Sequential(GELU(8, 16, approximate=approximate))
        block[0].proj.__class__ = kind
        gelu.let_compile([block])
        assert torch.equal(block(x), F.gelu(block[0].proj(x), approximate=approximate))
        torch._dynamo.reset()
        block.compile(backend=backend, fullgraph=True)
        targets.clear()
        with torch.set_grad_enabled(not samples):
            found = block(x)
        inside = any("_addmm_activation" in target for target in targets)
        assert inside == wanted
        exact = F.gelu(block[0].proj(x), approximate="none" if inside else approximate)
        assert (found - exact).abs().max() < 1e-6


def test_compiled_graphs_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In the user's cache folder, unless a person named another."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for before in (None, default_cache_dir()):  # torch writes its default there once it was asked
        if before is None:
            monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        else:
            monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", before)
        compiling.keep_graphs()
        assert Path(cache_dir()).is_relative_to(tmp_path)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "own"))
    compiling.keep_graphs()
    assert cache_dir() == str(tmp_path / "own")


def test_adapted_layer_computes_what_peft_computes(make_engine: Any, stir: Any) -> None:
    """With a scale that is no power of two, with adapters off, and with another one active."""
    from fsdp_diffusers_engine.adapted_linear import AdaptedLinear
    from peft.tuners.lora import Linear

    engine = make_engine(model={"lora_alpha": 7, "policy_state_adapters": ["default", "old"]})
    stir(engine)
    layer = next(m for m in engine.module.modules() if isinstance(m, AdaptedLinear))
    stock = copy.deepcopy(layer)
    stock.__class__ = Linear
    x = torch.randn(2, 5, layer.in_features)
    base = layer.base_layer(x)
    assert (layer(x) - stock(x)).abs().max() < 1e-6
    assert (layer(x) - base).abs().max() > 1e-3
    for change in (lambda m: m.set_adapter("old"), lambda m: m.enable_adapters(False)):
        change(layer)
        change(stock)
        assert (layer(x) - stock(x)).abs().max() < 1e-6
    assert torch.equal(layer(x), base)
