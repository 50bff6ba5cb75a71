"""Sampling with the frozen weights in fp8: near the policy, measurably another, and gone afterwards."""

from contextlib import nullcontext

import pytest
import torch
import torch._dynamo.testing
from omni_rollout.diffusers_backend import DiffusersBackend
from omni_rollout.errors import RolloutConfigError
from omni_rollout.fp8 import Fp8Linear, fp8_weights, rounded
from torch import nn


def test_rounding_keeps_the_relative_step_of_e4m3():
    rows = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 64)[:, None]
    low, scale = rounded(rows)
    assert low.dtype == torch.float8_e4m3fn
    assert scale.shape == (64, 1)
    back = low.float() * scale
    assert ((back - rows).abs() <= rows.abs() * 2**-4 + scale * 2**-9).all()
    assert rounded(torch.zeros(2, 16))[0].float().abs().max() == 0


def test_samples_are_near_and_the_weights_come_back(tiny, make_request):
    backend = DiffusersBackend.from_pretrained(tiny, dtype=torch.bfloat16, fp8=True)
    before = {name: value.clone() for name, value in backend.transformer.state_dict().items()}
    kinds = [type(module) for module in backend.transformer.modules()]
    requests = [make_request(i) for i in range(2)]
    found = backend.generate(requests)
    assert [type(module) for module in backend.transformer.modules()] == kinds
    assert all(torch.equal(value, before[name]) for name, value in backend.transformer.state_dict().items())
    backend.fp8 = False
    wanted = backend.generate(requests)
    gap = (found["rollout_log_probs"] - wanted["rollout_log_probs"]).abs().max()
    off = (found["final_latents"] - wanted["final_latents"]).norm() / wanted["final_latents"].norm()
    assert 0 < off < 0.3
    assert gap < 0.5  # same draws: the density of the noise is almost the same


def test_which_layers_are_rounded(tiny):
    transformer = DiffusersBackend.from_pretrained(tiny, dtype=torch.bfloat16).transformer
    with fp8_weights(transformer):
        names = {name for name, module in transformer.named_modules() if type(module) is Fp8Linear}
    assert names
    assert all("transformer_blocks" in name and "_mod" not in name and "norm" not in name for name in names)
    assert any(name.endswith("to_q") for name in names)
    assert any("img_mlp" in name for name in names)


def test_a_module_without_such_layers_is_refused():
    with pytest.raises(RolloutConfigError, match=r"Linear has no layer for it"), fp8_weights(nn.Linear(16, 16)):
        pass


def test_compiled_blocks_keep_a_graph_for_each_kind_of_weights(tiny):
    """Sampling in fp8 and other passes take turns: each finds its own graph again, and none is compiled twice."""
    transformer = DiffusersBackend.from_pretrained(tiny, dtype=torch.bfloat16).transformer
    block = next(m for m in transformer.modules() if type(m).__name__ in transformer._repeated_blocks)
    linear = next(name for name, m in block.named_modules() if name.endswith("to_q") and type(m) is nn.Linear)
    layer = block.get_submodule(linear)
    x = torch.randn(2, 8, layer.in_features, generator=torch.Generator().manual_seed(0), dtype=torch.bfloat16)
    compiled = torch._dynamo.testing.CompileCounter()
    call = torch.compile(lambda x: layer(x), backend=compiled)

    @torch.no_grad()
    def drawn(low: bool) -> tuple[torch.Tensor, torch.Tensor]:
        with fp8_weights(transformer) if low else nullcontext():
            return call(x), layer(x)

    for turn in range(3):
        low, own = drawn(True), drawn(False)
        torch.testing.assert_close(*low)
        torch.testing.assert_close(*own)
        assert not torch.equal(low[1], own[1])
        assert compiled.frame_count == 2, turn
