"""The agent loop: what goes in, what comes out, rewards streamed per sample, registered loops."""

import asyncio
import time

import pytest
import torch
from omni_rollout.agent_loop import DiffusionAgentLoop, DiffusionAgentLoopWorker, get_agent_loop, register
from omni_rollout.config import DiffusionPipelineConfig, DiffusionRolloutAlgoConfig, DiffusionRolloutConfig
from omni_rollout.errors import RolloutConfigError, RolloutError
from omni_rollout.replica import DiffusersReplica, LocalHandle
from omni_rollout.router import Router
from tensordict import NonTensorStack, TensorDict


@pytest.fixture
def config():
    return DiffusionRolloutConfig(
        n=2,
        seed=11,
        pipeline=DiffusionPipelineConfig(height=64, width=64, num_inference_steps=6),
        algo=DiffusionRolloutAlgoConfig(noise_level=0.7, sde_window_size=2, sample_strategy="fixed"),
    )


@pytest.fixture
def batch():
    data = TensorDict({}, batch_size=[4])
    data["uid"] = NonTensorStack("p", "p", "q", "q")
    data["prompt"] = NonTensorStack(
        "two red circles", "two red circles", "one blue square here", "one blue square here"
    )
    data["metadata"] = NonTensorStack({"count": 2}, {"count": 2}, {"count": 1}, {"count": 1})
    return data


def worker_of(config, backend, reward=None, **options):
    client = Router([DiffusersReplica(LocalHandle(backend), config.max_batch_size)])
    return DiffusionAgentLoopWorker(config, client, reward, **options)


async def mean_reward(image, prompt, metadata, uid, index):
    return float(image.mean()), {"strict": float(metadata["count"]), "index": float(index)}, None


def test_every_key_has_its_shape(config, batch, arithmetic_backend):
    out = asyncio.run(worker_of(config, arithmetic_backend(), mean_reward).generate_sequences(batch))
    shapes = {key: tuple(out[key].shape) for key in out.keys() if isinstance(out[key], torch.Tensor)}  # noqa: SIM118
    assert shapes == {
        "responses": (4, 3, 2, 2), "rm_scores": (4, 1), "latents": (4, 2, 3, 2, 2), "next_latents": (4, 2, 3, 2, 2),
        "step_index": (4, 2), "sigmas": (4, 7), "std": (4, 2), "rollout_log_probs": (4, 2),
        "final_latents": (4, 3, 2, 2),
        "prompt_embeds": (4, 4, 5), "prompt_embeds_mask": (4, 4), "policy_version": (4,), "seed": (4,), "index": (4,),
        "num_turns": (4,), "forwards": (4,),
    }  # fmt: skip
    assert out["responses"].dtype == torch.uint8
    assert out["rm_scores"].dtype == out["latents"].dtype == torch.float32
    assert out["prompt_embeds_mask"].sum(1).tolist() == [3, 3, 4, 4]
    assert (out["prompt_embeds"][0, 3] == 0).all()
    assert list(out["uid"]) == ["p", "p", "q", "q"]
    assert out["index"].tolist() == [0, 1, 0, 1]
    assert out["seed"].tolist() == [11] * 4
    assert [c["strict"] for c in out["reward_components"]] == [2, 2, 1, 1]
    assert list(out["reward_errors"]) == [None] * 4
    assert out["reward_extra_keys"] == ["index", "strict"]
    assert {"generate_s", "reward_s", "batch_size", "num_preempted"} == set(out["metrics"][0])
    assert list(out["metadata"])[2] == {"count": 1}


def test_given_indices_seeds_and_sampling_are_used(config, batch, arithmetic_backend):
    batch["index"] = torch.tensor([5, 6, 5, 6])
    batch["seed"] = torch.tensor([1, 1, 2, 2])
    batch.set_non_tensor("sampling", {"window": (0, 1, 2), "noise_level": 0.3})
    out = asyncio.run(worker_of(config, arithmetic_backend()).generate_sequences(batch))
    assert out["latents"].shape[1] == 3
    assert out["index"].tolist() == [5, 6, 5, 6]
    assert "rm_scores" not in out.keys()  # noqa: SIM118
    batch.set_non_tensor("validate", True)
    batch.set_non_tensor("sampling", {})
    assert "latents" in out.keys()  # noqa: SIM118


