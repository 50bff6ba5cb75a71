"""The queue of `trainer.staleness=1` alone: batches that failed, lack scores or are too old are drawn again in their places."""

import asyncio
from types import SimpleNamespace

import pytest
import torch
from omni_rollout.agent_loop import Drawn
from omni_rollout.errors import ReplicaError
from ray_trainer.ahead import Ahead
from ray_trainer.assets import builtin
from ray_trainer.compose import compose
from ray_trainer.prompts import Prompt, PromptSampler
from tensordict import NonTensorStack, TensorDict


class Rollouts:
    """Draws numbers: version and attempt of each sample."""

    def __init__(self, fails=(), unscored=()):
        self.sampler, self.version, self.fails, self.unscored = SimpleNamespace(beside=False), 0, list(fails), unscored
        self.asked = []

    async def draw(self, rows, n, *, step):
        self.asked.append((step, [uid for uid, _ in rows]))
        if self.fails and self.fails[0] == step:
            self.fails.pop(0)
            raise ReplicaError("no replica answered")
        uids = [uid for uid, _ in rows for _ in range(n)]
        made = TensorDict({"policy_version": torch.full((len(uids),), self.version)}, batch_size=[len(uids)])
        made["owner"], made["slot"] = torch.zeros(2, len(uids), dtype=torch.long)
        first = not any(one == step and uids[0] in asked for one, asked in self.asked[:-1])
        made["rm_scores"] = torch.tensor([[float("nan") if first and uid in self.unscored else 1.0] for uid in uids])
        made["attempt"] = torch.full((len(uids),), len(self.asked))
        made["uid"] = NonTensorStack(*uids)
        made["reward_errors"] = NonTensorStack(
            *["late" if score != score else None for score in made["rm_scores"][:, 0]]
        )
        return Drawn(made)


def queue(rollouts):
    config = compose(
        "flowgrpo", builtin("recipes", "tiny"), ["trainer.staleness=1", "rollout.n=3", "data.prompts_per_step=2"]
    )
    prompts, said = PromptSampler([Prompt(f"p{i}", "x") for i in range(2)], config.data, 0), []
    workers = SimpleNamespace(retain=lambda batch: None, ranks=1)
    return Ahead(config, rollouts, workers, prompts, said.append), said


def test_a_batch_that_failed_is_drawn_again_and_counted_and_a_second_failure_is_raised():
    async def steps(rollouts):
        ahead, said = queue(rollouts)
        batches = []
        for step in range(3):
            batches.append(await ahead.take(step))
            batches[-1].metrics = dict(ahead.metrics)
            rollouts.version = step + 1
        return batches, said

    rollouts = Rollouts(fails=[1])
    batches, said = asyncio.run(steps(rollouts))
    assert [step for step, _ in rollouts.asked] == [0, 1, 1, 2, 3]
    assert said == ["the samples of step 2 are drawn again: no replica answered"]
    assert [b.metrics["rollout/refilled"] for b in batches] == [0, 2, 0]
    assert [b.metrics["rollout/staleness_max"] for b in batches] == [0, 0, 1]  # again means by the present policy
    with pytest.raises(ReplicaError):
        asyncio.run(steps(Rollouts(fails=[1, 1])))


def test_groups_without_a_score_or_too_old_are_drawn_again_in_their_places():
    async def two(rollouts, old=0):
        ahead, _ = queue(rollouts)
        await ahead.take(0)
        rollouts.version = 5
        return await ahead.take(1 + old), ahead.metrics

    rollouts = Rollouts(unscored=("step1/p1",))
    batch, metrics = asyncio.run(two(rollouts))
    assert rollouts.asked[-1] == (1, ["step1/p1"])
    uids = list(batch["uid"])
    assert uids == [uid for uid in dict.fromkeys(uids) for _ in range(3)]
    assert {uid: set(batch["attempt"][[u == uid for u in uids]].tolist()) for uid in uids} == {
        "step1/p0": {2},
        "step1/p1": {4},
    }
    assert bool(batch["rm_scores"].isfinite().all())
    assert metrics["rollout/refilled"] == 1
