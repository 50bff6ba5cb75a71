"""An engine beside the trainer: it uses the trainer's weights where it can, and else sleeps during updates."""

import asyncio
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
import ray_trainer.rollouts as module
from lora_sync import LoRAReceipt, Promise
from omni_rollout.errors import ReplicaError
from ray_trainer.compose import compose
from ray_trainer.placement import Placement
from ray_trainer.rollouts import FleetSampler

RECIPE = Path(str(files("flowgrpo"))) / "recipes" / "tiny_flow_grpo.yaml"
PLACED = Placement("replicate", -1, engines=1, tensor_parallel=1, beside=True)


class Workers:
    """A trainer of one process."""

    placement = PLACED

    def __init__(self, events):
        self.events, self.gang = events, SimpleNamespace(nodes=["node"])

    def call(self, method, *_):
        self.events.append(method.__name__)
        return [[("node", "0")]]

    def gpu_places(self):
        return [("node", "0")]

    async def lora_payload(self, adapter, version, lent):
        self.events.append("lent" if lent else "payload")
        return Promise(version, "", 1, 2, 3), "reference"


class Engines:
    """The fleet."""

    def __init__(self, events, sleeps, answer):
        self.events, self.answer = events, answer
        events.append(f"start, sleep mode {sleeps}")

    async def borrow_base(self, lend):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer, 5_000_000_000

    async def update_lora(self, promise, adapter, reference):
        return [LoRAReceipt(promise.version, None, 1, 2, 0, 3)]

    def __getattr__(self, name):
        async def note():
            self.events.append(name)

        return note


@pytest.fixture
def launched(monkeypatch):
    """Starts a sampler over an engine that answers so when it is to borrow; returns what happened and what was said."""

    def launch(answer, *keys):
        events, said = [], []

        async def start(rollout, *_, **__):
            return Engines(events, rollout.vllm_omni.enable_sleep_mode, answer)

        monkeypatch.setattr(module.Fleet, "launch", start)
        monkeypatch.setattr(module, "fetch_everywhere", lambda path, nodes: path)
        monkeypatch.setattr(module, "machines", list)
        monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": 1})
        arguments = ["rollout.backend=vllm_omni", "rollout.dtype=float32", *keys]
        config = compose("flowgrpo", RECIPE, arguments)

        async def step():
            sampler = await FleetSampler.launch(config, Workers(events), said.append)
            await sampler.sync(1)
            await sampler.leave_gpu()
            return await sampler.sync(2)

        return events, said, lambda: asyncio.run(step())

    return launch


def test_an_engine_that_can_stays_awake_on_the_trainers_weights(launched):
    events, said, run = launched(5_000_000_000)
    metrics = run()
    assert events[0] == "start, sleep mode False"
    assert "sleep" not in events
    assert events[2:] == ["release_memory", "lent", "release_memory", "release_memory", "lent"]
    assert metrics["sync/shared_gb"] == 5.0
    assert {"time/sync_release", "time/sync_gather", "time/sync_bind"} <= set(metrics)
    assert not said


@pytest.mark.parametrize(
    ("answer", "why"),
    [(ReplicaError("invalid device context"), "invalid device context"), (11_000_000, "only 0.011 of its 5 GB")],
)
def test_an_engine_that_cannot_starts_again_and_sleeps(launched, answer, why):
    events, said, run = launched(answer)
    metrics = run()
    starts = [event for event in events if event.startswith("start")]
    assert starts == ["start, sleep mode False", "start, sleep mode True"]
    assert events.index("close") < events.index(starts[1])
    assert events[-5:] == ["payload", "sleep", "release_memory", "wake_up", "payload"]
    assert "sync/shared_gb" not in metrics
    assert why in said[0]


def test_what_a_person_asks_for_is_not_replaced(launched):
    _, _, run = launched(ReplicaError("invalid device context"), "rollout.vllm_omni.enable_sleep_mode=false")
    with pytest.raises(ReplicaError, match="invalid device context"):
        run()
    events, _, run = launched(1, "rollout.vllm_omni.enable_sleep_mode=true")
    run()
    assert events[0] == "start, sleep mode True"
    assert "sleep" in events