def test_rewards_are_asked_for_as_samples_finish(config, batch, arithmetic_backend):
    config.max_batch_size = 1
    asked = []

    async def reward(image, prompt, metadata, uid, index):
        asked.append(time.perf_counter())
        return 0.0, {}, "no words found" if index else None

    out = asyncio.run(worker_of(config, arithmetic_backend(delay=0.03), reward).generate_sequences(batch))
    assert asked[-1] - asked[0] > 0.06  # the first reward did not wait for the last sample
    assert list(out["reward_errors"]) == [None, "no words found"] * 2


def test_a_failing_sample_or_reward_ends_the_batch(config, batch, arithmetic_backend):
    backend = arithmetic_backend()
    backend.errors = [ValueError("bad")] * 9
    with pytest.raises(RolloutError, match="ValueError: bad"):
        asyncio.run(worker_of(config, backend).generate_sequences(batch))

    async def reward(*_):
        raise KeyError("count")

    with pytest.raises(KeyError, match="count"):
        asyncio.run(worker_of(config, arithmetic_backend(), reward).generate_sequences(batch))


def test_an_aborted_sample_is_an_error_not_a_hole(config, batch, arithmetic_backend):
    backend = arithmetic_backend()
    worker = worker_of(config, backend)
    backend.cancelled = {f"{worker._name}-1-2"}
    with pytest.raises(RolloutError, match="was aborted: the batch is incomplete"):
        asyncio.run(worker.generate_sequences(batch))


def test_tokens_travel_with_the_request(config, batch, arithmetic_backend):
    worker = worker_of(config, arithmetic_backend(), tokenizer=lambda text: [len(word) for word in text.split()])
    out = asyncio.run(worker.generate_sequences(batch))
    assert out["prompts"].tolist()[0] == [3, 3, 7, 0]
    assert out["prompts_mask"].sum(1).tolist() == [3, 3, 4, 4]


def test_loops_are_registered_by_name(config, batch, arithmetic_backend):
    @register("test_black_square_agent")
    class Loop(DiffusionAgentLoop):
        async def run(self, sampling_params, **kwargs):
            inner = get_agent_loop("diffusion_single_turn_agent")(self.config, self.client)
            output = await inner.run(sampling_params, **kwargs)
            output.response_diffusion_output = torch.zeros_like(output.response_diffusion_output)
            return output

    batch["agent_name"] = NonTensorStack("test_black_square_agent", *["diffusion_single_turn_agent"] * 3)
    out = asyncio.run(worker_of(config, arithmetic_backend()).generate_sequences(batch))
    assert out["responses"][0].sum() == 0
    assert out["responses"][1].sum() > 0
    with pytest.raises(RolloutConfigError, match="'nobody' is not registered; known are diffusion_judge_edit"):
        get_agent_loop("nobody")
    with pytest.raises(RolloutConfigError, match="registered already"):
        register("test_black_square_agent")(type("Other", (Loop,), {}))


def test_missing_columns_are_named(config, arithmetic_backend):
    with pytest.raises(RolloutConfigError, match="no 'uid'"):
        asyncio.run(worker_of(config, arithmetic_backend()).generate_sequences(TensorDict({}, batch_size=[1])))


def test_a_tensor_that_a_loop_adds_comes_out_as_a_column(config, batch, arithmetic_backend):
    """A loss may read it: nothing between the loop and the loss has a list of names."""
    shapes = {0: (2,), 1: (2,)}

    @register("test_weighing_agent")
    class Loop(DiffusionAgentLoop):
        async def run(self, sampling_params, **kwargs):
            inner = get_agent_loop("diffusion_single_turn_agent")(self.config, self.client)
            output = await inner.run(sampling_params, **kwargs)
            output.extra_fields["importance"] = torch.full(shapes[kwargs["index"]], 1.0 + kwargs["index"])
            return output

    batch["agent_name"] = NonTensorStack(*["test_weighing_agent"] * 4)
    out = asyncio.run(worker_of(config, arithmetic_backend()).generate_sequences(batch))
    assert out["importance"].shape == (4, 2)
    assert out["importance"][:, 0].tolist() == (1.0 + out["index"]).tolist()
    shapes[1] = (3,)
    with pytest.raises(RolloutError, match="'importance' has the shapes"):
        asyncio.run(worker_of(config, arithmetic_backend()).generate_sequences(batch))
