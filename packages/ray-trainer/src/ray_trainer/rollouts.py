"""The driver's side of sampling: what draws, the agent loop and the reward pool, put together once.

prompts → requests → agent loop → sampler → one batch
                         └→ reward pool, the moment a chunk of samples is there

`HybridSampler` samples with the very tensors that are trained, so a sync only proves that. `FleetSampler` keeps replicas of
the policy in processes of their own (vLLM-Omni engines, or diffusers with a copy of the weights); a sync sends every replica
the adapters and believes nothing but its receipt.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from image_rewards.base import Inputs
from image_rewards.loop import Stored
from lora_sync import verify
from omni_rollout.agent_loop import DiffusionAgentLoopWorker, Drawn
from omni_rollout.config import DiffusionPipelineConfig
from omni_rollout.errors import ReplicaError
from omni_rollout.fleet import Fleet, LendTo
from omni_rollout.placement import Node
from omni_rollout.replica import Lend
from omni_rollout.samples import Chunk, column
from omni_rollout.sampling import resolve_settings
from omni_rollout.types import GenerationRequest, Kept
from run_report import estimate
from tensordict import TensorDict

from .card_memory import GB
from .config import RunConfig
from .machines import fetch_everywhere, machines
from .placement import borrows
from .prompts import Prompt
from .scoring import Scoring
from .step_metrics import Clock, Metrics
from .weight_sync import WeightSync
from .workers import ActorRolloutRefWorker as Worker

if TYPE_CHECKING:
    from lora_sync.one_copy import Layout, Loan

    from .group import WorkerGroup

_FAULTS = tuple(
    f"rollout/{name}" for name in ("retried", "errors", "timeouts", "deaths", "restarts", "failed", "queued_s")
)


def negative_prompt(prompt: Prompt, pipeline: DiffusionPipelineConfig) -> str:
    """The prompt's own negative prompt, which may be empty, else the recipe's."""
    return pipeline.negative_prompt if prompt.negative is None else prompt.negative


def requests_of(
    config: RunConfig,
    rows: list[tuple[str, Prompt]],
    n: int,
    *,
    step: int,
    validate: bool,
    inputs: Collection[Inputs] = (),
) -> list[GenerationRequest]:
    """`n` requests for each (uid, prompt), next to each other, as the config says for this training step or for validation.

    Args:
        inputs: what the rewards read; pixels too where none is given, and for validation, whose pictures are kept.
    """
    rollout = config.rollout
    pipeline = rollout.val_kwargs.pipeline if validate else rollout.pipeline
    seed = int((rollout.val_kwargs.seed if validate else rollout.seed) or 0)
    settings = resolve_settings(rollout, training_step=step, validate=validate)
    wanted: set[Inputs] = {*inputs, "pixels"} if validate or not inputs else {*inputs}
    shown = tuple(sorted(wanted))
    return [
        GenerationRequest(
            request_id=f"{uid}/{index}",
            uid=uid,
            index=index,
            prompt=prompt.text,
            seed=seed,
            settings=settings,
            negative_prompt=negative_prompt(prompt, pipeline) if settings.guided else None,
            metadata=prompt.metadata,
            # Validation looks at what is trained, or its average, whatever draws the training samples.
            adapter=config.val_adapter if validate else rollout.rollout_adapter,
            return_trajectory=not validate,
            return_means=not validate and config.rollout_means,
            shown=shown,
        )
        for uid, prompt in rows
        for index in range(n)
    ]


class Rollouts:
    """Samples and scores batches of prompts.

    Args:
        config: of the run.
        sampler: draws.
        workers: where rewards may find places reserved for them, or share GPUs; None where none needs a GPU.
    """

    def __init__(self, config: RunConfig, sampler: Sampler, workers: WorkerGroup | None = None):
        self.config, self.sampler = config, sampler
        shared = any(one.share_trainers_gpus for one in config.reward.each.values())
        places = workers.gang.rewards if workers else {}
        self.scoring = Scoring(config, places, workers.gpu_places() if workers and shared else ())
        self.agent_loop = DiffusionAgentLoopWorker(config.rollout, sampler, self.scoring.score)
        self._faults: dict[str, float] = {}

    async def sample(
        self,
        rows: list[tuple[str, Prompt]],
        n: int,
        *,
        step: int,
        validate: bool,
    ) -> TensorDict:
        """Draw and score `n` samples of each (uid, prompt).

        Returns:
            TensorDict [B = len(rows)·n], the samples of a prompt next to each other: scores, names and numbers, and who keeps
            each row (`group`).
        """
        requests = requests_of(self.config, rows, n, step=step, validate=validate, inputs=self.scoring.inputs)
        return await self.agent_loop.generate_sequences(requests)

    async def draw(self, rows: list[tuple[str, Prompt]], n: int, *, step: int) -> Drawn:
        """`sample` for training, in two parts: this returns when all is drawn, `Drawn.scored` when all is scored too."""
        asked = requests_of(self.config, rows, n, step=step, validate=False, inputs=self.scoring.inputs)
        return await self.agent_loop.draw(asked)

    def score_metrics(self, batch: TensorDict) -> dict[str, float]:
        """`reward/mean`, `reward/std`, `reward/failed` and the mean of every component, over the samples that have a score; and
        `reward/stderr`, the standard error of the mean over prompts, whose samples are not independent; and what the
        pictures look like."""
        scores = batch["rm_scores"][:, 0]
        groups: dict[str, list[float]] = {}
        for uid, score in zip(batch["uid"], scores.tolist(), strict=True):
            if math.isfinite(score):
                groups.setdefault(uid, []).append(score)
        finite = scores[scores.isfinite()]
        metrics = {
            "reward/mean": float(finite.mean()) if len(finite) else math.nan,
            "reward/std": float(finite.std()) if len(finite) > 1 else 0.0,
            "reward/stderr": estimate([sum(group) / len(group) for group in groups.values()]).stderr,
            "reward/failed": float(sum(error is not None for error in batch["reward_errors"])),
        }
        components = list(batch["reward_components"])
        for name in sorted({name for row in components for name in row}):
            values = [row[name] for row in components if name in row]
            metrics[f"reward/{name}_mean"] = sum(values) / len(values) if values else math.nan
        return metrics | self.scoring.looks(batch)

    def fault_metrics(self) -> dict[str, float]:
        """Requests that failed, were repeated or timed out, and replicas that died or came back, since the last call."""
        seen = {name: count for name, count in self.sampler.faults().items() if name in _FAULTS}
        new = {name: count - self._faults.get(name, 0.0) for name, count in seen.items()}
        self._faults = seen
        return new

    async def leave_gpu(self) -> None:
        """Engines and rewards that share the trainers' GPUs leave them for the update."""
        await asyncio.gather(self.sampler.leave_gpu(), self.scoring.leave_gpu())

    def close(self) -> None:
        """End the reward pools."""
        self.scoring.close()


