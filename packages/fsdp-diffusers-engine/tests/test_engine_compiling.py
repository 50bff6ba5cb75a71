"""What the compiler is given: no complex numbers, the same rotation; and adapters whose scale costs backward nothing."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
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


def test_compiled_blocks_of_qwen_hold_no_complex_product(
    make_engine: Any, make_batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor runs a product of complex numbers by itself, in fp32, between its kernels."""
    seen: list[str] = []
    original = nn.Module.compile

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        for node in graph.graph.nodes:
            value = node.meta.get("example_value")
            if node.op != "placeholder" and isinstance(value, torch.Tensor):
                seen.append(str(value.dtype))
        return graph.forward

    monkeypatch.setattr(nn.Module, "compile", lambda self: original(self, backend=backend))
    engine, data = make_engine(engine={"use_torch_compile": True}), make_batch(count=2)
    with engine.eval_mode():
        engine.forward_backward_batch(data, None, forward_only=True)
    assert "torch.float32" in seen
    assert not [dtype for dtype in seen if "complex" in dtype]


def test_compiled_blocks_of_z_image_hold_no_complex_product() -> None:
    """And compute what the stock ones do, with and without a mask."""
    from diffusers.models.transformers.transformer_z_image import ZImageTransformerBlock

    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        values = [node.meta.get("example_value") for node in graph.graph.nodes if node.op != "placeholder"]
        seen.extend(str(value.dtype) for value in values if isinstance(value, torch.Tensor))
        return graph.forward

    torch.manual_seed(0)
    block = ZImageTransformerBlock(0, 48, 3, 3, 1e-5, True)
    stock = copy.deepcopy(block)
    compiling.compile_blocks([])
    block.compile(backend=backend, fullgraph=True)
    x, temb = torch.randn(2, 7, 48), torch.randn(2, 48)
    freqs = torch.polar(torch.ones(2, 7, 8), torch.randn(2, 7, 8))
    mask = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])
    for given in (None, mask):
        found, wanted = block(x, given, freqs, temb), stock(x, given, freqs, temb)
        assert (found - wanted).abs().max() < 1e-6 * wanted.abs().max()
    assert "torch.float32" in seen
    assert not [dtype for dtype in seen if "complex" in dtype]


def test_compiled_blocks_compute_gelu_without_a_tanh() -> None:
    """The same numbers and gradients, both kinds of module; what is not compiled, or is another GELU, stays."""
    from diffusers.models.activations import GELU

    seen: set[str] = set()

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.update(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    torch.manual_seed(0)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.each = nn.ModuleList([GELU(8, 8, approximate="tanh"), nn.GELU(approximate="tanh"), nn.GELU()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functools.reduce(lambda y, layer: layer(y), self.each, x)

    block = Block()
    stock = copy.deepcopy(block)
    gelu.let_compile([block])
    assert type(block.each[-1]) is nn.GELU
    assert block.state_dict().keys() == stock.state_dict().keys()
    x = 4 * torch.randn(64, 8)
    assert torch.equal(block(x), stock(x))
    block.compile(backend=backend, fullgraph=True)
    for dtype, limit in ((torch.float64, 1e-5), (torch.float32, 1e-6), (torch.bfloat16, 2**-7)):
        given = [x.to(dtype, copy=True).requires_grad_() for _ in range(2)]
        found, wanted = block.to(dtype)(given[0]), stock.to(dtype)(given[1])
        found.square().sum().backward()
        wanted.square().sum().backward()
        assert found.dtype == dtype
        assert (found - wanted).abs().max() <= limit * wanted.abs().max()
        assert (given[0].grad - given[1].grad).abs().max() <= 2 * limit * given[1].grad.abs().max()
    assert len([name for name in seen if "gelu" in name]) == 1


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
