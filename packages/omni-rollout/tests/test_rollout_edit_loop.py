"""The composite loop on the tiny policy: draw, judge, edit."""

import asyncio

import pytest
import torch
from omni_rollout.agent_loop import DiffusionAgentLoopWorker
from omni_rollout.config import (
    AgentLoopConfig,
    DiffusionPipelineConfig,
    DiffusionRolloutAlgoConfig,
    DiffusionRolloutConfig,
)
from omni_rollout.diffusers_backend import DiffusersBackend
from omni_rollout.errors import RolloutConfigError
from omni_rollout.replica import DiffusersReplica, LocalHandle
from omni_rollout.router import Router
from tensordict import NonTensorStack, TensorDict


@pytest.fixture(scope="module")
def client(tiny):
    return Router([DiffusersReplica(LocalHandle(DiffusersBackend.from_pretrained(tiny)), 8)])


@pytest.fixture
def config():
    return DiffusionRolloutConfig(
        seed=5,
        pipeline=DiffusionPipelineConfig(height=64, width=64, num_inference_steps=6),
        algo=DiffusionRolloutAlgoConfig(noise_level=0.7, sde_window_size=2, sample_strategy="fixed"),
        agent=AgentLoopConfig(default_agent_loop="diffusion_judge_edit_agent", num_turns=2),
    )


@pytest.fixture
def batch():
    data = TensorDict({}, batch_size=[4])
    data["uid"] = NonTensorStack("a", "a", "b", "b")
    data["prompt"] = NonTensorStack(*["three red circles on a black background"] * 2, *["one blue square"] * 2)
    return data


async def likes_first_of_group(image, prompt, metadata, uid, index):
    return float(index == 0), {}, None


def test_good_pictures_are_kept_and_others_edited(client, config, batch):
    out = asyncio.run(DiffusionAgentLoopWorker(config, client, likes_first_of_group).generate_sequences(batch))
    assert out["num_turns"].tolist() == [1, 2, 1, 2]
    assert out["step_index"].tolist() == [[0, 1], [3, 4], [0, 1], [3, 4]]
    assert out["latents"].shape[:2] == (4, 2)
    single = DiffusionRolloutConfig(seed=5, pipeline=config.pipeline, algo=config.algo)
    first = asyncio.run(DiffusionAgentLoopWorker(single, client, likes_first_of_group).generate_sequences(batch))
    change = (out["final_latents"] - first["final_latents"]).abs().mean(dim=(1, 2))
    fresh = (first["final_latents"][0] - first["final_latents"][1]).abs().mean()
    assert change[0] == change[2] == 0
    assert 0 < change[1] < fresh  # an edit changes the picture, and less than a new one would
    assert torch.isfinite(out["rollout_log_probs"]).all()
    assert [m.get("first_score") for m in out["metrics"]] == [1.0, 0.0, 1.0, 0.0]


def test_it_needs_a_judge_and_room(client, config, batch):
    with pytest.raises(RolloutConfigError, match="give the worker a reward"):
        asyncio.run(DiffusionAgentLoopWorker(config, client).generate_sequences(batch))
    config.pipeline.num_inference_steps = 3
    with pytest.raises(RolloutConfigError, match="begins at step 1 of 3"):
        asyncio.run(DiffusionAgentLoopWorker(config, client, likes_first_of_group).generate_sequences(batch))
