"""A fleet without processes: what a replica that comes late is sent, whatever happens while it starts."""

import asyncio
import types

import pytest
import torch
from omni_rollout import fleet as fleet_module
from omni_rollout.config import DiffusionRolloutConfig, RouterConfig
from omni_rollout.errors import ReplicaDeadError
from omni_rollout.fleet import Fleet
from omni_rollout.placement import Node
from omni_rollout.replica import Replica
from omni_rollout.samples import stacked


def payload(version, name):
    return types.SimpleNamespace(version=version, name=name)


class Diary(Replica):
    """A replica that keeps a diary."""

    def __init__(self, number, gate=None):
        self.number, self.diary, self.dead, self.gate = number, [], False, gate
        self.name, self.batch_size, self.remote = f"diary-{number}", 64, None

    def _alive(self):
        if self.dead:
            raise ReplicaDeadError("gone")

    async def generate(self, requests):
        self._alive()
        return stacked([{"policy_version": torch.tensor(self.number)} for _ in requests])

    async def update_lora(self, payload, adapter="default"):
        self._alive()
        if self.gate:
            await self.gate.wait()
        self.diary.append((adapter, payload.version))

    async def update_weights_bucket(self, bucket):
        self._alive()
        self.diary.append(("base", bucket))

    async def sleep(self):
        self._alive()
        self.diary.append("sleep")

    async def wake_up(self):
        self.diary.append("wake_up")

    async def close(self):
        pass


@pytest.fixture
def launch(monkeypatch):
    """Fleets of diary keepers; `made` lists them in the order of their birth."""
    made, gates = [], {}

    class DiaryFleet(Fleet):
        async def _start(self, place):
            replica = Diary(len(made), gates.get(len(made)))
            made.append(replica)
            await asyncio.sleep(0)
            return replica

        @staticmethod
        async def _bind(replica, sent, adapter):
            return await replica.update_lora(sent[1], adapter)

    puts = []
    store = types.SimpleNamespace(put=lambda value: puts.append(value) or value)
    monkeypatch.setattr(fleet_module, "import_ray", lambda: store)
    monkeypatch.setattr(fleet_module, "cluster_nodes", lambda: [Node("n", "n", 0, 8)])

    async def launch(replicas=2, gate=None, **options):
        gates[replicas] = gate  # of the first one that replaces another
        config = DiffusionRolloutConfig(num_replicas=replicas, router=RouterConfig(request_timeout_s=5))
        fleet = await DiaryFleet.launch(config, None, **options)
        fleet.puts = puts
        return fleet, made

    return launch


def test_an_adapter_is_put_into_the_store_once_or_not_at_all(launch):
    async def run():
        fleet, made = await launch(replicas=3)
        await fleet.update_lora(payload(1, "default"))
        await fleet.update_lora(payload(2, "default"), reference=payload(2, "in the store"))
        return len(fleet.puts), [target.diary for target in made]

    assert asyncio.run(run()) == (1, [[("default", 1), ("default", 2)]] * 3)


async def until(condition):
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0)


def test_a_new_replica_is_sent_every_adapter_oldest_version_first(launch, make_request, collect):
    async def run():
        fleet, made = await launch()
        await fleet.update_lora(payload(1, "old"), "old")
        await fleet.update_lora(payload(4, "default"))
        await fleet.update_lora(payload(3, "old"), "old")
        made[0].dead = True
        output = await collect(fleet.router, [make_request()])
        await until(lambda: len(made) == 3 and not fleet.router._restarts)
        return output, made[2].diary, fleet.router.metrics()

    output, diary, metrics = asyncio.run(run())
    assert output["policy_version"].tolist() in ([1], [2])  # the other one, or the new one
    assert diary == [("old", 3), ("default", 4)]
    assert (metrics["rollout/deaths"], metrics["rollout/restarts"], metrics["rollout/replicas_alive"]) == (1, 1, 2)


def test_what_is_sent_while_a_replica_starts_reaches_it_too(launch, make_request, collect):
    async def run():
        held = asyncio.Event()
        fleet, made = await launch(gate=held)
        await fleet.update_lora(payload(1, "default"))
        made[0].dead = True
        await collect(fleet.router, [make_request()])
        await until(lambda: len(made) == 3)
        # The first adapter is on its way to the new one.
        await fleet.update_lora(payload(2, "default"))
        await fleet.sleep()
        held.set()
        await until(lambda: not fleet.router._restarts)
        await fleet.wake_up()
        return [target.diary for target in made[1:]]

    living, late = asyncio.run(run())
    assert living == [("default", 1), ("default", 2), "sleep", "wake_up"]
    assert late[-3:] == [("default", 2), "sleep", "wake_up"]


@pytest.mark.parametrize("moment", ["sync", "sleep"])
def test_a_death_between_two_rollouts_is_noticed_and_mended(launch, make_request, collect, moment):
    """Nobody was generating when it died: the sync, or the sleep before an update, finds it dead."""

    async def run():
        fleet, made = await launch()
        await fleet.update_lora(payload(1, "default"))
        made[0].dead = True
        answers = await (fleet.update_lora(payload(2, "default")) if moment == "sync" else fleet.sleep())
        await until(lambda: len(made) == 3 and not fleet.router._restarts)
        if moment == "sleep":
            await fleet.wake_up()
        outputs = await collect(fleet.router, [make_request(i) for i in range(8)])
        return answers, made[2].diary, len(outputs), fleet.router.metrics()["rollout/deaths"]

    answers, diary, drawn, deaths = asyncio.run(run())
    assert (drawn, deaths) == (8, 1)
    if moment == "sync":
        assert len(answers) == 1  # the one that lives
        assert diary == [("default", 2)]
    else:
        assert diary == [("default", 1), "sleep", "wake_up"]


def test_a_new_replica_gets_the_newest_full_weights(launch, make_request, collect):
    async def run():
        fleet, made = await launch(1)
        for version in (6, 7):

            async def send(replicas, version=version):
                for replica in replicas:
                    await replica.update_weights_bucket(version)

            await fleet.update_weights(send)
        made[-1].dead = True
        await collect(fleet.router, [make_request()])
        return [replica.diary for replica in made]

    assert asyncio.run(run()) == [[("base", 6), ("base", 7)], [("base", 7)]]
