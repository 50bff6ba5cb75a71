"""Bytes on disk and wire: the format is safetensors, every fault has its name, the hash covers what matters."""

from __future__ import annotations

import copy
import pickle
import random

import lora_sync
import pytest
import torch
from lora_sync import (
    CorruptPayloadError,
    LoRAPayload,
    LoRASyncError,
    PayloadError,
    TruncatedPayloadError,
    extract_lora,
)
from lora_sync.codec import read_file
from lora_sync.layers import neutral_name
from safetensors.torch import load_file, save_file


def small(version: int = 1, seed: int = 0, dtype: torch.dtype = torch.float32) -> LoRAPayload:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name in ("blocks.0.to_q", "blocks.1.to_q", "blocks.1.ff"):
        tensors[name + ".lora_A.weight"] = torch.randn(3, 5, generator=generator).to(dtype)
        tensors[name + ".lora_B.weight"] = torch.randn(7, 3, generator=generator).to(dtype)
    return LoRAPayload.build(tensors, alphas=6.0, version=version, base_fingerprint="base:00")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_file_keeps_everything(dtype, tmp_path):
    payload = small(4, dtype=dtype)
    again = LoRAPayload.load(payload.save(tmp_path / "a.safetensors"))
    assert again.metadata() == payload.metadata()
    assert all(torch.equal(again.tensors[k], v) and again.tensors[k].dtype == dtype for k, v in payload.tensors.items())


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_pickling_keeps_everything(protocol):
    payload = small(4, dtype=torch.bfloat16)
    again = pickle.loads(pickle.dumps(payload, protocol=protocol))
    assert again.metadata() == payload.metadata()
    assert all(torch.equal(again.tensors[k], v) for k, v in payload.tensors.items())
    assert copy.deepcopy(payload).check().hash == payload.hash


def test_pickled_bytes_travel_beside_the_pickle_without_a_copy():
    payload = small()
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(payload, protocol=5, buffer_callback=buffers.append)
    assert len(buffers) == len(payload.tensors)
    assert sum(buffer.raw().nbytes for buffer in buffers) == payload.nbytes
    arrived = pickle.loads(data, buffers=buffers)
    assert {t.data_ptr() for t in arrived.tensors.values()} == {t.data_ptr() for t in payload.tensors.values()}
    frozen = [bytes(buffer.raw()) for buffer in buffers]  # a store that nobody may write into, like Ray's
    assert pickle.loads(data, buffers=frozen).hash == payload.hash
    frozen[0] = frozen[0][:-1] + bytes([frozen[0][-1] ^ 1])
    with pytest.raises(CorruptPayloadError, match="content hash"):
        pickle.loads(data, buffers=frozen)


def test_extraction_to_the_host_is_the_same_snapshot(tools):
    module = tools.adapted()
    here, there = extract_lora(module, version=1), extract_lora(module, version=1, device="cpu")
    assert there.hash == here.hash
    live = {p.data_ptr() for p in module.parameters()}
    assert not live & {t.data_ptr() for t in there.tensors.values()}
    assert live & {t.data_ptr() for t in extract_lora(module, version=1, device="cpu", copy=False).tensors.values()}
    with pytest.raises(PayloadError, match="'cuda'"):
        extract_lora(module, version=1, device="cuda")


def test_format_is_safetensors_in_both_directions(tmp_path):
    payload = small()
    read = load_file(payload.save(tmp_path / "a.safetensors"))
    assert set(read) == set(payload.tensors)
    assert all(torch.equal(read[k], v) for k, v in payload.tensors.items())
    mixed = {
        **{"a": torch.arange(3, dtype=torch.uint8), "b": torch.randn(2, 2).to(torch.bfloat16), "c": torch.empty(0, 4)},
        **{"d": torch.tensor(2.5), "e": torch.randn(3).half(), "f": torch.tensor([True, False]), "g": torch.arange(5)},
    }
    save_file(mixed, tmp_path / "b.safetensors")
    ours, _ = read_file(tmp_path / "b.safetensors")
    assert all(torch.equal(ours[k], v) and ours[k].dtype == v.dtype for k, v in mixed.items())


