"""Every transport: what is sent arrives whole and checked, and every way to fail has a name and a deadline."""

from __future__ import annotations

import threading
import time
import uuid
from pathlib import Path

import pytest
import torch
from lora_sync import (
    CorruptPayloadError,
    LoRAPayload,
    LoRASyncError,
    TransportError,
    TransportTimeoutError,
)
from lora_sync.checksum import content_sum
from lora_sync.message import Message
from lora_sync.transport import BroadcastTransport, Deadline, SharedMemoryTransport, join_group
from lora_sync.weights import base_weights, load_weights, stream_weights


def payload(version: int = 1, rows: int = 7, dtype: torch.dtype = torch.float32) -> LoRAPayload:
    generator = torch.Generator().manual_seed(version)
    tensors = {}
    for name in ("blocks.0.to_q", "blocks.1.to_q"):
        tensors[name + ".lora_A.weight"] = torch.randn(3, rows, generator=generator).to(dtype)
        tensors[name + ".lora_B.weight"] = torch.randn(rows, 3, generator=generator).to(dtype)
    return LoRAPayload.build(tensors, alphas=6.0, version=version, base_fingerprint="base:1")


def same(found, wanted) -> bool:
    return found.metadata() == wanted.metadata() and all(
        torch.equal(found.tensors[k], v) and found.tensors[k].dtype == v.dtype for k, v in wanted.tensors.items()
    )


@pytest.fixture
def ring():
    """A sender and a receiver of one shared-memory ring, in this process."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    with SharedMemoryTransport(name, "sender") as sender, SharedMemoryTransport(name, "receiver") as receiver:
        yield sender, receiver


def across(sender, receiver, message, **options):
    """Send in a thread, receive here; returns the message and the sender's error."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            sender.send(message, timeout=20)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        return receiver.receive(timeout=20, **options), errors
    finally:
        thread.join()


# Shared memory ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [7, 70_000, 400_000])  # below one slot, about one, more than the whole ring
def test_ring_carries_any_size(ring, rows):
    for version in (1, 2):
        wanted = payload(version, rows)
        found, errors = across(*ring, wanted)
        assert same(found, wanted)
        assert not errors


def test_ring_reaches_several_receivers(ring):
    name = f"test-{uuid.uuid4().hex[:8]}"
    wanted, results = payload(3, 100_000), []
    with SharedMemoryTransport(name, "sender", readers=3) as sender:
        receivers = [SharedMemoryTransport(name, "receiver") for _ in range(3)]
        threads = [threading.Thread(target=lambda r=r: results.append(r.receive(timeout=20))) for r in receivers]
        for thread in threads:
            thread.start()
        sender.send(wanted, timeout=20)
        for thread in threads:
            thread.join()
        assert len(results) == 3
        assert all(same(found, wanted) for found in results)
        for receiver in receivers:
            receiver.close()


def test_ring_finds_tensors_that_changed_while_they_were_sent_and_goes_on(ring):
    bad = payload(1)
    next(iter(bad.tensors.values()))[0, 0] += 1
    with pytest.raises(CorruptPayloadError, match="content hash"):
        across(*ring, bad)
    wanted = payload(2)
    found, errors = across(*ring, wanted)
    assert same(found, wanted)
    assert not errors


def test_ring_tells_the_sender_about_a_refusal(ring):
    sender, receiver = ring
    bad = payload(1)
    next(iter(bad.tensors.values()))[0, 0] += 1
    failures = []

    def receive() -> None:
        try:
            receiver.receive(timeout=20)
        except LoRASyncError as error:
            failures.append(error)

    thread = threading.Thread(target=receive)
    thread.start()
    with pytest.raises(TransportError, match=r"receiver \[0\] got bytes"):
        sender.send(bad, timeout=20)
    thread.join()
    assert isinstance(failures[0], CorruptPayloadError)


def test_ring_is_broken_for_both_when_the_receiver_has_no_memory(ring, monkeypatch):
    sender, receiver = ring

    empty = torch.empty

    def full(*size, **options):
        if size and isinstance(size[0], int) and size[0] > 1_000_000:
            raise torch.OutOfMemoryError("no room for 755 MB")
        return empty(*size, **options)

    errors: list[BaseException] = []

    def send() -> None:
        with pytest.raises(TransportError, match="receiver 0 is gone") as caught:
            sender.send(payload(1, 1_000_000), timeout=20)
        errors.append(caught.value)

    thread = threading.Thread(target=send)
    thread.start()
    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(torch.OutOfMemoryError):
        receiver.receive(timeout=20)
    thread.join()
    assert errors
    for act in (lambda: receiver.receive(timeout=20), lambda: sender.send(payload(2), timeout=20)):
        with pytest.raises(TransportError, match="channel broke"):
            act()


def test_staged_bytes_are_what_is_hashed(ring, monkeypatch):
    restore = Message.restore

    def careless(tensors, *args, **options):
        next(iter(tensors.values())).view(torch.uint8)[0, 0] ^= 1
        return restore(tensors, *args, **options)

    monkeypatch.setattr(Message, "restore", careless)
    with pytest.raises(CorruptPayloadError, match="content hash"):
        across(*ring, payload(1))