class Sampler(Protocol):
    """Where samples come from."""

    beside: bool
    """Whether it can draw while the workers train; else they take turns."""

    def stream(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Chunk]:
        """Draw all of them; see `omni_rollout.loop_base.Client`."""
        ...

    async def final_latents(self, samples: TensorDict) -> Sequence[Kept]:
        """Of samples that it drew; see `omni_rollout.loop_base.Client`."""
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


async def open_sampler(config: RunConfig, workers: WorkerGroup, say: Callable[[str], None]) -> Sampler:
    """The sampler that the config asks for, started. `say` tells a person what did not go as planned."""
    return HybridSampler(config, workers) if config.shares_weights else await FleetSampler.launch(config, workers, say)


def chunk(facts: Mapping[str, np.ndarray], shown: Any, owners: Sequence[int]) -> TensorDict:
    """What the driver holds of some samples: numbers, and where pictures (or latents) and rows are.

    Args:
        facts: [b] each, with `slot` of rows that are kept.
        shown: reference to {name: [b, …]} of what `GenerationRequest.shown` names.
        owners: rank that keeps each row.
    """
    made = TensorDict({name: torch.from_numpy(value.copy()) for name, value in facts.items()}, batch_size=[len(owners)])
    if "slot" in facts:
        made["owner"] = torch.tensor(owners)
    made["responses"] = column([Stored(shown, row) for row in range(len(owners))])
    return made


