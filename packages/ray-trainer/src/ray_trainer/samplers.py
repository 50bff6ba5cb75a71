"""What draws samples, as the loop sees it: the trainer's own weights, or engines beside it.

`HybridSampler` samples with the very tensors that are trained, so a sync only proves that. `FleetSampler` keeps replicas of
the policy in processes of their own (vLLM-Omni engines, or diffusers with a copy of the weights); a sync sends every replica
the adapters and believes nothing but its receipt.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from lora_sync import verify
from omni_rollout.fleet import Fleet
from omni_rollout.samples import Chunk
from omni_rollout.types import GenerationRequest

from ray_trainer.config import RunConfig
from ray_trainer.machines import fetch_everywhere, machines
from ray_trainer.step_metrics import Metrics
from ray_trainer.workers import ActorRolloutRefWorker as Worker

if TYPE_CHECKING:
    from ray_trainer.group import WorkerGroup


class Sampler(Protocol):
    """Where samples come from."""

    def stream(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Chunk]:
        """Draw all of them; see `omni_rollout.loop_base.Client`."""
        ...

    def faults(self) -> Metrics:
        """Counters since the start of what went wrong and was mended."""
        ...

    async def sync(self, version: int) -> Metrics:
        """Bring every sampler to the trainer's weights and prove it. Raises `LoRASyncError` when the proof fails."""

    async def leave_gpu(self) -> None:
        """Give memory that the trainer needs for its update; `sync` takes it again."""

    async def close(self) -> None:
        """End what was started."""


async def open_sampler(config: RunConfig, workers: WorkerGroup) -> Sampler:
    """The sampler that the config asks for, started."""
    return HybridSampler(config, workers) if config.shares_weights else await FleetSampler.launch(config, workers)


class HybridSampler:
    """The training processes sample with their own weights."""

    def __init__(self, config: RunConfig, workers: WorkerGroup):
        self.config, self.workers = config, workers

    async def stream(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Chunk]:
        """Whole batches, in the order of the requests; the next one is drawn while this one is scored."""
        size = self.config.rollout.max_batch_size * self.workers.size
        batches = [list(range(i, min(i + size, len(requests)))) for i in range(0, len(requests), size)]
        # All are sent at once, in order: the workers draw one after the other.
        tasks = [asyncio.ensure_future(self.workers.generate([requests[i] for i in batch])) for batch in batches]
        try:
            for batch, task in zip(batches, tasks, strict=True):
                yield batch, await task
        finally:
            left = [
                requests[i].request_id
                for batch, task in zip(batches, tasks, strict=True)
                if not task.done()
                for i in batch
            ]
            if left:
                await self.workers.abort(left)
            await asyncio.gather(*tasks, return_exceptions=True)

    def faults(self) -> Metrics:
        """None is mended here: a worker that fails ends the run."""
        return {}

    async def sync(self, version: int) -> Metrics:
        """Nothing moves; the receipts prove that the sampler's module holds what the trainer extracts."""
        return self.workers.call(Worker.update_weights, version)[0]

    async def leave_gpu(self) -> None:
        """The weights are the trainer's own."""

    async def close(self) -> None:
        """The workers belong to the trainer."""


class FleetSampler:
    """Replicas in processes of their own. Use `launch`."""

    def __init__(self, config: RunConfig, workers: WorkerGroup, fleet: Fleet, shares_gpu: bool):
        self.config, self.workers, self.fleet = config, workers, fleet
        self._version = -1
        self._sleeps = (
            shares_gpu and config.rollout.backend == "vllm_omni" and config.rollout.vllm_omni.enable_sleep_mode
        )
        self._asleep = False

    @classmethod
    async def launch(cls, config: RunConfig, workers: WorkerGroup) -> FleetSampler:
        """Start the replicas where `card_memory.place` has put them."""
        import ray

        placed, engine = workers.placement, replace(config.rollout.vllm_omni)
        engine.tensor_model_parallel_size = placed.tensor_parallel
        rollout = replace(config.rollout, num_replicas=placed.engines, vllm_omni=engine)
        if rollout.backend == "vllm_omni" and not ray.cluster_resources().get("GPU"):
            os.environ.setdefault("OMNI_ROLLOUT_CPU", "1")
        beside = workers.gpu_places() if placed.beside else None
        paths = fetch_everywhere(config.model.path, machines())
        fleet = await Fleet.launch(rollout, paths, cpus=0.25, beside=beside)
        return cls(config, workers, fleet, beside is not None)

    def stream(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Chunk]:
        """Whole batches over all replicas, as they are finished."""
        return self.fleet.router.stream(requests)

    def faults(self) -> Metrics:
        """See `Router.metrics`."""
        return self.fleet.router.metrics()

    async def sync(self, version: int) -> Metrics:
        """Send every adapter that samples to every replica, and check their receipts."""
        if self._asleep:
            self.workers.call(Worker.release_memory)
            await self.fleet.wake_up()
            self._asleep = False
        metrics: Metrics = {}
        for adapter in self.config.sampling_adapters:
            payload, reference = self.workers.lora_payload(adapter, version)
            for receipt in await self.fleet.update_lora(payload, adapter, reference=reference):
                verify(payload, receipt, previous_version=self._version if self._version >= 0 else None)
                metrics = {"sync/version": float(version), "sync/tensors_bound": float(receipt.tensors_bound)}
        self._version = version
        return metrics

    async def leave_gpu(self) -> None:
        """Engines that live on the trainers' GPUs sleep during the update."""
        if self._sleeps and not self._asleep:
            await self.fleet.sleep()
            self._asleep = True

    async def close(self) -> None:
        """End the replicas."""
        await self.fleet.close()
