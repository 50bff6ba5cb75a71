"""All training processes of a run, as one: calls that reach every one of them, and batches that are split over them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from diffusion_losses import numbers, pool_statistics
from omni_rollout.batching import plan_batches
from omni_rollout.types import DiffusionOutput, GenerationRequest
from tensordict import TensorDict

from ray_trainer.config import RunConfig, updates_per_step
from ray_trainer.errors import TrainerError
from ray_trainer.workers import ActorRolloutRefWorker

if TYPE_CHECKING:
    from lora_sync import LoRAPayload


class WorkerGroup:
    """All training processes of a run, as one.

    Args:
        config: of the run.
    """

    def __init__(self, config: RunConfig):
        import ray

        self._ray, self.config, self.size = ray, config, config.trainer.num_workers
        gpus = int(ray.cluster_resources().get("GPU", 0))
        use_gpu = config.actor.fsdp_config.device != "cpu" and gpus > 0
        if use_gpu and gpus < self.size:
            raise TrainerError(
                f"trainer.num_workers={self.size} needs {self.size} GPUs and Ray sees {gpus}; ask for {gpus} or fewer, or "
                "set actor.fsdp_config.device=cpu"
            )
        self.gpus = self.size if use_gpu else 0
        actor = ray.remote(ActorRolloutRefWorker).options(num_gpus=int(use_gpu), num_cpus=0.5)
        self.actors: list[Any] = [actor.remote(config, rank=rank, world_size=self.size) for rank in range(self.size)]
        try:
            # Rank 0 names the place where the process group meets.
            meeting_point = ray.get(self.actors[0].meeting_point.remote()) if self.size > 1 else None
            self.call("init_model", meeting_point)
        except Exception:
            self.close()
            raise

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method on every worker; their answers by rank."""
        return self._ray.get([getattr(a, method).remote(*args, **kwargs) for a in self.actors])

    def run_batch(self, method: str, batch: TensorDict) -> TensorDict:
        """Split the rows over the workers, call, and put the answers together again."""
        return TensorDict.cat(self._scatter(method, fill_up(batch, self._deal(1))))[: len(batch)]

    def update_actor(self, batch: TensorDict, step: int, unit: int = 1) -> dict[str, float]:
        """Optimizer steps on every worker with its share of the rows; `unit` rows belong together."""
        statistics = self._scatter("update_actor", fill_up(batch, self._deal(unit)), step)
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

    def _scatter(self, method: str, batch: TensorDict, *args: Any) -> list[Any]:
        parts = batch.split(len(batch) // self.size, dim=0)
        return self._ray.get([getattr(a, method).remote(p, *args) for a, p in zip(self.actors, parts, strict=True)])

    def update_weights(self, step: int) -> dict[str, float]:
        """Sync every sampler that shares its weights; the metrics of the first."""
        return self.call("update_weights", step)[0]

    def lora_payload(self, adapter: str, version: int) -> tuple[LoRAPayload, Any]:
        """The adapter, gathered from all workers, and its reference in Ray's store, whose memory it is."""
        references = [actor.lora_payload.remote(adapter, version) for actor in self.actors]
        return self._ray.get(references)[0], references[0]

    def refresh_old_policy(self, step: int) -> dict[str, float]:
        """See `ActorRolloutRefWorker.refresh_old_policy`."""
        return self.call("refresh_old_policy", step)[0]

    def take_forwards(self) -> dict[str, float]:
        """Transformer rows per sample that scoring spent since the last call."""
        return self.call("take_forwards")[0]

    def gpu_places(self) -> list[tuple[str, str]]:
        """(Ray node, GPU) of every GPU that a worker holds."""
        return [place for places in self.call("gpu_places") for place in places]

    def rollout_handles(self) -> list[Any]:
        """What replicas talk to, one handle for each set of weights: a sharded module is one set."""
        return [self.actors[0] if self.size == 1 else LockstepHandle(self.actors)]

    def max_memory_gb(self) -> float:
        """The largest worker's peak."""
        return max(self.call("memory_gb"))

    def close(self) -> None:
        """End the processes."""
        for actor in self.actors:
            self._ray.kill(actor)


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


class LockstepHandle:
    """Several processes that hold one sharded module, behind the call form of a single actor.

    Every forward pass gathers shards from all of them, so all must make the same passes at the same time: requests are dealt out
    evenly, the last one is repeated where they do not divide, and the repetitions are dropped.
    """

    def __init__(self, actors: Sequence[Any]):
        self._actors = list(actors)
        self.generate_sequences = _Remote(self._generate)
        self.abort = _Remote(self._abort)

    async def _generate(self, requests: Sequence[GenerationRequest]) -> list[DiffusionOutput]:
        outputs: list[DiffusionOutput | None] = [None] * len(requests)
        for places in plan_batches(requests, len(requests)):
            share = -(-len(places) // len(self._actors))
            last, missing = requests[places[-1]], share * len(self._actors) - len(places)
            # Names of their own: no backend takes two requests of one name in a call.
            fillers = [last.replace(request_id=f"{last.request_id}+{number}") for number in range(missing)]
            padded = [requests[place] for place in places] + fillers
            deals = [padded[rank * share : (rank + 1) * share] for rank in range(len(self._actors))]
            answers = await asyncio.gather(
                *(actor.generate_sequences.remote(deal) for actor, deal in zip(self._actors, deals, strict=True))
            )
            for place, output in zip(places, itertools.chain.from_iterable(answers), strict=False):
                outputs[place] = output
        return [output for output in outputs if output is not None]

    async def _abort(self, request_ids: Sequence[str] | None = None) -> int:
        return sum(await asyncio.gather(*(actor.abort.remote(request_ids) for actor in self._actors)))


class _Remote:
    """`method.remote(*args)`, as an actor's method is called."""

    def __init__(self, function: Any):
        self._function = function

    def remote(self, *args: Any) -> asyncio.Task[Any]:
        return asyncio.ensure_future(self._function(*args))
