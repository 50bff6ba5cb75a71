"""The composite loop on the tiny policy: draw, judge, edit."""

import asyncio

import pytest
import torch
from omni_rollout.agent_loop import DiffusionAgentLoopWorker
from omni_rollout.backend import BackendClient
from omni_rollout.config import AgentLoopConfig, DiffusionRolloutConfig
from omni_rollout.errors import RolloutConfigError


@pytest.fixture
def config():
    return DiffusionRolloutConfig(agent=AgentLoopConfig(default_agent_loop="diffusion_judge_edit_agent", num_turns=2))


@pytest.fixture
def requests(make_request):
    prompts = ["three red circles on a black background"] * 2 + ["one blue square"] * 2
    return [make_request(i, uid="aabb"[i], index=i % 2, prompt=prompt) for i, prompt in enumerate(prompts)]


@pytest.fixture
def client(backend):
    return BackendClient(backend, 8)


async def likes_first_of_group(requests, pictures):
    return [(float(request.index == 0), {}, None) for request in requests]


def test_good_pictures_are_kept_and_others_edited(client, config, requests):
    out = asyncio.run(DiffusionAgentLoopWorker(config, client, likes_first_of_group).generate_sequences(requests))
    assert out["num_turns"].tolist() == [1, 2, 1, 2]
    assert out["step_index"].tolist() == [[0, 1], [3, 4], [0, 1], [3, 4]]
    assert out["latents"].shape[:2] == (4, 2)
    single = DiffusionRolloutConfig()
    first = asyncio.run(DiffusionAgentLoopWorker(single, client, likes_first_of_group).generate_sequences(requests))
    change = (out["final_latents"] - first["final_latents"]).abs().mean(dim=(1, 2))
    fresh = (first["final_latents"][0] - first["final_latents"][1]).abs().mean()
    assert change[0] == change[2] == 0
    assert 0 < change[1] < fresh  # an edit changes the picture, and less than a new one would
    assert torch.isfinite(out["rollout_log_probs"]).all()
    assert out["first_score"].tolist() == [1.0, 0.0, 1.0, 0.0]
    assert list(out["uid"]) == ["a", "a", "b", "b"]


def test_it_needs_a_judge_and_room(client, config, requests, make_request):
    with pytest.raises(RolloutConfigError, match="give the worker a reward"):
        asyncio.run(DiffusionAgentLoopWorker(config, client).generate_sequences(requests))
    short = [make_request(i, num_inference_steps=3) for i in range(4)]
    with pytest.raises(RolloutConfigError, match="begins at step 1 of 3"):
        asyncio.run(DiffusionAgentLoopWorker(config, client, likes_first_of_group).generate_sequences(short))
