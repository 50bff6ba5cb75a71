"""What an engine on a GPU needs of this package, as far as a CPU can show it: layers in fp8, cut by rank, or compiled in blocks."""

import platform
import sys
from unittest.mock import patch

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


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_engine_counts_what_its_layers_hold(engine, server, runner, ranks):
    """Every element of the adapter once, whichever ranks hold it; one that is wrong in one place is not counted."""

    def counts():
        from omni_rollout.vllm_omni import worker_adapters as module
        from omni_rollout.vllm_omni.lora_product import Factors, LoRAMethod
        from vllm.model_executor.layers.linear import ColumnParallelLinear

        part = {"A": torch.randn(2, 5), "B": torch.randn(6, 2)}

        def held(rank):
            """A layer of `ranks` ranks: A on all of them, B cut by rows."""
            layer = ColumnParallelLinear.__new__(ColumnParallelLinear)
            torch.nn.Module.__init__(layer)
            layer.tp_size, layer.tp_rank = ranks, rank
            method = LoRAMethod(None, [6 // ranks])
            method.active = Factors(part["A"].clone(), part["B"].chunk(ranks)[rank].clone())
            layer.quant_method = method
            return layer

        def among(size, reduce):
            names = "get_tensor_model_parallel_world_size", "tensor_model_parallel_all_reduce"
            return patch.multiple(module, **dict(zip(names, (lambda: size, reduce), strict=True)))

        def counted(layers):
            worker = module.WorkerAdapters.__new__(module.WorkerAdapters)
            worker.device = torch.device("cpu")
            sent, parts = {"to_q": {0: part}}, []
            with among(1, lambda value: parts.append(value) or value):
                for layer in layers:
                    worker._equal({"to_q": layer}, sent)
            with among(ranks, lambda value: sum(parts)):
                return worker._equal({"to_q": layers[0]}, sent)

        layers = [held(rank) for rank in range(ranks)]
        found = [counted(layers)]
        layers[-1].quant_method.active.b[0, 0] += 1
        found.append(counted(layers))
        layers[-1].quant_method.active.a[1, 3] = float("nan")
        return [*found, counted(layers)]

    *found, less = runner.run(engine.backend.call(server.do, counts))
    assert found == [22, 21]
    assert less < 21
