"""All weights to replicas, without processes: every message in order, receipts compared, and a replica that dies on the way."""

import asyncio
import types

import pytest
import torch
from lora_sync import CorruptPayloadError, WeightLoader, WeightStream
from omni_rollout.errors import ReplicaDeadError
from ray_trainer.config import RunConfig
from ray_trainer.errors import TrainerError
from ray_trainer.weight_sync import WeightSync
from torch import nn


class Sender:
    """The first trainer, of whom the driver asks one message after the other."""

    def __init__(self):
        self.module, self.asked = nn.Linear(64, 64), 0

    async def call(self, method, *args):
        return getattr(self, method.__name__)(*args)

    async def parts(self, method, returns):
        return getattr(self, method.__name__)()

    def open_weights(self, state, version):
        assert state == "default"
        self.stream = WeightStream(self.module.named_parameters(), version=version, bucket_bytes=1000)
        self._buckets = iter(self.stream)

    def next_bucket(self):
        self.asked += 1
        bucket = next(self._buckets)
        return bucket.last, bucket

    def sent_weights(self):
        return self.stream.receipt


class Receiver:
    """A replica; one with a limit dies after that many messages."""

    def __init__(self, limit=100):
        self.module, self.left, self.wrong = nn.Linear(64, 64), limit, 0.0

    async def update_weights_bucket(self, bucket):
        if not self.left:
            raise ReplicaDeadError("gone")
        self.left -= 1
        if bucket.index == 0:
            self.loader = WeightLoader(self.module)
        if bucket.last and self.wrong:
            with torch.no_grad():
                self.module.weight.add_(self.wrong)
        return self.loader.take(bucket)


class Fleet:
    def __init__(self, replicas):
        self.replicas, self.nodes = replicas, {"here"}

    async def update_weights(self, send):
        self.send = send
        await send(self.replicas)


def sync_of(*replicas, way="ray", nodes=("here",)):
    sender, config = Sender(), RunConfig()
    config.rollout.sync = way
    places = types.SimpleNamespace(sharding="replicate")
    workers = types.SimpleNamespace(workers=[sender], placement=places, gang=types.SimpleNamespace(nodes=list(nodes)))
    fleet = Fleet(list(replicas))
    return WeightSync(config, workers, fleet), sender, fleet


def test_living_replicas_get_all_of_it_and_one_that_dies_does_not_end_the_run():
    whole, dead = Receiver(), Receiver(limit=1)
    sync, sender, _ = sync_of(whole, dead)
    metrics = asyncio.run(sync.bring("default", 3))
    assert metrics == {"sync/version": 3.0, "sync/tensors_bound": 2.0}
    assert torch.equal(whole.module.weight, sender.module.weight)
    assert not torch.equal(dead.module.bias, sender.module.bias)
    asked = sender.asked
    assert asyncio.run(sync.bring("default", 3)) == {}  # held already
    assert sender.asked == asked


def test_another_checksum_ends_the_run():
    wrong = Receiver()
    wrong.wrong = 1.0
    sync, _, _ = sync_of(wrong)
    with pytest.raises(CorruptPayloadError, match="were sent, the receiver holds"):
        asyncio.run(sync.bring("default", 1))


def test_a_replica_that_comes_late_gets_what_the_others_got_or_nothing():
    sync, sender, fleet = sync_of(Receiver())
    late, later = Receiver(), Receiver()

    async def run():
        await sync.bring("default", 1)
        await fleet.send([late])
        with torch.no_grad():
            sender.module.weight.add_(1)  # an update has begun
        with pytest.raises(CorruptPayloadError):
            await fleet.send([later])

    asyncio.run(run())
    assert not torch.equal(late.module.weight, sender.module.weight)


def test_the_way_follows_the_machines_and_one_that_does_not_reach_is_refused():
    assert sync_of(Receiver(), way="auto")[0].way == "shared_memory"
    assert sync_of(Receiver(), way="auto", nodes=("there",))[0].way == "ray"
    with pytest.raises(TrainerError, match="shared_memory reaches processes of one machine"):
        sync_of(Receiver(), way="shared_memory", nodes=("there",))
