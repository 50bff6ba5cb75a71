"""Frozen weights that a second process uses where they lie: layouts, values, and a real second process."""

import pickle
from pathlib import Path

import pytest
import torch
from lora_sync import extract_lora, get_map
from lora_sync.layers import base_parameters
from lora_sync.one_copy import Layout, lend, lend_adapter, lent_adapter

WHOLE = "blocks.0.attn.to_qkv.weight"


@pytest.fixture
def module():
    """A block as the trainer has it: q, k and v apart."""
    torch.manual_seed(0)
    block = torch.nn.ModuleDict({"attn": torch.nn.ModuleDict({f"to_{x}": torch.nn.Linear(6, 4) for x in "qkv"})})
    block["norm"] = torch.nn.LayerNorm(6)
    return torch.nn.ModuleDict({"blocks": torch.nn.ModuleList([block])})


def test_parameters_become_rows_of_what_the_borrower_holds(module):
    before = {name: value.detach().clone() for name, value in base_parameters(module).items()}
    wanted = {WHOLE: Layout(torch.float32, (12, 6)), "blocks.0.norm.weight": Layout(torch.float32, (6,))}
    loans = lend(module, wanted, "qwen_image")
    assert set(loans) == set(wanted)
    whole = loans[WHOLE].open()
    assert torch.equal(whole, torch.cat([before[f"blocks.0.attn.to_{x}.weight"] for x in "qkv"]))
    assert all(torch.equal(value, before[name]) for name, value in base_parameters(module).items())
    whole[4:8] = 7.0
    assert bool((module["blocks"][0]["attn"]["to_k"].weight == 7.0).all())
    again = lend(module, wanted, "qwen_image")
    assert float(again[WHOLE].open()[5, 0]) == 7.0  # the same memory, for a borrower that comes later


@pytest.mark.parametrize("layout", [Layout(torch.bfloat16, (12, 6)), Layout(torch.float32, (4, 6))])
def test_what_is_laid_out_otherwise_is_not_lent(module, layout):
    assert lend(module, {WHOLE: layout, "blocks.0.attn.to_out.weight": layout}, "qwen_image") == {}


def test_a_process_maps_the_memory(module, forked, tmp_path):
    (tmp_path / "loans").write_bytes(pickle.dumps(lend(module, {WHOLE: Layout(torch.float32, (12, 6))}, "qwen_image")))
    q = module["blocks"][0]["attn"]["to_q"].weight
    first = float(q.detach()[0, 0])
    done = forked([Path(__file__).with_name("borrower.py"), tmp_path / "loans"])
    said, errors = done.communicate(timeout=120)
    assert done.returncode == 0, errors[-2000:]
    sums = float(sum(module["blocks"][0]["attn"][f"to_{x}"].weight.detach().double().sum() for x in "qkv"))
    name, *shape, told = said.split()
    assert (name, " ".join(shape)) == (WHOLE, "(12, 6)")
    assert abs(float(told) - (sums - 1)) < 1e-5
    assert abs(float(q.detach()[0, 0]) - (first + 1)) < 1e-6


def test_the_adapter_is_extracted_as_before(tools):
    adapted = tools.adapted("qwen_image")
    before = extract_lora(adapted, version=1).hash
    layouts = {name: Layout(p.dtype, tuple(p.shape)) for name, p in base_parameters(adapted).items()}
    assert set(lend(adapted, layouts, "any")) == set(layouts)
    assert extract_lora(adapted, version=2).hash == before


def test_an_adapter_is_lent_as_it_is_at_each_moment(tools):
    adapted = tools.adapted("qwen_image")
    assert lent_adapter(adapted, "default", 1) is None
    payload, loans = extract_lora(adapted, version=1), lend_adapter(adapted, "default")
    assert {name: loan.open().tolist() for name, loan in loans.items()} == {
        n: t.tolist() for n, t in payload.tensors.items()
    }
    parameter = next(p for n, p in adapted.named_parameters() if "lora_B" in n)
    optimizer = torch.optim.AdamW([p for n, p in adapted.named_parameters() if "lora_" in n], lr=0.1)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    now, sent = extract_lora(adapted, version=2), lent_adapter(adapted, "default", 2)
    assert now.hash != payload.hash
    assert all(torch.equal(loans[name].open(), tensor) for name, tensor in now.tensors.items())
    assert sent.promise == now.promise._replace(hash="")
    assert sent.scales == {module: now.scale_of(module) for module in now.modules}
    parameter.data = parameter.data.clone()  # such as an adapter that went to the CPU and came back
    assert lent_adapter(adapted, "default", 3) is None


@pytest.mark.parametrize("name", ["qwen_image", "flux", "sd3", "z_image", "wan"])
def test_engine_names_lead_back(name, tools):
    names = get_map(name)
    for layer, child in tools.base(name).named_modules():
        if isinstance(child, torch.nn.Linear):
            try:
                there, index, _ = names.vllm_layer(layer)
            except ValueError:
                continue
            assert names.from_vllm(f"{there}.weight")[index or 0] == f"{layer}.weight"
