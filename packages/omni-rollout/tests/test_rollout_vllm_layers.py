"""What an engine on a GPU needs of this package, as far as a CPU can show it: layers in fp8, blocks that are compiled."""

import platform
import sys

import pytest
import torch
from lora_sync import LoRAPayload

pytestmark = pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64"), reason="vLLM-Omni has wheels for Linux x86-64 only"
)


def test_layers_that_are_quantized_as_they_load_get_their_values_on_the_device(engine, server, runner):
    """The engine builds a pipeline of one's own on the CPU; torch refuses to move what has no values."""
    assert runner.run(engine.backend.call(server.moved)) == (True, "cpu", True)


def test_an_adapter_beside_a_weight_that_lies_the_other_way_round(engine, server, runner):
    draw = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 6, generator=draw), torch.randn(4, 2, generator=draw)
    payload = LoRAPayload.build({"proj.lora_A.weight": a, "proj.lora_B.weight": b}, alphas=4.0, version=1)
    facts, product = runner.run(engine.backend.call(server.bound_to_a_turned_weight, payload))
    assert facts == {"modules": 1, "tensors": 2, "equal": payload.numel}
    assert torch.allclose(product, (2.0 * b @ a).T, atol=1e-6)


@pytest.mark.parametrize("mask", [None, torch.tensor([[True] * 3, [True, False, False]])])
def test_compiled_blocks_attend_as_the_engines_own_do(engine, server, runner, mask):
    off, largest = runner.run(engine.backend.call(server.attended_jointly, mask))
    assert off < 1e-5 * largest