def test_every_truncation_is_named(tmp_path):
    file = small().save(tmp_path / "a.safetensors")
    data = file.read_bytes()
    for size in [0, 1, 7, 8, 9, 200, len(data) // 2, len(data) - 1]:
        file.write_bytes(data[:size])
        with pytest.raises(TruncatedPayloadError, match=file.name):
            LoRAPayload.load(file)
    file.write_bytes(data + b"\0")
    with pytest.raises(CorruptPayloadError, match="bytes of data found"):
        LoRAPayload.load(file)


def test_every_flipped_bit_is_found(tmp_path):
    file, rng = small().save(tmp_path / "a.safetensors"), random.Random(0)
    data = file.read_bytes()
    places = {rng.randrange(8 * len(data)) for _ in range(1000)}
    for place in places:
        broken = bytearray(data)
        broken[place // 8] ^= 1 << place % 8
        file.write_bytes(broken)
        with pytest.raises((CorruptPayloadError, TruncatedPayloadError)):
            LoRAPayload.load(file)


def test_hash_covers_content_and_not_the_version():
    base = small()
    assert small(version=9).hash == base.hash
    assert small(seed=1).hash != base.hash
    assert LoRAPayload.build(base.tensors, alphas=7.0, version=1).hash != base.hash
    assert small(dtype=torch.bfloat16).hash != base.hash
    renamed = {k.replace("to_q", "to_k"): v for k, v in base.tensors.items()}
    assert LoRAPayload.build(renamed, alphas=6.0, version=1).hash != base.hash
    reordered = dict(reversed(base.tensors.items()))
    assert LoRAPayload.build(reordered, alphas=6.0, version=1).hash == base.hash


def test_hash_is_the_same_in_parallel_and_in_pieces(monkeypatch):
    one = small().hash
    monkeypatch.setattr("lora_sync.checksum._PARALLEL_BYTES", 1)
    monkeypatch.setattr("lora_sync.host._PIECE", 7)
    assert small().compute_hash() == one


def test_a_changed_tensor_is_found_by_check():
    payload = small()
    payload.tensors["blocks.1.ff.lora_B.weight"][0, 0] += 1
    with pytest.raises(CorruptPayloadError, match="copy=True"):
        payload.check()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.clear(), "no tensors"),
        (lambda t: t.pop("blocks.0.to_q.lora_B.weight"), "no A/B pair"),
        (lambda t: t.update({"blocks.0.to_q.lora_A.weight": torch.ones(2, 5)}), "do not share a rank"),
        (lambda t: t.update({"blocks.0.to_q.lora_A.weight": torch.ones(15)}), "never gathered"),
        (lambda t: t.update({"blocks.0.norm.weight": torch.ones(2, 5)}), "no A/B pair"),
    ],
)
def test_what_is_no_lora_cannot_become_a_payload(change, message):
    tensors = dict(small().tensors)
    change(tensors)
    with pytest.raises(PayloadError, match=message):
        LoRAPayload.build(tensors, alphas=6.0, version=1)


@pytest.mark.parametrize("version", [-1, 1.5, "2", True])
def test_versions_are_counting_numbers(version):
    with pytest.raises(PayloadError, match="version"):
        LoRAPayload.build(small().tensors, alphas=1.0, version=version)


def test_saving_over_an_old_file_is_atomic(tmp_path, monkeypatch):
    path = small(1).save(tmp_path / "a.safetensors")

    def broken(tensors, file, metadata):
        file.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("lora_sync.codec.save_file", broken)
    with pytest.raises(OSError, match="disk full"):
        small(2).save(path)
    assert LoRAPayload.load(path).version == 1
    assert [file.name for file in tmp_path.iterdir()] == ["a.safetensors"]


def test_errors_survive_pickling_and_keep_their_family():
    errors = [getattr(lora_sync, name) for name in lora_sync.__all__ if name.endswith("Error")]
    assert len(errors) >= 12
    for kind in errors:
        again = pickle.loads(pickle.dumps(kind("what happened")))
        assert type(again) is kind
        assert str(again) == "what happened"
        assert isinstance(again, LoRASyncError)
    assert issubclass(lora_sync.AdapterError, KeyError)
    assert issubclass(lora_sync.TransportTimeoutError, TimeoutError)


def test_extraction_reads_what_peft_holds(tools):
    module = tools.adapted()
    payload = extract_lora(module, version=1)
    assert (payload.rank, payload.alpha, payload.scale_of(payload.modules[0])) == (4, 8.0, 2.0)
    assert payload.target_modules == tuple(sorted(tools.qwen_targets))
    state = dict(module.named_parameters())
    for key, tensor in payload.tensors.items():
        name, matrix = key.removesuffix(".weight").rsplit(".", 1)
        assert torch.equal(state[f"{name}.{matrix}.default.weight"], tensor)


def test_extraction_copies_unless_told_otherwise(tools):
    module = tools.adapted()
    copied, shared = extract_lora(module, version=1), extract_lora(module, version=1, copy=False)
    tools.randomise(module, seed=99)
    copied.check()
    with pytest.raises(CorruptPayloadError):
        shared.check()


def test_names_do_not_depend_on_wrappers(tools):
    from peft import LoraConfig, get_peft_model

    plain = extract_lora(tools.adapted(targets=("to_q",)), version=1)
    wrapped = get_peft_model(tools.base(), LoraConfig(r=4, lora_alpha=8, target_modules=["to_q"]))
    tools.randomise(wrapped)
    assert extract_lora(wrapped, version=1).hash == plain.hash
    for name in (
        "_orig_mod.base_model.model.blocks.0.to_q",
        "blocks.0._checkpoint_wrapped_module.to_q",
        "blocks.0.to_q",
    ):
        assert neutral_name(name) == "blocks.0.to_q"


def test_variants_that_a_and_b_do_not_describe_are_refused(tools):
    with pytest.raises(PayloadError, match="Dora"):
        extract_lora(tools.adapted(targets=("to_q",), use_dora=True), version=1)
    with pytest.raises(PayloadError, match="lora_bias"):
        extract_lora(tools.adapted(targets=("to_q",), lora_bias=True, init_lora_weights=True), version=1)


def test_fingerprint_knows_the_base_and_nothing_else(tools):
    base = tools.base()
    plain = lora_sync.fingerprint(base)
    assert lora_sync.fingerprint(tools.adapted()) == plain
    assert lora_sync.fingerprint(base.to(torch.bfloat16)) == plain
    assert lora_sync.fingerprint(tools.base("sd3")) != plain
    other = tools.base()
    other.proj_out.weight.data.mul_(1.05)
    assert lora_sync.fingerprint(other) != plain