def test_ring_deadlines(ring):
    sender, receiver = ring
    with pytest.raises(TransportTimeoutError, match=r"within 0\.2 s"):
        receiver.receive(timeout=0.2)
    found, _ = across(sender, receiver, payload(1))  # waiting in vain breaks nothing
    assert found.version == 1
    with pytest.raises(TransportTimeoutError):
        sender.send(payload(2, 10), timeout=0.2)  # nobody takes it: half a message is in the ring
    with pytest.raises(TransportError, match="channel broke"):
        sender.send(payload(3), timeout=0.2)
    with pytest.raises(TransportError, match="the sender is gone"):
        receiver.receive(timeout=0.2)  # the sender gave up, so what lies in the ring does not count


def test_ring_notices_that_the_other_side_is_gone():
    for leaver in ("sender", "receiver"):
        name = f"test-{uuid.uuid4().hex[:8]}"
        sender = SharedMemoryTransport(name, "sender")
        receiver = SharedMemoryTransport(name, "receiver")
        (sender if leaver == "sender" else receiver).close()
        started = time.monotonic()
        with pytest.raises(TransportError, match="is gone"):
            receiver.receive(timeout=20) if leaver == "sender" else sender.send(payload(1), timeout=20)
        assert time.monotonic() - started < 5
        sender.close()
        receiver.close()


def test_a_receiving_process_that_dies_in_the_middle(forked):
    name = f"test-{uuid.uuid4().hex[:8]}"
    with SharedMemoryTransport(name, "sender") as sender:
        process = forked([Path(__file__).with_name("shm_receiver.py"), name])
        try:
            messages = [payload(version, 400_000) for version in (1, 2)]
            for message in messages:
                sender.send(message, timeout=100)
            started = time.monotonic()
            with pytest.raises(TransportError, match="receiver 0 is gone"):
                sender.send(payload(3, 800_000), timeout=60)
            assert time.monotonic() - started < 10
            assert not sender._path.exists()  # nothing is left behind
            out, _ = process.communicate(timeout=30)
        finally:
            process.kill()
    assert out.split() == [str(word) for message in messages for word in (message.version, message.hash)]


def test_ring_refuses_a_second_sender_and_a_receiver_too_many(ring):
    sender, receiver = ring
    name = sender._path.name.removeprefix("lora_sync.")
    with pytest.raises(TransportError, match="exists"):
        SharedMemoryTransport(name, "sender")
    across(sender, receiver, payload(1))
    for other in (name, "no-such-ring"):  # once its receivers are there, the ring has no name any more
        with pytest.raises(TransportTimeoutError):
            SharedMemoryTransport(other, "receiver", timeout=0.1)
    with pytest.raises(TransportError, match="role"):
        SharedMemoryTransport(name, "both")
    with pytest.raises(TransportError, match="this end is the receiver"):
        receiver.send(payload(1))
    with pytest.raises(TransportError, match="this end is the sender"):
        sender.receive()


# Weight streams through a transport ------------------------------------------------------------------------------


def test_a_weight_stream_travels_bucket_by_bucket(ring):
    torch.manual_seed(0)
    source, target = (torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Linear(30, 4)) for _ in range(2))
    buckets = list(stream_weights(base_weights(source), version=1, bucket_bytes=1000))
    assert len(buckets) > 1
    received = (across(*ring, bucket)[0] for bucket in buckets)
    receipt = load_weights(target, received)
    assert receipt.checksum == content_sum(source.parameters())
    assert all(torch.equal(a, b) for a, b in zip(source.parameters(), target.parameters(), strict=True))


# Ray and torch.distributed ---------------------------------------------------------------------------------------


def test_messages_are_arguments_of_ray_tasks():
    import ray

    mine = not ray.is_initialized()  # another package's tests may have left theirs running in this process
    if mine:
        memory = 100 * 1024 * 1024
        ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=memory)
    try:

        @ray.remote(num_cpus=1)
        def elsewhere(message) -> tuple[type, int, str]:
            return type(message), message.version, message.compute_hash()

        bucket = next(stream_weights(base_weights(torch.nn.Linear(3, 4)), version=2))
        for wanted in (payload(1, 1000, torch.bfloat16), bucket):
            assert ray.get(elsewhere.remote(wanted), timeout=100) == (type(wanted), wanted.version, wanted.hash)
            assert same(ray.get(ray.put(wanted)), wanted)
        bad = payload(2)
        next(iter(bad.tensors.values()))[0, 0] += 1
        with pytest.raises(ray.exceptions.RaySystemError, match="CorruptPayloadError.*content hash"):
            ray.get(ray.put(bad))
    finally:
        if mine:
            ray.shutdown()


def test_broadcast_needs_a_process_group():
    with pytest.raises(TransportError, match="init_process_group"):
        BroadcastTransport()
    with pytest.raises(TransportError, match="host:port"):
        join_group("nowhere", 0, 2)
    with pytest.raises(TransportError, match="rank=2 must be from 0 to 1"):
        join_group("127.0.0.1:9", 2, 2)
    with pytest.raises(TransportError, match="rank 1 of 2 .* could not be joined"):
        join_group("127.0.0.1:9", 1, 2, device="cpu", timeout=0.5)


def test_deadline_counts_down():
    deadline = Deadline(0.01, "waiting")
    assert 0 < deadline.left <= 0.01
    time.sleep(0.02)
    assert deadline.left == 0.0
    with pytest.raises(TransportTimeoutError, match="waiting: nothing happened"):
        deadline.check()
