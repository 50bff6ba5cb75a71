"""`trainer.staleness=1`: the samples of a step are drawn one step early, so that drawing and scoring run under the update.

    step n     take(n)                  the batch of step n + 1 is begun
               update n                 it is drawn (by replicas of their own) and scored meanwhile
               drawn()                  before the new weights come to the sampler, all of it is drawn
               sync n + 1

So a whole batch is of one policy, and no older than the one before the present: `policy_version` of a row of step n is n - 1 (n in
the first step, and for what was drawn again). Where the trainers' own weights draw, both cannot run at once: the next batch is
drawn first, then the update runs while its rewards are computed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from omni_rollout.agent_loop import Drawn, cancel, describe
from omni_rollout.errors import DeadlineError, ReplicaError
from omni_rollout.samples import column
from safetensors import safe_open
from tensordict import TensorDict

from .config import RunConfig
from .failure import write_tensors
from .prompts import Prompt, PromptSampler
from .rollouts import Rollouts, requests_of
from .step_metrics import Metrics

if TYPE_CHECKING:
    from .group import WorkerGroup

FOLDER, _FILE = "ahead", "batch.safetensors"
"""Where the waiting batch lies in a checkpoint."""
_LISTS = ("reward_components", "reward_errors")


class Ahead:
    """The batch that waits for its step. All calls but `drawing` run in one event loop.

    Args:
        config: of the run.
        rollouts: draws and scores.
        workers: keep the rows.
        prompts: of every step.
        echo: where lines for a person go.
    """

    def __init__(
        self,
        config: RunConfig,
        rollouts: Rollouts,
        workers: WorkerGroup,
        prompts: PromptSampler,
        echo: Callable[[str], None] = print,
    ):
        self.config, self.rollouts, self.workers, self.prompts, self.echo = config, rollouts, workers, prompts, echo
        self._next: asyncio.Future[Drawn] | None = None
        self._step = -1
        """That the waiting batch is for."""
        self._again = 0
        self.metrics: Metrics = {}
        """Of the batch taken last: how old its samples are, in updates of the policy, and how many groups were drawn again."""

    @property
    def drawing(self) -> bool:
        """Whether the next batch is being drawn, for which the event loop must run."""
        return self._next is not None and not self._next.done()

    async def take(self, step: int) -> TensorDict:
        """The scored batch of `step`; that of the next step is begun."""
        drawn = await self._waiting(step)
        self.workers.retain(drawn.batch)
        if step + 1 < self.config.trainer.total_steps:
            self._begin(step + 1)
            if not self.rollouts.sampler.beside:
                await self.drawn()
        batch = await self._refilled(await drawn.scored(), step)
        age = (step - batch["policy_version"]).float()
        self.metrics = {"rollout/staleness_mean": float(age.mean()), "rollout/staleness_max": float(age.max())}
        self.metrics["rollout/refilled"] = float(self._again)
        self._again = 0
        return batch

    async def drawn(self) -> None:
        """Wait until the next batch is drawn. What failed in it is raised by its own `take`."""
        if self._next is not None:
            await asyncio.wait([self._next])

    def _begin(self, step: int) -> None:
        self._step = step
        self._next = asyncio.ensure_future(self.rollouts.draw(self._rows(step), self.config.rollout.n, step=step))

    async def _waiting(self, step: int) -> Drawn:
        if self._next is None or self._step != step:
            self._begin(step)
        assert self._next is not None
        drawing, self._next = self._next, None
        try:
            return await drawing
        except (ReplicaError, DeadlineError) as error:
            self.echo(f"the samples of step {step + 1} are drawn again: {error}")
        rows = self._rows(step)
        self._again += len(rows)
        return await self.rollouts.draw(rows, self.config.rollout.n, step=step)

    async def _refilled(self, batch: TensorDict, step: int) -> TensorDict:
        """The batch with those groups drawn again, once and by the present policy, that lack a score or are older than allowed; all
        of it, where the loss compares with the one policy that drew it."""
        late = step - batch["policy_version"] > self.config.trainer.staleness
        lost = late | ~batch["rm_scores"][:, 0].isfinite()
        again = {uid for uid, out in zip(batch["uid"], lost.tolist(), strict=True) if out}
        if not again:
            return batch
        again |= set(batch["uid"]) if self.config.keeps_drew else set()
        rows = [row for row in self._rows(step) if row[0] in again]
        self._again += len(rows)
        fresh = await (await self.rollouts.draw(rows, self.config.rollout.n, step=step)).scored()
        if len(fresh) == len(batch):
            return fresh
        renewed = torch.tensor([uid in again for uid in batch["uid"]])
        order = torch.cat([(~renewed).nonzero()[:, 0], renewed.nonzero()[:, 0]]).argsort()
        return TensorDict.cat([batch[~renewed], fresh.select(*batch.keys())])[order]

    def _rows(self, step: int) -> list[tuple[str, Prompt]]:
        return rows_of(self.prompts.at(step), step)

    # ---- checkpoints -----------------------------------------------------------------------------------------------------

    async def save(self, checkpoint: Path, step: int) -> None:
        """Put the waiting batch into the checkpoint before `step`, when it is for that step, once its scores are there."""
        if self._next is None or self._step != step:
            return
        try:
            batch = await (await self._next).scored()
        except Exception as error:  # raised by `take`; a run that resumes from here draws the batch anew
            self._next = asyncio.get_running_loop().create_future()
            self._next.set_exception(error)
            return
        folder = checkpoint / FOLDER
        folder.mkdir()
        self.workers.save_rows(batch, folder)
        keys = [str(key) for key in batch.keys()]
        tensors = {key: batch[key].clone() for key in keys if isinstance(batch[key], torch.Tensor)}
        lists: dict[str, Any] = {key: list(batch[key]) for key in ("uid", *_LISTS)} | {"ranks": self.workers.ranks}
        lists["seen"] = {uid: self.rollouts.scoring.seen[uid] for uid in lists["uid"]}
        write_tensors(folder / _FILE, tensors, {"lists": json.dumps(lists)})

    async def load(self, checkpoint: Path, step: int) -> None:
        """The counterpart of `save`. A batch of other prompts or ranks is left, and drawn anew."""
        folder = checkpoint / FOLDER
        if not folder.is_dir():
            return
        requests = requests_of(self.config, self._rows(step), self.config.rollout.n, step=step, validate=False)
        with safe_open(folder / _FILE, framework="pt") as stored:
            lists: dict[str, Any] = json.loads(stored.metadata()["lists"])
            tensors = {key: stored.get_tensor(key) for key in stored.keys()}
        if lists["uid"] != [request.uid for request in requests] or lists["ranks"] != self.workers.ranks:
            self.echo(f"the samples of step {step + 1} in {folder} are of other prompts or ranks, and are drawn anew")
            return
        batch = TensorDict(tensors, batch_size=[len(requests)])
        describe(batch, requests)
        for key in _LISTS:
            batch[key] = column(lists[key])
        for rank in range(self.workers.ranks):
            mine = batch["owner"] == rank
            batch["slot"][mine] = torch.arange(int(mine.sum()))
        self.workers.load_rows(folder)
        self.rollouts.scoring.seen |= lists["seen"]
        self._step, self._next = step, asyncio.get_running_loop().create_future()
        self._next.set_result(Drawn(batch))

    async def close(self) -> None:
        """Give up the waiting batch. A later `take` draws anew."""
        waiting, self._next = self._next, None
        if waiting is not None:
            await cancel([waiting])
            if not waiting.cancelled() and waiting.exception() is None:
                await waiting.result().cancel()


def rows_of(prompts: list[Prompt], step: int) -> list[tuple[str, Prompt]]:
    """The prompts of a training step with the uids of their groups, on which the samples' noise depends."""
    return [(f"step{step}/{prompt.uid}", prompt) for prompt in prompts]
