"""All weights of a policy, from the training processes to replicas of it: the way that `rollout.sync` names, and the receipts.

A replica holds one set of weights, so it is one policy state at a time: the one that draws next is brought before it draws.
Nothing passes through the driver. Every replica answers with the sum of what it holds, which must be that of what was sent.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lora_sync import WeightReceipt, verify_weights
from lora_sync.transport import Link
from omni_rollout.errors import ReplicaDeadError
from omni_rollout.fleet import Fleet
from omni_rollout.replica import Replica

from .config import RunConfig
from .errors import TrainerError
from .step_metrics import Metrics
from .workers import ActorRolloutRefWorker as Worker

if TYPE_CHECKING:
    from .group import WorkerGroup


class WeightSync:
    """Brings full or merged weights to replicas.

    Args:
        config: of the run.
        workers: the trainers, of which the first sends; those that share its weights gather them with it.
        fleet: the replicas.

    Raises:
        TrainerError: `rollout.sync` is shared_memory, and a replica is on another machine.
    """

    def __init__(self, config: RunConfig, workers: WorkerGroup, fleet: Fleet):
        self.workers, self.fleet = workers, fleet
        self.senders = workers.workers if workers.placement.sharding == "shard" else workers.workers[:1]
        together = fleet.nodes == {workers.gang.nodes[0]}
        self.way = config.rollout.sync
        if self.way == "shared_memory" and not together:
            raise TrainerError(
                "rollout.sync=shared_memory reaches processes of one machine, and replicas are on others than the first trainer; "
                "use ray, or auto"
            )
        if self.way == "auto":
            self.way = "shared_memory" if together else "ray"
        self._held: tuple[str, int] | None = None
        self._turn = asyncio.Lock()

    async def bring(self, state: str, version: int) -> Metrics:
        """Let every replica hold the policy state `state` of `version`, and prove it.

        Raises:
            LoRASyncError: a receipt that is not that of what was sent.
        """
        if self._held == (state, version):
            return {}
        self._held, sent = None, list[WeightReceipt]()

        async def send(replicas: Sequence[Replica]) -> None:
            async with self._turn:
                receipt, answers = await (self._by_ray if self.way == "ray" else self._by_link)(
                    replicas, state, version
                )
            sent.append(receipt)
            verify_weights(sent[0], receipt)  # a replica that starts late gets what the others got, or nothing
            for answer in answers:
                verify_weights(receipt, answer)

        await self.fleet.update_weights(send)
        self._held = state, version
        return {"sync/version": float(version), "sync/tensors_bound": float(sent[0].tensors_bound)}

    async def _by_ray(
        self, replicas: Sequence[Replica], state: str, version: int
    ) -> tuple[WeightReceipt, list[WeightReceipt]]:
        """Message by message through Ray's store; the next one is gathered while the replicas bind one."""
        await asyncio.gather(*(worker.call(Worker.open_weights, state, version) for worker in self.senders))
        living, answers, last = list(replicas), list[Any](), False
        coming = asyncio.ensure_future(self._next())
        try:
            while not last:
                last, bucket = await coming
                if not last:
                    coming = asyncio.ensure_future(self._next())
                asked = (replica.update_weights_bucket(bucket) for replica in living)
                answers = await asyncio.gather(*asked, return_exceptions=True)
                living = [
                    r for r, answer in zip(living, answers, strict=True) if not _dead(answer, alone=len(replicas) == 1)
                ]
        finally:
            coming.cancel()
        return await self.senders[0].call(Worker.sent_weights), [a for a in answers if isinstance(a, WeightReceipt)]

    async def _next(self) -> tuple[bool, Any]:
        """Whether it is the last one, and a reference to it."""
        answers = await asyncio.gather(*(worker.parts(Worker.next_bucket, returns=2) for worker in self.senders))
        last, bucket = answers[0]
        return last, bucket

    async def _by_link(
        self, replicas: Sequence[Replica], state: str, version: int
    ) -> tuple[WeightReceipt, list[WeightReceipt]]:
        """The whole stream through shared memory, or as a broadcast."""
        if self.way == "nccl":
            link = Link("nccl", await self.senders[0].call(Worker.free_address), len(replicas))
        else:
            link = Link("shared_memory", uuid.uuid4().hex, len(replicas))
        sent = (worker.call(Worker.send_weights, link, state, version) for worker in self.senders)
        received = (replica.receive_weights(link, number) for number, replica in enumerate(replicas))
        (receipt, *_), answers = await asyncio.gather(asyncio.gather(*sent), asyncio.gather(*received))
        return receipt, list(answers)


def _dead(answer: Any, *, alone: bool) -> bool:
    """Whether a replica died over it, which the router sees when it is next asked for something. Other errors are raised."""
    if isinstance(answer, ReplicaDeadError) and not alone:
        return True
    if isinstance(answer, BaseException):
        raise answer
    return False
