"""Merging: the merged model is the adapted model, and unmerging leaves no trace."""

from __future__ import annotations

import pytest
import torch
from lora_sync import BindError, PayloadError, merge, merged_weights, unmerge, use_adapter
from lora_sync.merge import lora_delta
from peft import LoraConfig, inject_adapter_in_model
from torch import nn


@pytest.fixture
def module(tools):
    return tools.adapted()


def picture(tools, module):
    tiny = tools.tiny["qwen_image"]
    pipe = tiny.pipeline(module)
    pipe.set_progress_bar_config(disable=True)
    return tiny.picture(pipe)


def test_float32_round_trip_is_bitwise_and_the_picture_agrees(tools, module):
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    adapted = picture(tools, module)
    report = merge(module)
    assert report.modules == 48
    assert report.undo_error == 0.0
    assert report.kept_bytes == sum(before[n].nbytes for n in before if n.endswith("base_layer.weight"))
    assert 0 < report.rounding < 1e-6
    torch.testing.assert_close(picture(tools, module), adapted, rtol=0, atol=1e-5)
    assert unmerge(module) == report
    assert all(torch.equal(p, before[n]) for n, p in module.named_parameters())
    assert torch.equal(picture(tools, module), adapted)


def linear(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(48, 32), nn.Linear(32, 16)).to(dtype)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["0", "1"], init_lora_weights=False)
    inject_adapter_in_model(config, module)
    return module


def test_bfloat16_error_is_measured_and_below_its_bound():
    module = linear(torch.bfloat16)
    before = [p.detach().clone() for n, p in module.named_parameters() if "base_layer.weight" in n]
    report = merge(module)
    assert report.kept_bytes == 0
    unmerge(module)
    after = [p.detach() for n, p in module.named_parameters() if "base_layer.weight" in n]
    error = max(float((a.float() - b.float()).abs().max()) for a, b in zip(before, after, strict=True))
    assert error == pytest.approx(report.undo_error)
    assert 0 < report.undo_error <= report.undo_bound
    assert 0 < report.rounding <= report.undo_bound


def test_bfloat16_can_be_exact_for_memory():
    module = linear(torch.bfloat16)
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    report = merge(module, exact=True)
    assert report.kept_bytes == (48 * 32 + 32 * 16) * 2
    unmerge(module)
    assert all(torch.equal(p, before[n]) for n, p in module.named_parameters())


def test_merged_weights_leave_the_model_alone(module):
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    sums = dict(merged_weights(module))
    assert all(torch.equal(p, before[n]) for n, p in module.named_parameters())
    merge(module)
    live = {n.replace(".base_layer", ""): p for n, p in module.named_parameters()}
    assert len(sums) == 48
    assert all(torch.equal(live[name], value) for name, value in sums.items())


def test_convolutions_merge_too():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1))
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["0"], init_lora_weights=False), module)
    x = torch.randn(1, 3, 8, 8)
    with torch.no_grad():
        adapted = module(x)
        merge(module)
        torch.testing.assert_close(module(x), adapted, rtol=0, atol=1e-5)
    assert lora_delta(module[0], "default").shape == (6, 27)


def test_states_that_cannot_be_merged(module):
    with pytest.raises(BindError, match="nothing is merged"):
        unmerge(module)
    merge(module)
    with pytest.raises(BindError, match="merged already"):
        merge(module)
    with pytest.raises(BindError, match="unmerge first"), use_adapter(module, "reference"):
        pass
    unmerge(module)
    layer = next(m for m in module.modules() if hasattr(m, "lora_A"))
    layer.fan_in_fan_out = True
    with pytest.raises(PayloadError, match="fan_in_fan_out"):
        merge(module)


def test_a_failure_in_the_middle_restores_the_weights(module, monkeypatch):
    import sys

    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    real, count = lora_delta, 0

    def failing(*args, **kwargs):
        nonlocal count
        count += 1
        if count == 20:
            raise RuntimeError("out of memory")
        return real(*args, **kwargs)

    monkeypatch.setattr(sys.modules["lora_sync.merge"], "lora_delta", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        merge(module)
    assert all(torch.equal(p, before[n]) for n, p in module.named_parameters())
    assert not any(m.merged_adapters for m in module.modules() if hasattr(m, "merged_adapters"))
    monkeypatch.undo()
    merge(module)
