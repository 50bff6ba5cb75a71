"""Named adapters in one model: bitwise copies, an average that stays exact, switches that always switch back."""

from __future__ import annotations

import pytest
import torch
from lora_sync import AdapterError, BindError, LoRAAdapterMixin, extract_lora
from lora_sync.layers import adapter_parameters
from peft import LoraConfig, inject_adapter_in_model


class Policy(LoRAAdapterMixin):
    def __init__(self, module):
        self.module = module


@pytest.fixture
def policy(tools):
    return Policy(tools.adapted(targets=("to_q", "to_out.0"), adapters=("default", "old")))


def active(module) -> set[str]:
    return {name for m in module.modules() if hasattr(m, "lora_A") for name in m.active_adapters}


def output(module) -> torch.Tensor:
    layer = next(m for m in module.modules() if hasattr(m, "lora_A"))
    with torch.no_grad():
        return layer(torch.linspace(-1, 1, layer.in_features)[None])


def test_copy_is_bitwise_and_takes_alpha_along(policy):
    layer = next(m for m in policy.module.modules() if hasattr(m, "lora_A"))
    layer.scaling["default"] = 0.3
    assert extract_lora(policy.module, "old", version=0).hash != extract_lora(policy.module, "default", version=0).hash
    policy.copy_adapter("default", "old")
    assert extract_lora(policy.module, "old", version=0).hash == extract_lora(policy.module, "default", version=0).hash
    before = extract_lora(policy.module, "old", version=0)
    for name, parameter in policy.module.named_parameters():
        if ".default." in name:
            parameter.data.add_(1)
    assert extract_lora(policy.module, "old", version=0).hash == before.hash  # no shared memory


def test_ema_follows_a_float64_reference_over_1000_steps():
    module = torch.nn.Sequential(torch.nn.Linear(24, 16), torch.nn.Linear(16, 8))
    for name in ("default", "old"):
        inject_adapter_in_model(LoraConfig(r=4, target_modules=["0", "1"], init_lora_weights=False), module, name)
    policy = Policy(module)
    generator = torch.Generator().manual_seed(0)
    sources, targets = (list(adapter_parameters(policy.module, name).values()) for name in ("default", "old"))
    reference = [target.detach().double() for target in targets]
    decay = 0.99
    for _ in range(1000):
        for source in sources:
            source.data.add_(torch.randn(source.shape, generator=generator), alpha=1e-3)
        policy.ema_update_adapter("default", "old", decay)
        for value, source in zip(reference, sources, strict=True):
            value.mul_(decay).add_(source.detach().double(), alpha=1 - decay)
    worst = max(float((t.detach().double() - v).abs().max()) for t, v in zip(targets, reference, strict=True))
    largest = max(float(v.abs().max()) for v in reference)
    assert 0 < worst < 4 * torch.finfo(torch.float32).eps * largest, (worst, largest)


def test_ema_ends_of_the_range(policy):
    start = extract_lora(policy.module, "old", version=0).hash
    policy.ema_update_adapter("default", "old", 1.0)
    assert extract_lora(policy.module, "old", version=0).hash == start
    policy.ema_update_adapter("default", "old", 0.0)
    assert extract_lora(policy.module, "old", version=0).hash == extract_lora(policy.module, version=0).hash
    for decay in (-0.1, 1.1, float("nan")):
        with pytest.raises(AdapterError, match="decay"):
            policy.ema_update_adapter("default", "old", decay)


def test_ema_refuses_a_dtype_that_would_swallow_it(tools):
    policy = Policy(tools.adapted(targets=("to_q",), adapters=("default", "old"), dtype=torch.bfloat16))
    policy.copy_adapter("default", "old")
    with pytest.raises(AdapterError, match="float32"):
        policy.ema_update_adapter("default", "old", 0.999)


def test_use_adapter_changes_the_function_and_comes_back(policy):
    first = output(policy.module)
    with policy.use_adapter("old"):
        second = output(policy.module)
        with policy.disable_adapter():
            bare = output(policy.module)
            with policy.use_adapter("default"):
                assert torch.equal(output(policy.module), first)
            assert torch.equal(output(policy.module), bare)
            with policy.use_adapter("reference"):
                assert torch.equal(output(policy.module), bare)
        assert torch.equal(output(policy.module), second)
        assert active(policy.module) == {"old"}
    assert torch.equal(output(policy.module), first)
    assert not torch.equal(first, second)
    assert not torch.equal(first, bare)


@pytest.mark.parametrize("name", ["old", "reference"])
def test_an_exception_inside_restores_the_state(policy, name):
    with pytest.raises(RuntimeError, match="boom"), policy.use_adapter(name):
        raise RuntimeError("boom")
    assert active(policy.module) == {"default"}


def test_switching_leaves_gradients_alone(policy):
    before = {n: p.requires_grad for n, p in policy.module.named_parameters()}
    with policy.use_adapter("old"):
        assert {n: p.requires_grad for n, p in policy.module.named_parameters()} == before
    assert {n: p.requires_grad for n, p in policy.module.named_parameters()} == before


def test_reference_is_no_adapter(policy):
    for call in (
        lambda: policy.copy_adapter("reference", "old"),
        lambda: policy.copy_adapter("default", "reference"),
        lambda: extract_lora(policy.module, "reference", version=0),
    ):
        with pytest.raises(AdapterError, match="every adapter off"):
            call()


def test_unknown_names_and_unequal_shapes_are_errors(policy, tools):
    with pytest.raises(AdapterError, match="'nobody' is not in"):
        policy.copy_adapter("default", "nobody")
    with pytest.raises(AdapterError, match="nobody"), policy.use_adapter("nobody"):
        pass
    with pytest.raises(AdapterError, match="no LoRA layers"), Policy(tools.base()).disable_adapter():
        pass
    policy.module.add_adapter(LoraConfig(r=2, lora_alpha=8, target_modules=["to_q", "to_out.0"]), "thin")
    with pytest.raises(BindError, match="same rank"):
        policy.copy_adapter("default", "thin")
    policy.module.add_adapter(LoraConfig(r=4, lora_alpha=8, target_modules=["to_q"]), "fewer")
    with pytest.raises(BindError, match="different modules"):
        policy.copy_adapter("default", "fewer")
