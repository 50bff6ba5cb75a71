"""All training processes of a run, as one: calls that reach every one of them, and batches that are split over them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import torch
from diffusion_losses import numbers, pool_statistics
from omni_rollout.remote import ASIDE, Remote
from omni_rollout.samples import in_order
from omni_rollout.types import GenerationRequest
from tensordict import TensorDict

from ray_trainer.card_memory import place, text_bound
from ray_trainer.config import RunConfig, updates_per_step
from ray_trainer.machines import reserve
from ray_trainer.workers import ActorRolloutRefWorker as Worker

if TYPE_CHECKING:
    from lora_sync import LoRAPayload

P = ParamSpec("P")
R = TypeVar("R")
CPUS = 0.5
"""That Ray sets aside for a training process."""


class WorkerGroup:
    """All training processes of a run, as one.

    Args:
        config: of the run.
    """

    def __init__(self, config: RunConfig):
        import ray

        self._ray, self.config, self.size = ray, config, config.trainer.num_workers
        self.gang, use_gpu = reserve(config, CPUS)
        remote: Any = ray.remote  # its types know no concurrency groups
        # The update fills the card's memory with activations, whose sizes change: fixed segments would leave gaps of a tenth.
        memory = {"PYTORCH_CUDA_ALLOC_CONF": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")}
        actor = remote(
            num_gpus=int(use_gpu),
            num_cpus=CPUS,
            concurrency_groups={ASIDE: 1},
            runtime_env={"env_vars": memory} if use_gpu else None,
        )(Worker)
        self.workers = [
            Remote(
                actor.options(scheduling_strategy=self.gang.strategy(rank)).remote(
                    config, rank=rank, world_size=self.size
                ),
                f"worker-{rank}",
            )
            for rank in range(self.size)
        ]
        try:
            # Once per machine first: a model from the Hub is downloaded there once.
            firsts = [self.workers[self.gang.nodes.index(node)] for node in dict.fromkeys(self.gang.nodes)]
            needs = ray.get([worker.submit(Worker.needs, text_bound(config)) for worker in firsts])[0]
            self.placement = place(config, self.gang.machines, needs, min(self.call(Worker.card_bytes)))
            # Rank 0 names the place where the process group meets.
            meeting = ray.get(self.workers[0].submit(Worker.meeting_point)) if self.size > 1 else None
            self.call(Worker.init_model, meeting, self.placement.sharding, self.placement.fsdp_size)
        except Exception:
            self.close()
            raise

    def call(self, method: Callable[Concatenate[Worker, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call a method on every worker; their answers by rank."""
        answers: list[R] = self._ray.get([worker.submit(method, *args, **kwargs) for worker in self.workers])
        return answers

    def run_batch(self, method: Callable[[Worker, TensorDict], TensorDict], batch: TensorDict) -> TensorDict:
        """Split the rows over the workers, call, and put the answers together again."""
        return TensorDict.cat(self._scatter(method, fill_up(batch, self._deal(1))))[: len(batch)]

    def update_actor(self, batch: TensorDict, step: int, unit: int = 1) -> dict[str, float]:
        """Optimizer steps on every worker with its share of the rows; `unit` rows belong together."""
        statistics = self._scatter(Worker.update_actor, fill_up(batch, self._deal(unit)), step)
        return numbers(pool_statistics(statistics, over_ranks=True))

    def _deal(self, unit: int) -> int:
        """What the number of rows must divide by.

        Every worker gets as many. Where the trainer scores old log-probs itself, they are scored in batches of the update's
        size, on which the last bits depend: there no micro-batch may be smaller than the others.
        """
        actor, multiple = self.config.actor, unit * self.size
        if not actor.diffusion_loss.spec.replays or self.config.algorithm.old_log_probs == "rollout":
            return multiple
        mini_batches = updates_per_step(self.config) // actor.ppo_epochs
        return multiple * actor.ppo_micro_batch_size_per_gpu * mini_batches

    def _scatter(self, method: Callable[..., R], batch: TensorDict, *args: Any) -> list[R]:
        parts = batch.split(len(batch) // self.size, dim=0)
        calls = [worker.submit(method, part, *args) for worker, part in zip(self.workers, parts, strict=True)]
        answers: list[R] = self._ray.get(calls)
        return answers

    async def generate(self, requests: Sequence[GenerationRequest]) -> TensorDict:
        """Samples of one batch, drawn by all workers together: every forward pass of a sharded module gathers shards from all.

        Requests are dealt out evenly; where they do not divide, the last one is repeated, and the repetitions are dropped.
        """
        share = -(-len(requests) // self.size)
        last, missing = requests[-1], share * self.size - len(requests)
        # Names of their own: no backend takes two requests of one name in a call.
        padded = [*requests, *(last.replace(request_id=f"{last.request_id}+{number}") for number in range(missing))]
        calls: list[Awaitable[TensorDict]] = [
            worker.call(Worker.generate, padded[rank * share : (rank + 1) * share])
            for rank, worker in enumerate(self.workers)
        ]
        parts = await asyncio.gather(*calls)
        places = [list(range(rank * share, (rank + 1) * share)) for rank in range(self.size)]
        return in_order(list(zip(places, parts, strict=True)))[: len(requests)]

    async def abort(self, request_ids: Sequence[str]) -> int:
        """Cancel requests in flight on every worker."""
        return sum(await asyncio.gather(*(worker.aside(Worker.abort, request_ids) for worker in self.workers)))

    def lora_payload(self, adapter: str, version: int) -> tuple[LoRAPayload, Any]:
        """The adapter, gathered from all workers, and its reference in Ray's store, whose memory it is."""
        references = [worker.submit(Worker.lora_payload, adapter, version) for worker in self.workers]
        payload = self._ray.get(references)[0]
        assert payload is not None  # the first rank's
        return payload, references[0]

    def gpu_places(self) -> list[tuple[str, str]]:
        """(Ray node, GPU) of every GPU that a worker holds."""
        return [place for places in self.call(Worker.gpu_places) for place in places]

    def where(self, error: BaseException | None) -> str:
        """Of a process that is gone: which one it was, on which machine. Empty for other errors."""
        while error is not None and not hasattr(error, "actor_id"):
            error = error.__cause__
        ids, gone = [worker.actor._actor_id.hex() for worker in self.workers], getattr(error, "actor_id", None)
        if gone not in ids:
            return ""
        rank = ids.index(gone)
        return (
            f"training process {rank} on machine {self.gang.addresses[rank]} is gone; look there, and at `ray status`"
        )

    def close(self) -> None:
        """End the processes."""
        for worker in self.workers:
            self._ray.kill(worker.actor)
        self.gang.release()


def fill_up(batch: TensorDict, multiple: int) -> TensorDict:
    """The batch with rows repeated from its start until its length divides; the repetitions are masked out of the loss."""
    missing = -len(batch) % multiple
    if not missing:
        return batch
    batch = batch.copy()
    if "mask" not in batch.keys():  # noqa: SIM118 - `in` on a TensorDict means something else
        batch["mask"] = torch.ones(len(batch), dtype=torch.bool)
    extra = batch[torch.arange(missing) % len(batch)]
    extra["mask"] = torch.zeros_like(extra["mask"])
    return TensorDict.cat([batch, extra])