class HybridSampler:
    """The training processes sample with their own weights."""

    beside = False

    def __init__(self, config: RunConfig, workers: WorkerGroup):
        self.config, self.workers = config, workers

    async def stream(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Chunk]:
        """Each rank draws its share batch by batch; whole batches come as they are finished."""
        size, dealt = self.config.rollout.max_batch_size, self.workers.deal(len(requests))
        places: dict[asyncio.Future[Any], tuple[int, list[int]]] = {}
        # All are sent at once, in order: the workers draw one after the other. A rank whose share is smaller draws its last
        # sample again, where it would be asked less often than the others, and nobody looks at it.
        for start in range(0, max(map(len, dealt)), size):
            for rank, share in enumerate(dealt):
                batch = share[start : start + size]
                asked = [requests[i] for i in batch] or [
                    (last := requests[(share or [0])[-1]]).replace(request_id=f"{last.request_id}+{rank}")
                ]
                places[asyncio.ensure_future(self.workers.generate(rank, asked))] = rank, batch
        try:
            left = set(places)
            while left:
                done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    rank, batch = places[task]
                    facts, shown = task.result()
                    if batch:
                        yield batch, chunk(facts, shown, [rank] * len(batch))
        finally:
            waiting = [requests[i].request_id for task, (_, batch) in places.items() if not task.done() for i in batch]
            if waiting:
                await self.workers.abort(waiting)
            await asyncio.gather(*places, return_exceptions=True)

    async def final_latents(self, samples: TensorDict) -> Sequence[Kept]:
        """Of rows that the workers keep, from whom whoever draws the edit gets them."""
        return self.workers.final_latents(samples)

    def faults(self) -> Metrics:
        """None is mended here: a worker that fails ends the run."""
        return {}

    async def sync(self, version: int) -> Metrics:
        """Nothing moves; the receipts prove that the sampler's module holds what the trainer extracts."""
        return self.workers.call(Worker.update_weights, version, self.config.sync_mode)[0]

    async def leave_gpu(self) -> None:
        """The weights are the trainer's own."""

    async def close(self) -> None:
        """The workers belong to the trainer."""


def lender(workers: WorkerGroup) -> LendTo:
    """What lends a replica the weights of the training process on its GPU, or, where there are no GPUs, on its machine."""
    held = workers.call(Worker.gpu_places)

    def lend_to(node: Node, gpus: str | None) -> Lend:
        homes = zip(workers.workers, workers.gang.nodes, held, strict=True)
        here = [w for w, home, own in homes if (home == node.node_id if gpus is None else (node.node_id, gpus) in own)]

        async def lend(wanted: Mapping[str, Layout]) -> tuple[dict[str, Loan], dict[str, dict[str, Loan]]]:
            return await here[0].call(Worker.lend, wanted) if here else ({}, {})

        return lend

    return lend_to


_MOST = 0.9
"""Of an engine's base weights: so many it must be able to use of the trainer's, else it had better keep its own and sleep."""


