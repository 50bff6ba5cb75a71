"""All training processes of a run, as one: calls that reach all of them, and which of them draws, keeps and trains which row.

A batch of the driver names each row by the rank that keeps it (`owner`) and its `slot` there; the row itself does not come here.
A rank is a data-parallel one: several workers where sequence parallelism shares a sample's tokens, and they all do the same.
"""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import torch
from diffusion_losses import numbers, pool_statistics
from fsdp_diffusers_engine.batch import mini_batches
from omni_rollout.kept import by_number
from omni_rollout.remote import ASIDE, Remote
from omni_rollout.types import GenerationRequest, Kept
from tensordict import TensorDict

from .card_memory import text_bound
from .config import RunConfig, updates_per_step
from .machines import LEAVE_S, reserve
from .placement import place
from .workers import ActorRolloutRefWorker as Worker

if TYPE_CHECKING:
    from lora_sync import Promise

P = ParamSpec("P")
R = TypeVar("R")
CPUS = 0.5
"""That Ray sets aside for a training process."""


def _rows_file(folder: Path, rank: int) -> Path:
    return folder / f"rows_rank{rank}.safetensors"


class WorkerGroup:
    """All training processes of a run, as one.

    Args:
        config: of the run.
    """

    def __init__(self, config: RunConfig):
        import ray

        self._ray, self.config, size = ray, config, config.trainer.num_workers
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
                actor.options(scheduling_strategy=self.gang.strategy(rank)).remote(config, rank=rank, world_size=size),
                f"worker-{rank}",
            )
            for rank in range(size)
        ]
        try:
            # Once per machine first: a model from the Hub is downloaded there once.
            firsts = [self.workers[self.gang.nodes.index(node)] for node in dict.fromkeys(self.gang.nodes)]
            needs = ray.get([worker.submit(Worker.needs, text_bound(config)) for worker in firsts])[0]
            self.placement = place(config, self.gang.machines, needs, min(self.call(Worker.card_bytes)))
            # Rank 0 names the place where the process group meets.
            meeting = ray.get(self.workers[0].submit(Worker.meeting_point)) if size > 1 else None
            self.call(Worker.init_model, meeting, self.placement)
        except Exception:
            self.close()
            raise

    def call(self, method: Callable[Concatenate[Worker, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call a method on every worker; their answers by rank."""
        answers: list[R] = self._ray.get([worker.submit(method, *args, **kwargs) for worker in self.workers])
        return answers

    @property
    def ranks(self) -> int:
        """Data-parallel ranks."""
        return len(self.workers) // self._together

    @property
    def _together(self) -> int:
        return self.config.actor.fsdp_config.ulysses_sequence_parallel_size

    def of_rank(self, rank: int) -> list[Remote]:
        """The workers of a data-parallel rank; the first of them answers for it."""
        return self.workers[rank * self._together : (rank + 1) * self._together]

    # ---- rows ------------------------------------------------------------------------------------------------------------

    @property
    def mini_batches(self) -> int:
        """Of a pass over a whole batch. One of which rows were left out has as many: what published codes do."""
        return updates_per_step(self.config) // self.config.actor.ppo_epochs

    def deal(self, count: int) -> list[list[int]]:
        """Which of `count` rows each rank draws: as many of every mini-batch as the others, and next to each other there.

        Without regard to `actor.shuffle`: rows of a prompt lie together, so that few ranks encode and keep it. `_balanced` then
        moves the rows that a shuffle has left uneven.
        """
        dealt: list[list[int]] = [[] for _ in range(self.ranks)]
        for mini_batch in np.array_split(np.arange(count), self.mini_batches):
            for rank, part in enumerate(np.array_split(mini_batch, self.ranks)):
                dealt[rank] += part.tolist()
        return dealt

    async def generate(self, rank: int, requests: Sequence[GenerationRequest]) -> tuple[dict[str, np.ndarray], Any]:
        """Draw on one rank, which keeps the rows: what `Worker.generate` answers, what is shown as Ray's reference.

        Every forward pass of a sharded module gathers shards from all ranks: each must be asked as often as the others.
        """
        bare, latents = by_number(requests)
        answers = [worker.parts(Worker.generate, bare, *latents, returns=2) for worker in self.of_rank(rank)]
        facts, shown = (await asyncio.gather(*answers))[0]
        return facts, shown

    def take(self, requests: Sequence[GenerationRequest], files: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Let the ranks keep finished pictures from files that all of them see; who keeps each, and its slot there, [B]."""
        dealt = self.deal(len(requests))
        calls = [
            [
                worker.submit(Worker.take, [requests[i] for i in share], [files[i] for i in share])
                for worker in self.of_rank(rank)
            ]
            for rank, share in enumerate(dealt)
        ]
        owner, slot = torch.zeros(len(requests), dtype=torch.long), torch.zeros(len(requests), dtype=torch.long)
        for rank, (share, answers) in enumerate(zip(dealt, calls, strict=True)):
            owner[share], slot[share] = rank, torch.tensor(self._ray.get(answers)[0], dtype=torch.long)
        return owner, slot

    async def keep(self, rank: int, rows: Any) -> list[int]:
        """Give a rank `omni_rollout.samples.Rows`, or what a reference to them stands for; their slots there."""
        # Aside, for the rows of the next step come while this one is trained.
        answers = [worker.aside(Worker.keep, rows) for worker in self.of_rank(rank)]
        return (await asyncio.gather(*answers))[0]

    def retain(self, batch: TensorDict) -> None:
        """Forget the rows of other batches; those of this whole one get new slots, which `batch` then holds."""
        self.each(Worker.retain, batch)
        for rank in range(self.ranks):
            mine = batch["owner"] == rank
            batch["slot"][mine] = torch.arange(int(mine.sum()))

    def save_rows(self, batch: TensorDict, folder: Path) -> None:
        """Let each rank write its rows of a batch into a folder."""
        calls = []
        for rank in range(self.ranks):
            slots = batch["slot"][batch["owner"] == rank].tolist()
            calls.append(self.of_rank(rank)[0].submit(Worker.save_rows, str(_rows_file(folder, rank)), slots))
        self._ray.get(calls)

    def load_rows(self, folder: Path) -> None:
        """The rows of a folder that `save_rows` of as many ranks wrote, in the place of all others, in slots from 0 on."""
        files = [str(_rows_file(folder, rank)) for rank in range(self.ranks) for _ in self.of_rank(rank)]
        self._ray.get([w.submit(Worker.load_rows, file) for w, file in zip(self.workers, files, strict=True)])

    def final_latents(self, batch: TensorDict) -> list[Kept]:
        """Where the clean latents of rows that are kept lie: for agent loops, whose requests begin from them."""
        owners, slots = batch["owner"].tolist(), batch["slot"].tolist()
        found: dict[int, Kept] = {}
        for owner in set(owners):
            mine = [place for place, one in enumerate(owners) if one == owner]
            latents = self.of_rank(owner)[0].submit_aside(Worker.final_latents, [slots[place] for place in mine])
            found |= {place: Kept(latents, row) for row, place in enumerate(mine)}
        return [found[place] for place in range(len(owners))]

    async def abort(self, request_ids: Sequence[str]) -> int:
        """Cancel requests in flight on every worker that lives.

        None is cancelled where ranks meet in each forward pass: one that stopped earlier would leave the others waiting for it.
        They draw what was sent, and the run ends after that.
        """
        if self.placement.sharding == "shard" or self._together > 1:
            return 0
        asked = (worker.aside(Worker.abort, request_ids) for worker in self.workers)
        return sum(n for n in await asyncio.gather(*asked, return_exceptions=True) if isinstance(n, int))

    def each(self, method: Callable[..., R], batch: TensorDict, *columns: torch.Tensor) -> list[R]:
        """Call a method on every worker with the slots of the batch's rows there, and their rows of the columns.

        A rank that keeps none of them is given its first row, and the first of the columns: the others' forward passes need as
        many of its own, and `update_actor` may need that row in the same form as theirs.
        """
        calls = []
        for rank in range(self.ranks):
            mine = (batch["owner"] == rank).nonzero()[:, 0]
            slots, given = (batch["slot"][mine], mine) if len(mine) else (torch.zeros(1, dtype=torch.long), slice(1))
            arguments = [slots.numpy(), *(column[given].numpy() for column in columns)]
            calls += [worker.submit(method, *arguments) for worker in self.of_rank(rank)]
        answers: list[R] = self._ray.get(calls)
        return answers

    def each_row(self, method: Callable[..., np.ndarray], batch: TensorDict) -> torch.Tensor:
        """[B, …] what a method of the workers answers [b, …] about the batch's rows."""
        found: dict[int, np.ndarray] = {}
        for rank, answer in enumerate(self.each(method, batch)[:: self._together]):
            mine = (
                (batch["owner"] == rank).nonzero()[:, 0].tolist()
            )  # none where it answered about a row of no interest
            found |= dict(zip(mine, answer, strict=False))
        return torch.from_numpy(np.stack([found[row] for row in range(len(batch))]))

    def score_after_first(self, batch: TensorDict, step: int) -> None:
        """Old log-probs of the rows that are trained after the first optimizer step; the others' are left to its own forward."""
        first, *later = mini_batches(self.config.actor, len(batch), step, planned=self.mini_batches)
        self.each(Worker.leave_old_log_prob, batch[first])
        if later:  # a rank without one of them scores its first row for nothing, which does no harm
            self.each(Worker.compute_log_prob, batch[torch.cat(later).sort().values])

    def update_actor(self, batch: TensorDict, step: int) -> dict[str, float]:
        """Optimizer steps over the rows of `batch`, each on the rank that keeps it; metrics of all ranks together."""
        loss = self.config.actor.diffusion_loss
        names = ("advantages", "mask", "step_weights", "rollout_weights", *loss.own_tensors)
        small = {name: batch[name].numpy() for name in names if name in batch.keys()}
        owner, slot = self._balanced(batch["owner"].numpy(), batch["slot"].numpy(), step)
        calls = []
        for rank in range(self.ranks):
            mine = np.flatnonzero(owner == rank)
            part = {name: values[mine] for name, values in small.items()}
            calls += [
                worker.submit(Worker.update_actor, slot[mine].tolist(), mine, part, step)
                for worker in self.of_rank(rank)
            ]
        statistics = self._ray.get(calls)
        return numbers(pool_statistics(statistics[:: self._together], over_ranks=True))

    def _balanced(self, owner: np.ndarray, slot: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Owner and slot of each row after some have moved, so that pairs lie together and ranks share every mini-batch evenly.

        A row stays where it is as far as its rank has room; the others move from worker to worker. Where there are several
        epochs with a shuffle, this holds for the first.
        """
        actor = self.config.actor
        unit, wanted = 2 if actor.diffusion_loss.spec.paired else 1, owner.copy()
        for rows in mini_batches(actor, len(owner), step, planned=self.mini_batches):
            units = rows.view(-1, unit).numpy()
            room = [-(-len(units) // self.ranks)] * self.ranks
            late = []
            for members in units:
                home = owner[members[0]]
                if room[home] > 0:
                    room[home] -= 1
                    wanted[members] = home
                else:
                    late.append(members)
            free = [rank for rank, left in enumerate(room) for _ in range(left)]
            for members, rank in zip(late, free, strict=False):
                wanted[members] = rank
        moves = defaultdict(list)
        for row in np.flatnonzero(owner != wanted).tolist():
            moves[owner[row], wanted[row]].append(row)
        moved, taken = slot.copy(), []
        for (here, there), places in moves.items():
            given: Any = self.of_rank(here)[0].submit(Worker.give, slot[places].tolist())
            first, *_ = [worker.submit(Worker.keep, given, copies=True) for worker in self.of_rank(there)]
            taken.append((places, first))
        for places, slots in taken:
            moved[places] = self._ray.get(slots)
        return wanted, moved

    def write_rows(self, folder: Path) -> None:
        """Let every worker write the rows that it keeps into a folder."""
        calls = [worker.submit(Worker.write_rows, str(folder)) for worker in self.workers]
        self._ray.get(calls, timeout=60)  # one that hangs may have caused all this

    async def lora_payload(self, adapter: str, version: int, lent: bool = False) -> tuple[Promise, Any]:
        """What a receipt of the adapter must say, and the adapter, gathered from all workers, as Ray's reference; see `Worker`."""
        answers = (worker.parts(Worker.lora_payload, adapter, version, lent, returns=2) for worker in self.workers)
        promise, reference = (await asyncio.gather(*answers))[0]
        return promise, reference

    def gpu_places(self) -> list[tuple[str, str]]:
        """(Ray node, GPU) of every GPU that a worker holds."""
        return [place for places in self.call(Worker.gpu_places) for place in places]

    def where(self, error: BaseException | None) -> str:
        """Of a process that is gone, or samples that were lost with their machine: which one it was. Empty for other errors."""
        chain = []
        while error is not None:
            chain.append(error)
            error = error.__cause__
        if any(isinstance(getattr(e, "cause", e), self._ray.exceptions.ObjectLostError) for e in chain):
            gone = [node["NodeManagerAddress"] for node in self._ray.nodes() if not node["Alive"]]
            if gone:
                return f"samples were lost with machine {', '.join(gone)}; look there, and at `ray status`"
        ids = [worker.actor._actor_id.hex() for worker in self.workers]
        dead = next((e.actor_id for e in chain if hasattr(e, "actor_id")), None)
        rank = ids.index(dead) if dead in ids else self._dead() if len(ids) > 1 else None
        if rank is None:
            return ""
        return (
            f"training process {rank} on machine {self.gang.addresses[rank]} is gone; look there, and at `ray status`"
        )

    def _dead(self) -> int | None:
        """A rank that Ray says is dead. The first error may be another's, which only lost its connection to that one."""
        asked = [worker.actor.gpu_places.options(concurrency_group=ASIDE).remote() for worker in self.workers]
        self._ray.wait(asked, num_returns=len(asked), timeout=LEAVE_S)
        for rank, answer in enumerate(asked):
            try:
                self._ray.get(answer, timeout=0)
            except self._ray.exceptions.GetTimeoutError:
                continue
            except self._ray.exceptions.RayActorError:
                return rank
        return None

    def close(self) -> None:
        """End the processes."""
        for worker in self.workers:
            self._ray.kill(worker.actor)
        self.gang.release()
