"""The engine's LoRA product: added in place, per part of a fused projection, whole graphs under the compiler."""

import pytest
import torch
from omni_rollout.vllm_omni.lora_product import Factors, LoRAMethod, add_lora

SIZES = [6, 4, 4]


def factors(dtype=torch.float32, rank=2, wide=5):
    draw = torch.Generator().manual_seed(0)
    shapes = {"y": (2, 3, sum(SIZES)), "x": (2, 3, wide), "a": (len(SIZES) * rank, wide), "b": (sum(SIZES), rank)}
    return [torch.randn(shape, generator=draw).to(dtype) for shape in shapes.values()]


def by_hand(y, x, a, b):
    rank = b.shape[1]
    parts = [x @ part_a.T @ part_b.T for part_a, part_b in zip(a.split(rank), b.split(SIZES), strict=True)]
    return y + torch.cat(parts, dim=-1)


def test_each_part_gets_its_own_product():
    y, x, a, b = (value.double() for value in factors())
    expected = by_hand(y, x, a, b)
    add_lora(y, x, a, b, SIZES)
    assert torch.allclose(y, expected, atol=1e-12)


def test_the_compiler_keeps_it_in_one_graph():
    """vLLM-Omni's own product writes into slices with `out=`, at which Dynamo gives the whole frame up."""
    y, x, a, b = factors()
    expected = by_hand(y, x, a, b).relu()

    def layer(y, x, a, b):
        y = y * 1.0
        add_lora(y, x, a, b, SIZES)
        return y.relu()

    with torch.no_grad():
        found = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)(y, x, a, b)
    assert torch.allclose(found, expected, atol=1e-6)


class Own:
    """A linear layer's method as vLLM has it."""

    def apply(self, layer, x, bias=None):
        return torch.nn.functional.linear(x, layer.weight, bias)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(sum(SIZES), 5))
        self.quant_method = Own()

    def forward(self, x):
        return x + self.quant_method.apply(self, torch.nn.functional.layer_norm(x, (5,))).relu().mean(-1, keepdim=True)


def test_new_versions_of_an_adapter_compile_nothing():
    """As the engine compiles: each block's own forward, shapes dynamic. One graph without an adapter, one with, no break."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    blocks = [Block() for _ in range(3)]
    for block in blocks:
        block.forward = torch.compile(block.forward, dynamic=True, backend="aot_eager")

    def graphs(rows):
        x = torch.randn(rows, 4, 5)
        for block in blocks:
            x = block(x)
        return counters["stats"]["unique_graphs"]

    with torch.inference_mode():
        assert [graphs(3), graphs(7)] == [1, 1]
        for block in blocks:
            block.quant_method = LoRAMethod(block.quant_method, SIZES)
        found = []
        for _ in range(3):
            for block in blocks:
                block.quant_method.active = Factors(torch.randn(6, 5), torch.randn(sum(SIZES), 2))
            found += [graphs(3), graphs(7)]
    assert found == [2] * 6
    assert not counters["graph_break"]


@pytest.mark.parametrize("step", [1e-4, 1e-2])
def test_a_small_adapter_is_not_rounded_away(step):
    """Merged into bf16 weights, an adapter after its first steps is all but lost; beside them it is kept."""
    draw = torch.Generator().manual_seed(1)
    weight = (torch.randn(256, 256, generator=draw) * 0.02).bfloat16()
    a, b = torch.randn(64, 256, generator=draw) / 64, torch.randn(256, 64, generator=draw).sign() * step
    x, change = torch.randn(64, 256, generator=draw).bfloat16(), 2 * b @ a  # scale alpha / r = 2
    exact = x.double() @ change.double().T
    merged = (weight.float() + change).bfloat16()
    apart = torch.zeros(64, 256)
    add_lora(apart, x.float(), a.bfloat16().float(), (2 * b).bfloat16().float(), [256])

    def kept(found):
        return float((found.double() * exact).sum() / exact.square().sum())

    assert kept(apart) == pytest.approx(1.0, abs=0.02)
    lost = float(((merged == weight) & (change != 0)).float().mean())
    gap = float((x.double() @ (merged.double() - weight.double()).T - exact).norm() / exact.norm())
    ours = float((apart.double() - exact).norm() / exact.norm())
    assert ours < 0.01 < gap  # the merge's own rounding is noise as large as a good part of the change
    assert lost > (0.5 if step < 1e-3 else 0.0)
    print(f"step {step}: {lost:.0%} of the weights do not move, merged off by {gap:.2f}, apart by {ours:.4f}")
