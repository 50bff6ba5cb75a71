"""What the apps' hooks make of a scored batch, without Ray."""

import asyncio

import dpo_online.trainer as dpo
import flowgrpo.trainer as grpo
import pytest
import torch
from omni_rollout.batching import plan_batches
from omni_rollout.types import GenerationRequest
from ray_trainer import schema
from ray_trainer.group import LockstepHandle
from tensordict import NonTensorStack, TensorDict


def trajectories(rows=64, window=5):
    data = {
        "latents": torch.arange(rows * window, dtype=torch.float32).view(rows, window, 1, 1).expand(-1, -1, 2, 3),
        "step_index": torch.arange(window).expand(rows, -1),
        "std": torch.arange(window, dtype=torch.float32).expand(rows, -1),
        "rollout_log_probs": torch.arange(rows * window, dtype=torch.float32).view(rows, window),
    }
    data["next_latents"] = data["latents"] + 0.5
    return TensorDict(data, batch_size=[rows])


def test_a_random_share_of_the_steps_is_trained():
    batch = trajectories()
    chosen = grpo.choose_steps(batch, 0.6, seed=1, step=3)
    assert chosen["step_index"].shape == (64, 3)
    assert chosen["latents"].shape == (64, 3, 2, 3)
    for key in schema.TRAJECTORY:  # every key follows the same choice
        rows = torch.arange(64)[:, None]
        assert torch.equal(chosen[key], batch[key][rows, chosen["step_index"]])
    assert (chosen["step_index"].diff(dim=1) > 0).all()
    assert len(chosen["step_index"].unique(dim=0)) > 5  # each sample has its own
    assert torch.equal(grpo.choose_steps(batch, 0.6, seed=1, step=3)["step_index"], chosen["step_index"])
    assert not torch.equal(grpo.choose_steps(batch, 0.6, seed=1, step=4)["step_index"], chosen["step_index"])
    assert grpo.choose_steps(batch, 0.01, seed=1, step=3)["step_index"].shape == (64, 1)
    assert grpo.choose_steps(batch, 1.0, seed=1, step=3) is batch


class Config:
    """As much of a config as the hooks read."""

    class algorithm:
        advantage_std, advantage_ddof, advantage_eps = "batch", 0, 1e-4
        pair_margin, pair_mode = 0.0, "best_worst"

    class actor:
        class diffusion_loss:
            adv_clip_max = 5.0


def scored(rewards):
    batch = TensorDict({"rm_scores": torch.tensor(rewards)[:, None]}, batch_size=[len(rewards)])
    batch["final_latents"] = torch.arange(float(len(rewards)))[:, None].expand(-1, 4)
    batch["uid"] = NonTensorStack(*[f"u{i // 3}" for i in range(len(rewards))])
    return batch


def trainer(cls):
    made = cls.__new__(cls)
    made.config = Config
    return made


def test_groups_that_say_nothing_are_left_out_of_a_forward_process_update():
    batch = scored([0.0, 1.0, 0.5, 0.7, 0.7, 0.7, float("nan"), 0.2, 0.4])
    data, metrics = trainer(dpo.RayForwardProcessTrainer).prepare_update(batch, 0)
    assert data["final_latents"][:, 0].tolist() == [0, 1, 2, 7, 8]
    assert data["advantages"].shape == (5, 1)
    assert data["advantages"][:3].sum() == pytest.approx(0, abs=1e-6)
    assert metrics["advantages/equal_groups"] == 1
    assert metrics["advantages/nonfinite"] == 1


def test_pairs_are_the_best_and_the_worst_of_a_prompt():
    batch = scored([0.0, 1.0, 0.5, 0.7, 0.7, 0.7, 0.3, 0.2, 0.4])
    data, metrics = trainer(dpo.RayOnlineDPOTrainer).prepare_update(batch, 0)
    assert data["final_latents"][:, 0].tolist() == [1, 0, 8, 7]
    assert (metrics["pairs/pairs"], metrics["pairs/tied_pairs"]) == (2, 1)
    assert metrics["pairs/reward_gap"] == pytest.approx(0.6)


class Rank:
    """A training process as the handle sees it; it refuses what a backend refuses, and answers with names."""

    def __init__(self):
        self.shares = []
        self.generate_sequences = self

    async def remote(self, requests):
        plan_batches(requests, 4)  # raises for a name that occurs twice
        self.shares.append(len(requests))
        return [request.request_id for request in requests]


@pytest.mark.parametrize(("count", "ranks"), [(42, 8), (3, 2), (1, 4), (8, 4)])
def test_a_chunk_that_does_not_divide_reaches_every_rank_once(count, ranks):
    requests = [
        GenerationRequest(f"r{i}", "u", i, "a circle", seed=0, height=64, width=64, num_inference_steps=4)
        for i in range(count)
    ]
    actors = [Rank() for _ in range(ranks)]
    answers = asyncio.run(LockstepHandle(actors)._generate(requests))
    assert answers == [request.request_id for request in requests]
    assert len({tuple(actor.shares) for actor in actors}) == 1  # all make the same passes
