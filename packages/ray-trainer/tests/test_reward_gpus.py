"""Rewards on GPUs, over GPUs that a local Ray only counts: whose they are, who sees which, and when there are too few.

And what workers import, which the Ray of `test_reward_loop.py` may have imported ahead.
"""

import asyncio
import os
import sys
import threading
import time

import numpy as np
import pytest
import ray
import torch
from image_rewards import PerSampleReward, RewardResult, RewardSample
from image_rewards.loop import RewardLoopManager
from image_rewards.model import ModelReward, on_gpu
from ray_trainer.compose import compose
from ray_trainer.errors import TrainerError
from ray_trainer.machines import reserve
from ray_trainer.placement import foresee
from ray_trainer.rules import check_rules


@pytest.fixture(scope="module")
def four_gpus():
    assert not ray.is_initialized(), "another test's Ray is up, with other GPUs"
    ray.init(address="local", num_cpus=4, num_gpus=4, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def make(tmp_path):
    def make(*given):
        (tmp_path / "r.yaml").write_text("base: builtin:tiny\n")
        return compose("flowgrpo", tmp_path / "r.yaml", list(given))

    return make


class Sees(PerSampleReward):
    """The GPUs that its process sees, and how often it was put to sleep."""

    slept = 0

    def score_one(self, sample):
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        return RewardResult(float(seen or -1), {"slept": self.slept, "reserved": len(ray.get_gpu_ids())})

    def sleep(self):
        self.slept += 1


def test_own_cards_are_reserved_beside_the_trainers_and_left_out_of_what_engines_may_take(four_gpus, make):
    config = make(
        "trainer.num_workers=2",
        "reward.several={a: {name: shapes, num_workers: 2, num_gpus: 0.5}, b: {name: shapes, num_gpus: 1}, c: {name: shapes}}",
    )
    gang, use_gpu = reserve(config, 0.25)
    try:
        assert use_gpu
        assert [(one.gpus, one.ranks) for one in gang.machines] == [(2, 2)]  # of four, two for a and b
        assert [len(gang.rewards[name].bundle_specs) for name in ("a", "b")] == [2, 1]
        assert "c" not in gang.rewards
        deadline = time.monotonic() + 10  # Ray's view of the whole cluster is some moments old
        while ray.available_resources().get("GPU", 0) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert ray.available_resources().get("GPU", 0) == 0
        Local = type("Local", (Sees,), dict(vars(Sees)))  # sent by value
        with RewardLoopManager(
            Local, num_workers=2, num_gpus=0.5, num_cpus=0.1, placement_group=gang.rewards["a"]
        ) as pool:
            results = pool.score_batch([sample() for _ in range(8)])
        assert len({result.score for result in results}) == 1  # halves of one card, and no trainer's
        assert results[0].score in (0, 1, 2, 3)
    finally:
        gang.release()


def sample(prompt=""):
    return RewardSample(np.zeros((3, 8, 8), np.uint8), prompt)


def test_a_worker_beside_a_trainer_sees_its_card_reserves_none_and_sleeps(four_gpus):
    node = ray.get_runtime_context().get_node_id()
    Local = type("Local", (Sees,), dict(vars(Sees)))
    with RewardLoopManager(Local, num_workers=2, beside=[(node, "3"), (node, "1")]) as pool:
        first = pool.score_batch([sample() for _ in range(8)])
        assert {result.score for result in first} <= {3.0, 1.0}
        assert all(result.components["reserved"] == 0 for result in first)
        asyncio.run(pool.sleep())
        assert all(result.components["slept"] == 1 for result in pool.score_batch([sample(), sample()]))


def test_workers_import_neither_torch_nor_transformers_and_use_this_interpreter(four_gpus):
    class Looks(PerSampleReward):
        name = "looks"

        def score_one(self, sample):
            heavy = {"torch", "transformers", "diffusers"} & set(sys.modules)
            return RewardResult(float(len(heavy)), {"same": float(sys.executable == sample.prompt)})

    with RewardLoopManager(Looks(), num_workers=1) as pool:
        result = pool.score_batch([sample(sys.executable)])[0]
    assert result.score == 0.0
    assert result.components["same"] == 1.0


def test_too_few_cards_are_refused(four_gpus, make):
    with pytest.raises(TrainerError, match="asks for 3 GPUs beside the trainers', and Ray sees 2"):
        reserve(make("trainer.num_workers=2", "reward.num_workers=3", "reward.num_gpus=1"), 0.25)
    with pytest.raises(TrainerError, match="asks for 1 GPUs and this machine has none"):
        foresee(make("reward.num_gpus=0.5", "actor.fsdp_config.device=cpu"))
    assert any("2 workers of the reward shapes with 0.5 GPU each, of its own" in line for line in foresee(
        make("reward.num_gpus=0.5", "reward.num_workers=2", "ray.gpu_memory_gb=80")
    ))  # fmt: skip


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("reward.num_gpus=1.5", "a share of one GPU, or whole ones"),
        ("reward.share_trainers_gpus=true", "needs reward.num_gpus above 0"),
        (
            "reward={share_trainers_gpus: true, num_gpus: 1}; actor.fsdp_config.device=cpu",
            "reward.share_trainers_gpus=true with actor.fsdp_config.device=cpu: the trainers have no GPU",
        ),
        (
            "reward={share_trainers_gpus: true, num_gpus: 1}; trainer.staleness=1",
            "scored during the update",
        ),
        (
            "reward={share_trainers_gpus: true, num_gpus: 1, num_workers: 2}",
            "do not fit the GPUs of trainer.num_workers=1",
        ),
    ],
)
def test_shares_that_cannot_be_are_refused(make, given, said):
    with pytest.raises(TrainerError, match=said):
        check_rules(make(*given.split("; ")))


def test_a_network_runs_where_its_worker_has_a_gpu_unless_its_options_say_otherwise():
    assert on_gpu("pickscore", {"path": "x"}) == {"device": "cuda", "path": "x"}
    assert on_gpu("pickscore", {"path": "x", "device": "cpu"})["device"] == "cpu"
    assert on_gpu("shapes", {}) == {}


def test_a_network_sleeps_on_the_cpu_and_is_back_for_the_next_sample(monkeypatch):
    class Tiny(ModelReward):
        def load(self):
            self.model = torch.nn.Linear(1, 1)

        def score_batch(self, samples):
            return [RewardResult(1.0) for _ in samples]

    made, moves = Tiny(device="cuda"), []
    monkeypatch.setattr(Tiny, "_move", lambda self, device: moves.append(device))
    made.sleep()  # nothing is loaded
    assert made(sample()).unwrap() == 1
    made.sleep()
    made.sleep()
    assert moves == ["cpu"]
    made(sample())
    made(sample())
    assert moves == ["cpu", "cuda"]
    with made.awake():  # a forward pass
        sleeper = threading.Thread(target=made.sleep)
        sleeper.start()
        sleeper.join(0.1)
        assert moves == ["cpu", "cuda"]
    sleeper.join()
    assert moves == ["cpu", "cuda", "cpu"]
    monkeypatch.undo()
    made.device = "cpu"
    made._move("meta")
    assert made.model.weight.device.type == "meta"
