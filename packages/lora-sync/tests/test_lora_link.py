"""All weights through a `Link` to another process: shared memory, a broadcast over gloo, over NCCL where there are two cards."""

from __future__ import annotations

import json
import os
import socket
import uuid
from pathlib import Path

import pytest
import torch
from lora_sync import WeightReceipt, WeightStream, base_weights, verify_weights
from lora_sync.transport import Link

two_cards = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL joins one card with another")


@pytest.mark.parametrize(
    ("kind", "devices"),
    [
        ("shared_memory", ("cpu", "cpu")),
        ("nccl", ("cpu", "cpu")),
        pytest.param("nccl", ("cuda:0", "cuda:1"), marks=two_cards),
    ],
)
def test_another_process_holds_what_was_sent_and_proves_it(forked, kind, devices):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{free.getsockname()[1]}" if kind == "nccl" else uuid.uuid4().hex
    ours, theirs = os.pipe()
    with open(theirs) as theirs:
        process = forked([Path(__file__).with_name("link_receiver.py"), kind, place, devices[1]], stdout=theirs)
    module = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Linear(30, 4)).to(devices[0])
    try:
        with open(ours) as said, Link(kind, place, 1).sender(devices[0]) as transport:
            for version in (1, 2):
                with torch.no_grad():
                    module[0].weight.mul_(1.5)
                stream = WeightStream(base_weights(module), version=version, bucket_bytes=1000)
                buckets = list(stream)
                assert len(buckets) > 1
                for bucket in buckets:
                    transport.send(bucket, timeout=60)
                receipt = WeightReceipt(**json.loads(said.readline()))
                assert verify_weights(stream.receipt, receipt).tensors_bound == 4
        assert process.wait(60) == 0
    finally:
        process.kill()
