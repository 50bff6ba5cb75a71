"""Full-weight streams: bounded, counted, and complete or refused."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from lora_sync import (
    BindError,
    CorruptPayloadError,
    PayloadError,
    StaleVersionError,
    base_weights,
    checksum,
    content_sum,
    load_named,
    load_weights,
    stream_weights,
    use_adapter,
    weights_complete,
)
from lora_sync import buckets as grouped
from peft import LoraConfig, inject_adapter_in_model
from torch import nn


def test_a_stream_makes_another_model_the_same(tools):
    source, target = tools.adapted(), tools.base(seed=0)
    for parameter in target.parameters():
        parameter.data.zero_()
    buckets = list(stream_weights(base_weights(source), version=3, bucket_bytes=100_000))
    receipt = load_weights(target, buckets, previous_version=2)
    assert receipt.version == 3
    assert receipt.tensors_bound == len(list(target.parameters())) == sum(len(bucket.tensors) for bucket in buckets)
    assert receipt.checksum == content_sum(tensor for bucket in buckets for tensor in bucket.tensors.values())
    wanted = tools.base().state_dict()
    assert all(torch.equal(v, wanted[k]) for k, v in target.state_dict().items())
    assert weights_complete(target)


def test_buckets_are_bounded_and_made_on_demand(tools):
    source = tools.base()
    largest = max(p.nbytes for p in source.parameters())
    limit = 50_000
    sizes = [
        sum(t.nbytes for t in b.tensors.values())
        for b in stream_weights(base_weights(source), version=1, bucket_bytes=limit)
    ]
    assert len(sizes) > 5
    assert all(size <= max(limit, largest) for size in sizes)
    stream = stream_weights(base_weights(source), version=1, bucket_bytes=limit)
    next(stream)
    changed = list(source.parameters())[-1]
    changed.data.add_(1)
    last = list(stream)[-1]
    assert any(torch.equal(t, changed) for t in last.tensors.values())  # not read before it was due


def test_an_adapter_can_be_added_on_the_way(tools):
    source, target = tools.adapted(), tools.base()
    before = {name: value.detach().clone() for name, value in source.named_parameters()}
    load_weights(target, stream_weights(base_weights(source, "default"), version=1))
    assert all(torch.equal(value, before[name]) for name, value in source.named_parameters())
    plain = tools.base().state_dict()
    assert sum(not torch.equal(value, plain[name]) for name, value in target.state_dict().items()) == 48
    tiny = tools.tiny["qwen_image"]
    pipes = [tiny.pipeline(module) for module in (source, target)]
    for pipe in pipes:
        pipe.set_progress_bar_config(disable=True)
    torch.testing.assert_close(*map(tiny.picture, pipes), rtol=0, atol=1e-5)


def test_an_adapter_on_a_convolution_is_added_too():
    torch.manual_seed(0)
    module, target = (nn.Sequential(nn.Conv2d(3, 6, 3, padding=1)) for _ in range(2))
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["0"], init_lora_weights=False), module)
    load_named(target, base_weights(module, "default"))
    x = torch.randn(1, 3, 8, 8)
    torch.testing.assert_close(target(x), module(x), rtol=0, atol=1e-5)


def test_layers_that_cannot_be_merged_are_refused(tools):
    module = tools.adapted()
    layer = next(m for m in module.modules() if hasattr(m, "lora_A"))
    layer.merged_adapters.append("default")
    with pytest.raises(BindError, match="merged by PEFT"):
        dict(base_weights(module, "default"))
    with pytest.raises(BindError, match="unmerge first"), use_adapter(module, "reference"):
        pass
    layer.merged_adapters.clear()
    layer.fan_in_fan_out = True
    with pytest.raises(PayloadError, match="fan_in_fan_out"):
        dict(base_weights(module, "default"))


def test_dtype_and_names_of_the_receiver(tools):
    source, target = tools.base(), tools.base(seed=0).to(torch.bfloat16)
    load_weights(target, stream_weights(base_weights(source), version=1))
    assert all(torch.equal(a.bfloat16(), b) for a, b in zip(source.parameters(), target.parameters(), strict=True))
    renamed = ((f"other.{name}", value) for name, value in base_weights(source))
    with pytest.raises(BindError, match="under the receiver's names"):
        load_weights(target, stream_weights(renamed, version=1))
    with pytest.raises(PayloadError, match="no weights to stream"):
        next(stream_weights([], version=1))


def test_every_way_to_lose_a_bucket_is_named(tools):
    target = tools.base()
    buckets = list(stream_weights(base_weights(target), version=2, bucket_bytes=200_000))
    assert len(buckets) > 3
    cases = {
        "came where": [buckets[0], *buckets[2:]],
        "came where bucket": [buckets[1], buckets[0], *buckets[2:]],
        "without its last": buckets[:-1],
        "of version 9": [buckets[0], replace(buckets[1], version=9), *buckets[2:]],
    }
    for message, stream in cases.items():
        with pytest.raises(CorruptPayloadError, match=message):
            load_weights(target, stream)
        assert not weights_complete(target)
    twice = [buckets[0], replace(buckets[0], index=1), *(replace(b, index=b.index + 1) for b in buckets[1:])]
    with pytest.raises(CorruptPayloadError, match="sent twice"):
        load_weights(target, twice)
    with pytest.raises(StaleVersionError):
        load_weights(target, buckets, previous_version=2)
    load_weights(target, buckets)
    assert weights_complete(target)


def test_a_model_with_more_parameters_is_not_half_loaded(tools):
    small, big = (
        torch.nn.Sequential(torch.nn.Linear(3, 3)),
        torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)),
    )
    with pytest.raises(BindError, match="2 of 4 parameters were not sent"):
        load_weights(big, stream_weights(base_weights(small), version=1))
    assert not weights_complete(big)


def test_the_checksum_is_of_what_the_module_holds(tools, monkeypatch):
    """A tensor that is counted and not written gives another sum."""
    source, target = tools.base(), tools.base(seed=0)
    named = list(base_weights(source))
    written = load_weights(target, stream_weights(base_weights(source), version=1))
    assert written.checksum == content_sum(value for _, value in named)
    monkeypatch.setattr("lora_sync.weights.copy_into", lambda target, value: None)
    with torch.no_grad():
        next(target.parameters())[0] += 1
    other = load_weights(target, stream_weights(base_weights(source), version=2))
    assert (other.tensors_bound, other.checksum == written.checksum) == (written.tensors_bound, False)


def test_senders_need_not_know_of_lora_layers(tools):
    plain, adapted = tools.base(), tools.adapted()
    named = dict(base_weights(adapted))
    assert list(named) == [name for name, _ in plain.named_parameters()]
    wrapped = {name for name, _ in adapted.named_parameters() if "lora_" not in name}
    assert load_named(tools.adapted(), named.items()) == len(named)
    assert load_named(plain, ((name, named[name.replace("base_layer.", "")]) for name in wrapped)) == len(named)
    with pytest.raises(CorruptPayloadError, match="sent twice"):
        load_named(plain, [*named.items(), *list(named.items())[:1]])
    with pytest.raises(BindError, match="has shape"):
        load_named(plain, ((name, value[None]) for name, value in named.items()))


def test_content_sums_see_every_change_but_not_the_layout():
    weights = [torch.randn(5, 7), torch.randn(3, 7)]
    total = content_sum(weights)
    assert content_sum([torch.cat(weights)]) == total
    assert content_sum(reversed(weights)) == total
    changed = torch.cat(weights)
    changed[2, 3] = torch.nextafter(changed[2, 3], torch.tensor(9.0))
    assert content_sum([changed]) != total
    assert content_sum([weights[0]]) != total
    assert content_sum([*weights, torch.zeros(1)]) != total
    assert content_sum([w.bfloat16() for w in weights]) != total


@pytest.mark.parametrize("works", [True, False])
def test_a_sum_is_compiled_where_that_is_possible(monkeypatch, works):
    """A GPU's device is played by the CPU's."""
    asked = []

    def compiled(function, dynamic):
        def call(bits):
            asked.append(tuple(bits.shape))
            if not works:
                raise RuntimeError("no C compiler")
            return function(bits)

        return call

    weights = [torch.randn(50, 7), torch.randn(128), torch.randn(1), torch.randn(0)]
    total, zeros = content_sum(weights), torch.zeros
    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(torch, "zeros", lambda *shape, device, **options: zeros(*shape, **options))
    mixer = checksum._mixer.__wrapped__("cuda")
    monkeypatch.setattr(checksum, "_mixer", lambda _: mixer)
    assert content_sum(weights) == total
    assert asked[1:] == ([(2, 128)] if works else [])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_card_sums_a_large_tensor_in_no_time():
    torch._dynamo.reset()
    checksum._mixer.cache_clear()
    large = torch.randn(1 << 28, device="cuda")
    total = content_sum([large[:1000], large])
    start = time.perf_counter()
    assert content_sum([large, large[:1000]]) == total
    assert time.perf_counter() - start < 0.1  # 1 GB; read once it takes 0.3 ms
    assert content_sum([large[:100_000].cpu()]) == content_sum([large[:100_000]])


def test_buckets_group_a_stream():
    sizes = {"a": torch.randn(10), "b": torch.randn(300), "c": torch.randn(2, 3).bfloat16(), "d": torch.arange(4)}
    parts = list(grouped(sizes.items(), 100))
    assert [[name for name, _ in bucket] for bucket, _ in parts] == [["a"], ["b"], ["c", "d"]]
    assert [last for _, last in parts] == [False, False, True]
    assert list(grouped([], 100)) == [([], True)]