class FleetSampler:
    """Replicas in processes of their own. Use `launch`."""

    def __init__(self, config: RunConfig, workers: WorkerGroup, fleet: Fleet, shares_gpu: bool):
        self.config, self.workers, self.fleet = config, workers, fleet
        self._version, self.beside = -1, not shares_gpu
        self._weights = None if config.sync_mode == "lora" else WeightSync(config, workers, fleet)
        self._shares_gpu, self._sleeps, self._asleep = shares_gpu, False, False
        self._shared_bytes: int | None = None

    @classmethod
    async def launch(cls, config: RunConfig, workers: WorkerGroup, say: Callable[[str], None]) -> FleetSampler:
        """Start the replicas where `placement.place` has put them."""
        import ray

        placed, engine = workers.placement, replace(config.rollout.vllm_omni)
        engine.tensor_model_parallel_size = placed.tensor_parallel
        rollout = replace(config.rollout, num_replicas=placed.engines, vllm_omni=engine)
        if rollout.backend == "vllm_omni" and not ray.cluster_resources().get("GPU"):
            os.environ.setdefault("OMNI_ROLLOUT_CPU", "1")
        beside = workers.gpu_places() if placed.beside else None
        paths = fetch_everywhere(config.model.path, machines())
        borrowing, asked = borrows(config, placed), engine.enable_sleep_mode
        engine.enable_sleep_mode = not borrowing and asked is not False
        fleet, shared = await Fleet.launch(rollout, paths, cpus=0.25, beside=beside), None
        if borrowing:
            try:
                shared, whole = await fleet.borrow_base(lender(workers))
                why = f"only {shared / GB:.2g} of its {whole / GB:.2g} GB of base weights equal the trainer's"
                fits = shared > _MOST * whole
            except ReplicaError as error:
                if asked is False:
                    raise
                why, fits = str(error), False
            if not fits and asked is None:
                say(f"the engine cannot use the trainer's weights, so it starts again and will sleep in updates: {why}")
                shared = None
                await fleet.close()
                engine.enable_sleep_mode = True
                fleet = await Fleet.launch(rollout, paths, cpus=0.25, beside=beside)
        sampler = cls(config, workers, fleet, beside is not None)
        sampler._shared_bytes = shared
        sampler._sleeps = beside is not None and rollout.backend == "vllm_omni" and bool(engine.enable_sleep_mode)
        return sampler

    async def stream(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Chunk]:
        """Whole batches over all replicas, as they are finished. Each row goes from the replica to the rank that trains it."""
        if self._weights is not None:  # an engine holds one policy at a time, and no adapter
            await self._weights.bring(requests[0].adapter, self._version)
            requests = [request.replace(adapter="default") for request in requests]
        rank_of = {place: rank for rank, share in enumerate(self.workers.deal(len(requests))) for place in share}
        every = [rank_of[place] for place in range(len(requests))]
        async for places, (facts, shown, rows) in self.fleet.router.stream(requests, every):
            owners = np.array(every)[places]
            if requests[0].return_trajectory or self.config.goes_on:
                slots = np.zeros(len(places), np.int64)
                for rank, theirs in rows.items():
                    slots[owners == rank] = await self.workers.keep(rank, theirs)
                facts["slot"] = slots
            yield places, chunk(facts, shown, owners.tolist())

    async def final_latents(self, samples: TensorDict) -> Sequence[Kept]:
        """Of rows that the workers keep, from whom whoever draws the edit gets them."""
        return self.workers.final_latents(samples)

    def faults(self) -> Metrics:
        """See `Router.metrics`."""
        return self.fleet.router.metrics()

    async def sync(self, version: int) -> Metrics:
        """Send the weights, or every adapter that samples, to every replica, and check their receipts."""
        clock = Clock()
        if self._shares_gpu:
            self.workers.call(Worker.release_memory)
            clock.lap("time/sync_release")
        if self._asleep:
            await self.fleet.wake_up()
            self._asleep = False
            clock.lap("time/sync_wake")
        metrics: Metrics = {} if self._shared_bytes is None else {"sync/shared_gb": self._shared_bytes / 1e9}
        if self._weights is not None:
            metrics |= await self._weights.bring(self.config.rollout.rollout_adapter, version)
        for adapter in self.config.sampling_adapters if self._weights is None else ():
            lent = self._shared_bytes is not None
            promise, reference = await self.workers.lora_payload(adapter, version, lent)
            clock.lap("time/sync_gather")
            for receipt in await self.fleet.update_lora(promise, adapter, reference=reference):
                verify(promise, receipt, previous_version=self._version if self._version >= 0 else None)
                metrics |= {"sync/version": float(version), "sync/tensors_bound": float(receipt.tensors_bound)}
            clock.lap("time/sync_bind")
        self._version = version
        return metrics | clock.laps

    async def leave_gpu(self) -> None:
        """Engines that live on the trainers' GPUs sleep during the update, or give back what is not weights."""
        if self._sleeps and not self._asleep:
            await self.fleet.sleep()
            self._asleep = True
        elif self._shares_gpu and not self._sleeps:
            await self.fleet.release_memory()

    async def close(self) -> None:
        """End the replicas."""
        await self.fleet.close()
