"""Binding and receipts: all of it or none of it, and a number for everything."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
import torch
from lora_sync import (
    AdapterError,
    BindError,
    CorruptPayloadError,
    LoRAPayload,
    LoRAReceipt,
    LoRASyncError,
    StaleVersionError,
    WrongBaseError,
    applied_version,
    apply_lora,
    extract_lora,
    fingerprint,
    verify,
)


@pytest.fixture
def payload(tools):
    module = tools.adapted(targets=("to_q", "to_out.0"))
    return extract_lora(module, version=5, base_fingerprint=fingerprint(module))


@pytest.fixture
def receiver(tools):
    module = tools.adapted(targets=("to_q", "to_out.0"))
    tools.randomise(module, seed=77)
    return module


def test_binding_into_an_existing_adapter(payload, receiver):
    old = extract_lora(receiver, version=0)
    parameters = list(receiver.parameters())
    receipt = apply_lora(receiver, payload)
    verify(payload, receipt, previous_version=4)
    assert (receipt.version, receipt.modules_bound, receipt.tensors_bound, receipt.tensors_ignored) == (5, 8, 16, 0)
    assert receipt.hash == payload.hash == extract_lora(receiver, version=0).hash != old.hash
    assert all(a is b for a, b in zip(parameters, receiver.parameters(), strict=True))  # optimizers keep their grip
    shared = {t.data_ptr() for t in payload.tensors.values()} & {p.data_ptr() for p in receiver.parameters()}
    assert not shared


def test_binding_adds_the_adapter_when_it_is_missing(payload, tools):
    module = tools.base()
    receipt = verify(payload, apply_lora(module, payload, "policy"))
    assert receipt.modules_bound == 8
    assert extract_lora(module, "policy", version=0).hash == payload.hash
    assert not any(p.requires_grad for n, p in module.named_parameters() if "lora_" in n)
    tiny = tools.tiny["qwen_image"]
    pictures = [tiny.picture(quiet(tiny.pipeline(m))) for m in (module, tools.adapted(targets=("to_q", "to_out.0")))]
    torch.testing.assert_close(*pictures, rtol=0, atol=1e-5)  # PEFT made one of the two


def quiet(pipe):
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_alpha_travels(payload, receiver):
    stronger = LoRAPayload.build(payload.tensors, alphas=12.0, version=6)
    apply_lora(receiver, stronger)
    assert extract_lora(receiver, version=0).scale_of(payload.modules[0]) == 3.0


def test_bfloat16_receiver_of_a_float32_adapter(payload, tools):
    module = tools.adapted(targets=("to_q", "to_out.0"), dtype=torch.bfloat16)
    receipt = apply_lora(module, payload)
    verify(payload, receipt)
    rounded = {name: tensor.bfloat16() for name, tensor in payload.tensors.items()}
    held = extract_lora(module, version=0)
    assert held.hash == LoRAPayload.build(rounded, alphas=payload.alphas, version=0).hash


def unchanged(module, action, error, match):
    """The action fails by name and leaves every parameter, the active adapter and the record as they were."""
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    record = applied_version(module)
    with pytest.raises(error, match=match) as caught:
        action()
    assert isinstance(caught.value, LoRASyncError)
    after = dict(module.named_parameters())
    assert set(after) == set(before)
    assert all(torch.equal(after[n], v) for n, v in before.items())
    assert applied_version(module) == record


def test_old_versions_are_refused_and_retries_are_not(payload, receiver):
    apply_lora(receiver, payload)
    older = LoRAPayload.build({k: v + 1 for k, v in payload.tensors.items()}, alphas=8.0, version=4)
    same = replace(older, version=5)
    unchanged(receiver, lambda: apply_lora(receiver, older), StaleVersionError, "not newer")
    unchanged(receiver, lambda: apply_lora(receiver, same), StaleVersionError, "not newer")
    apply_lora(receiver, payload)  # the same again: an idempotent retry
    assert applied_version(receiver) == (5, payload.hash)


def test_wrong_base_is_refused(payload, tools):
    module = tools.adapted(targets=("to_q", "to_out.0"))
    module.proj_out.base_layer.weight.data.mul_(2) if hasattr(module.proj_out, "base_layer") else (
        module.proj_out.weight.data.mul_(2)
    )
    unchanged(module, lambda: apply_lora(module, payload), WrongBaseError, "was trained on")


def test_wrong_architecture_is_refused(payload, tools):
    module = tools.base("sd3")
    anonymous = replace(payload, base_fingerprint=None)
    unchanged(module, lambda: apply_lora(module, anonymous), BindError, "another architecture|is for a weight")


def test_missing_extra_and_misshapen_tensors_are_refused(payload, tools, receiver):
    fewer = tools.adapted(targets=("to_q",))
    more = tools.adapted(targets=("to_q", "to_out.0", "to_k"))
    unchanged(fewer, lambda: apply_lora(fewer, payload), BindError, "have no place")
    unchanged(more, lambda: apply_lora(more, payload), BindError, "would keep old values")
    wider = tools.adapted(targets=("to_q", "to_out.0"), rank=8)
    unchanged(wider, lambda: apply_lora(wider, payload), BindError, "same rank")
    unchanged(receiver, lambda: apply_lora(receiver, payload, "reference"), BindError, "every adapter off")


def test_a_changed_payload_is_refused(payload, receiver):
    payload.tensors[payload.modules[0] + ".lora_A.weight"][0, 0] += 1
    unchanged(receiver, lambda: apply_lora(receiver, payload), CorruptPayloadError, "promised")


@pytest.mark.parametrize("at", [0, 7, 15])
def test_dying_in_the_middle_of_a_copy_restores_the_old_adapter(payload, receiver, monkeypatch, at):
    from lora_sync import bind

    count = 0
    real = bind.copy_into

    def failing(target, source):
        nonlocal count
        count += 1
        real(target, source)
        if count == at + 1:
            raise BindError("the device is gone")

    monkeypatch.setattr(bind, "copy_into", failing)
    unchanged(receiver, lambda: apply_lora(receiver, payload), BindError, "device is gone")


def test_dying_while_adding_an_adapter_removes_it(payload, tools, monkeypatch):
    from lora_sync import bind

    module = tools.base()
    names = {n for n, _ in module.named_parameters()}
    monkeypatch.setattr(bind, "copy_into", lambda target, source: (_ for _ in ()).throw(BindError("gone")))
    with pytest.raises(BindError, match="gone"):
        apply_lora(module, payload)
    assert not any("lora_" in n for n, _ in module.named_parameters())
    assert {n.replace(".base_layer", "") for n, _ in module.named_parameters()} == names
    monkeypatch.undo()
    verify(payload, apply_lora(module, payload))  # and it can be bound afterwards


def test_a_receiver_that_drops_a_module_is_caught(payload):
    good = LoRAReceipt(5, payload.hash, 8, 16)
    assert verify(payload, good, previous_version=4) is good
    bad = {
        "modules": replace(good, modules_bound=7, tensors_bound=14),
        "tensors": replace(good, tensors_bound=15),
        "ignored": replace(good, tensors_ignored=2),
    }
    for receipt in bad.values():
        with pytest.raises(BindError, match="sent 8 modules / 16 tensors"):
            verify(payload, receipt)
    with pytest.raises(BindError, match="bound 0 / 0"):
        verify(payload, replace(good, modules_bound=0, tensors_bound=0))


def test_verify_names_what_is_wrong(payload):
    good = LoRAReceipt(5, payload.hash, 8, 16)
    with pytest.raises(StaleVersionError, match="stale adapter"):
        verify(payload, replace(good, version=4))
    for previous in (5, 6):
        with pytest.raises(StaleVersionError, match="larger version"):
            verify(payload, good, previous_version=previous)
    with pytest.raises(CorruptPayloadError, match="receiver holds"):
        verify(payload, replace(good, hash="xxh3:00"))
    with pytest.raises(CorruptPayloadError, match="proves nothing"):
        verify(payload, replace(good, hash=None))
    counted = replace(good, hash=None, elements_equal=payload.numel)
    assert verify(payload, counted) is counted
    for equal in (0, payload.numel - 1, payload.numel + 1):
        with pytest.raises(CorruptPayloadError, match=f"{payload.numel} elements were sent, {equal} of them"):
            verify(payload, replace(counted, elements_equal=equal))


def test_the_proof_is_read_from_the_module(payload, tools, monkeypatch):
    """Whatever goes wrong between the payload and the module, the receipt is not a copy of the promise."""
    from lora_sync import bind

    def receiver(dtype=torch.float32):
        module = tools.adapted(targets=("to_q", "to_out.0"), dtype=dtype)
        tools.randomise(module, seed=77)
        return module

    def check(module, match):
        unchanged(module, lambda: apply_lora(module, payload), CorruptPayloadError, match)

    with monkeypatch.context() as patch:
        patch.setattr(bind, "_set_alphas", lambda *args: None)
        check(tools.adapted(targets=("to_q", "to_out.0"), alpha=1), "the module holds")
    with monkeypatch.context() as patch:
        patch.setattr(bind, "copy_into", lambda target, source: None)
        check(receiver(), "the module holds")
        check(receiver(torch.bfloat16), "reads back different")
    receipt = apply_lora(receiver(), payload)
    assert (receipt.hash, receipt.elements_equal) == (payload.hash, None)
    receipt = verify(payload, apply_lora(receiver(torch.bfloat16), payload))
    assert (receipt.hash, receipt.elements_equal) == (None, payload.numel)  # in bfloat16 it has another hash


def test_the_base_is_compared_at_the_first_sync(payload, receiver, monkeypatch):
    from lora_sync import bind

    calls = []
    monkeypatch.setattr(bind, "check_base", lambda *args: calls.append(args))
    for version in (5, 6, 7):
        apply_lora(receiver, replace(payload, version=version))
    assert calls == [(receiver, payload.base_fingerprint)]


def test_receipts_are_plain_numbers_and_strings():
    receipt = LoRAReceipt(5, None, 8, 16, 0, 96)
    assert LoRAReceipt(**json.loads(json.dumps(asdict(receipt)))) == receipt


def test_binding_to_a_name_without_layers(tools):
    with pytest.raises(AdapterError, match="not in this"):
        extract_lora(tools.base(), version=1)
