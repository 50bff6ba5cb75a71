"""The agent loop: what goes in, what comes out, rewards asked for as chunks finish, loops by name and from elsewhere."""

import asyncio
import time

import pytest
import torch
from omni_rollout.agent_loop import DiffusionAgentLoopWorker
from omni_rollout.config import AgentLoopConfig, DiffusionRolloutConfig
from omni_rollout.errors import RolloutConfigError, RolloutError
from omni_rollout.loops import get_agent_loop
from omni_rollout.router import Router


@pytest.fixture
def requests(make_request):
    prompts = ["two red circles"] * 2 + ["one blue square here"] * 2
    return [
        make_request(i, uid="ppqq"[i], index=i % 2, seed=11, prompt=prompt, metadata={"count": 2 - i // 2})
        for i, prompt in enumerate(prompts)
    ]


def worker_of(replica, reward=None, loop="diffusion_single_turn_agent"):
    config = DiffusionRolloutConfig(agent=AgentLoopConfig(default_agent_loop=loop))
    return DiffusionAgentLoopWorker(config, Router([replica]), reward)


async def mean_reward(requests, pictures):
    return [
        (float(picture.mean()), {"strict": float(request.metadata["count"]), "index": float(request.index)}, None)
        for request, picture in zip(requests, pictures, strict=True)
    ]


def test_every_key_has_its_shape(requests, arithmetic_replica):
    out = asyncio.run(worker_of(arithmetic_replica(batch_size=2), mean_reward).generate_sequences(requests))
    shapes = {key: tuple(out[key].shape) for key in out.keys() if isinstance(out[key], torch.Tensor)}
    assert shapes == {
        "responses": (4, 3, 2, 2), "rm_scores": (4, 1), "latents": (4, 2, 3, 2, 2), "next_latents": (4, 2, 3, 2, 2),
        "step_index": (4, 2), "sigmas": (4, 7), "std": (4, 2), "rollout_log_probs": (4, 2),
        "final_latents": (4, 3, 2, 2),
        "prompt_embeds": (4, 4, 5), "prompt_embeds_mask": (4, 4), "policy_version": (4,), "seed": (4,), "index": (4,),
        "forwards": (4,), "batch_rows": (4,),
    }  # fmt: skip
    assert out["responses"].dtype == torch.uint8
    assert out["rm_scores"].dtype == out["latents"].dtype == torch.float32
    assert out["prompt_embeds_mask"].sum(1).tolist() == [3, 3, 4, 4]
    assert (out["prompt_embeds"][0, 3] == 0).all()
    assert list(out["uid"]) == ["p", "p", "q", "q"]
    assert out["index"].tolist() == [0, 1, 0, 1]
    assert out["seed"].tolist() == [11] * 4
    assert [c["strict"] for c in out["reward_components"]] == [2, 2, 1, 1]
    assert torch.allclose(out["rm_scores"][:, 0], out["responses"].float().mean((1, 2, 3)))
    assert list(out["reward_errors"]) == [None] * 4
    assert list(out["metadata"])[2] == {"count": 1}
    assert list(out["settings"]) == [request.settings for request in requests]


def test_without_a_reward_there_are_no_scores(requests, arithmetic_replica):
    out = asyncio.run(worker_of(arithmetic_replica()).generate_sequences(requests))
    assert not {"rm_scores", "reward_components", "reward_errors"} & set(out.keys())


def test_rewards_are_asked_for_as_samples_finish(requests, arithmetic_replica):
    asked = []

    async def reward(requests, pictures):
        asked.append(time.perf_counter())
        return [(0.0, {}, "no words found" if request.index else None) for request in requests]

    worker = worker_of(arithmetic_replica(delay=0.03, batch_size=1), reward)
    out = asyncio.run(worker.generate_sequences(requests))
    assert asked[-1] - asked[0] > 0.06  # the first reward did not wait for the last sample
    assert list(out["reward_errors"]) == [None, "no words found"] * 2


def test_a_failing_sample_or_reward_ends_the_batch(requests, arithmetic_replica):
    replica = arithmetic_replica()
    replica.errors = [ValueError("bad")] * 9
    with pytest.raises(RolloutError, match="ValueError: bad"):
        asyncio.run(worker_of(replica).generate_sequences(requests))

    async def reward(*_):
        raise KeyError("count")

    slow = arithmetic_replica(delay=0.02, batch_size=1)
    with pytest.raises(KeyError, match="count"):
        asyncio.run(worker_of(slow, reward).generate_sequences(requests))
    assert len(slow.calls) < 4  # the drawing ended too


def test_loops_go_by_name_or_by_module_and_class(requests, arithmetic_replica, monkeypatch, tmp_path):
    (tmp_path / "my_loop.py").write_text(
        "from omni_rollout.loop_base import DiffusionAgentLoop\n"
        "class Black(DiffusionAgentLoop):\n"
        "    async def run(self, requests):\n"
        "        async for places, samples in self.client.stream(requests):\n"
        "            samples['responses'].zero_()\n"
        "            yield places, samples\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    out = asyncio.run(worker_of(arithmetic_replica(), loop="my_loop:Black").generate_sequences(requests))
    assert out["responses"].sum() == 0
    assert get_agent_loop("diffusion_judge_edit_agent").__name__ == "DiffusionJudgeEditAgentLoop"
    with pytest.raises(RolloutConfigError, match="'nobody' is neither one of diffusion_single_turn_agent"):
        get_agent_loop("nobody")
    with pytest.raises(RolloutConfigError, match="no subclass of DiffusionAgentLoop"):
        get_agent_loop("omni_rollout.router:Router")


def test_a_tensor_that_a_loop_adds_comes_out_as_a_column(requests, arithmetic_replica, monkeypatch, tmp_path):
    """A loss may read it: nothing between the loop and the loss has a list of names."""
    (tmp_path / "weighing_loop.py").write_text(
        "import torch\n"
        "from omni_rollout.loop_base import DiffusionAgentLoop\n"
        "class Weighing(DiffusionAgentLoop):\n"
        "    async def run(self, requests):\n"
        "        async for places, samples in self.client.stream(requests):\n"
        "            samples['importance'] = torch.tensor([[1.0 + requests[p].index] * 2 for p in places])\n"
        "            yield places, samples\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    worker = worker_of(arithmetic_replica(batch_size=1), loop="weighing_loop:Weighing")
    out = asyncio.run(worker.generate_sequences(requests))
    assert out["importance"].shape == (4, 2)
    assert out["importance"][:, 0].tolist() == (1.0 + out["index"]).tolist()
