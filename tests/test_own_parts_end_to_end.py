"""Parts from files of one's own, outside the repository, in the real program on real Ray.

One run has all of them: a loss, an algorithm, an agent loop, a sampler kind, a reward, a model's spec and, in a real engine, its
pipeline.
"""

import json
import os
import platform
import sys

import pytest
from flowgrpo.cli import APP
from ray_trainer.cli import run
from ray_trainer.doors import FOLDERS
from safetensors.torch import load_file

LOSS = '''
import torch
from diffusion_losses import ElementLoss, LossSpec


def weighed(config, model_output, data):
    """REINFORCE on the stored steps, each sample weighed by a tensor that only this loss reads."""
    power = config.options.get("power", 1.0)
    ratio = (model_output["log_probs"] - data["old_log_probs"]).exp()
    objective = -data["importance"] ** power * data["advantages"] * ratio
    means = {"actor/importance": data["importance"]}
    return ElementLoss(objective, torch.ones_like(objective, dtype=torch.bool), means, ratio.detach())


WEIGHED = LossSpec(weighed, "policy_gradient", reads=("importance",), options=("power",))
NOT_A_SPEC = 3
'''

ALGORITHM = '''
from typing import ClassVar

from flowgrpo.trainer import RayFlowGRPOTrainer


class Weighing(RayFlowGRPOTrainer):
    """FlowGRPO whose later samples of a prompt count more."""

    OPTIONS: ClassVar[dict] = {"floor": 0.5, "unused": None}

    def prepare_update(self, batch, step):
        batch = batch.copy()
        batch["importance"] = self.options["floor"] + batch["index"].float()
        data, metrics = super().prepare_update(batch, step)
        turns = float(batch["turns"].mean())  # of the agent loop, which a test gives too
        return data, metrics | {"weighing/floor": self.options["floor"], "weighing/turns": turns}


class Stranger:
    pass
'''


LOOP = '''
import torch
from omni_rollout.loop_base import DiffusionAgentLoop


class Marked(DiffusionAgentLoop):
    """One turn, and a tensor that says so."""

    async def run(self, requests):
        async for places, samples in self.client.stream(requests):
            samples["turns"] = torch.full((len(places),), 7.0)
            yield places, samples
'''

KIND = '''
from sde_samplers import SamplerKind


def gentle(t, u, eta, cap):
    """Half of the noise that flow_cps draws at this level."""
    std = u * eta / 2
    keep = (u * u - std * std) ** 0.5
    return (1 - u) + keep, (1 - t) * keep - t * (1 - u), std


GENTLE = SamplerKind(gentle, most_noise=1.0)
NOT_A_KIND = 3
'''

REWARD = """
from image_rewards import PerSampleReward, RewardResult


class Redness(PerSampleReward):
    def __init__(self, gain: float = 1.0):
        self.gain = gain

    def score_one(self, sample):
        return RewardResult(self.gain * float(sample.image[0].mean()) / 255, {"gain": self.gain})


number = 3
"""

MODEL = '''
from model_specs import QwenImageSpec


class Slim(QwenImageSpec):
    """Only queries are adapted, the velocity is the network's times 0.9, and the engine runs a pipeline of its own."""

    name = "slim"
    attention_targets = ("to_q",)
    mlp_targets = ()
    engine_pipeline = "own_pipeline_of_a_test:SlimPipeline"

    def predict(self, transformer, x, sigma, prompts, settings):
        return 0.9 * super().predict(transformer, x, sigma, prompts, settings)


class Lost(Slim):
    engine_pipeline = "no_pipeline_of_a_test:Pipeline"


class Diffusers(Slim):
    engine_pipeline = ""
'''

PIPELINE = """
from omni_rollout.vllm_omni.pipelines.qwen_image import QwenImageRolloutPipeline


class SlimPipeline(QwenImageRolloutPipeline):
    def predict_noise(self, *args, **kwargs):
        return 0.9 * super().predict_noise(*args, **kwargs)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The folder of the two files; what naming them does to this process is undone."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_loss_of_a_test.py").write_text(LOSS)
    (folder / "own_algorithm_of_a_test.py").write_text(ALGORITHM)
    (folder / "own_loop_of_a_test.py").write_text(LOOP)
    (folder / "own_kind_of_a_test.py").write_text(KIND)
    (folder / "own_reward_of_a_test.py").write_text(REWARD)
    (folder / "own_model_of_a_test.py").write_text(MODEL)
    (folder / "own_pipeline_of_a_test.py").write_text(PIPELINE)
    (folder / "json.py").touch()  # as people have them: it must not stand in the way of the real one
    (folder / "my-loss.py").touch()
    with pytest.MonkeyPatch.context() as kept:
        kept.setattr("sys.path", [*sys.path])
        kept.setenv(FOLDERS, os.environ.get(FOLDERS, ""))
        yield folder


@pytest.fixture
def own(place):
    """What names them on the command line."""
    return [
        f"actor.diffusion_loss.loss_mode={place}/own_loss_of_a_test.py:WEIGHED",
        f"trainer.algorithm={place}/own_algorithm_of_a_test.py:Weighing",
        f"rollout.agent.default_agent_loop={place}/own_loop_of_a_test.py:Marked",
        f"rollout.algo.kind={place}/own_kind_of_a_test.py:GENTLE",
        "actor.diffusion_loss.ref_kl_coef=0",
    ]


def test_all_of_them_train(own, place, start, forked_engine, small, metric_rows, tmp_path):
    """Where vLLM-Omni has no wheel, without the pipeline."""
    folder = tmp_path / "run"
    mine = [
        f"reward.name={place}/own_reward_of_a_test.py:Redness",
        "reward.options.gain=2",
        f"model.architecture={place}/own_model_of_a_test.py:Slim",
        "model.lora.merge=true",
        "algorithm.options.floor=2.5",
        "actor.diffusion_loss.options={power: 2}",
        "algorithm.flat_groups=keep",
    ]
    if (sys.platform, platform.machine()) == ("linux", "x86_64"):
        mine.append("rollout.backend=vllm_omni")
    few = ["trainer.total_steps=2", "trainer.val_every=2", "data.val_max_prompts=2", "data.prompts_per_step=2"]
    few.append("actor.ppo_mini_batch_size=8")
    arguments = [*small, *own, *mine, *few, f"trainer.run_dir={folder}"]
    done = start("flowgrpo", *arguments, forked=forked_engine).wait(timeout=290)
    assert done.code == 0, done.err[-4000:]
    assert done.left_over == []
    rows = metric_rows(folder)
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows[1:]:
        assert row["weighing/floor"] == 2.5
        assert row["weighing/turns"] == 7.0
        assert row["actor/importance"] == pytest.approx(2.5 + 3.5)  # eight samples a prompt: 0 … 7
        assert row["reward/gain_mean"] == 2.0
        assert row["sync/tensors_bound"] == 141  # all weights of the tiny policy, the adapter folded in
        # The trainer scores with the person's spec and kind what the engine drew with the person's pipeline and kind.
        assert row["actor/rollout_log_prob_diff_max"] <= 1e-5
        assert row["rollout/failed"] == row["rollout/retried"] == 0
        assert row["actor/grad_norm"] > 0
    resolved = (folder / "config.yaml").read_text()
    assert "own_loss_of_a_test:WEIGHED" in resolved
    assert json.loads((folder / "checkpoints" / "latest.json").read_text()) == {"step": 2}
    # A and B of the query of four blocks.
    assert len(load_file(folder / "lora" / "pytorch_lora_weights.safetensors")) == 8


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["actor.diffusion_loss.options={powr: 2}"], "did you mean 'power'"),
        (["algorithm.options={flor: 2}"], "did you mean 'floor'"),
        (["actor.diffusion_loss.loss_mode=HERE/own_loss_of_a_test.py:NOT_A_SPEC"], "LossSpec"),
        (["actor.diffusion_loss.loss_mode=HERE/own_loss_of_a_test.py:MISSING"], "MISSING"),
        (["actor.diffusion_loss.loss_mode=HERE/nowhere.py:MINE"], "no file"),
        (["actor.diffusion_loss.loss_mode=flow_grop"], "did you mean 'flow_grpo'"),
        (["actor.diffusion_loss.loss_mode=diffusion_nft"], "none of flowgrpo's"),
        (["trainer.algorithm=HERE/own_algorithm_of_a_test.py:Stranger"], "RayDiffusionTrainer"),
        (["rollout.agent.default_agent_loop=HERE/nowhere.py:Loop"], "no file"),
        (["rollout.agent.default_agent_loop=HERE/own_algorithm_of_a_test.py:Stranger"], "DiffusionAgentLoop"),
        (["rollout.agent.default_agent_loop=./here:Loop"], "can be imported"),
        (["rollout.algo.kind=HERE/own_kind_of_a_test.py:NOT_A_KIND"], "SamplerKind"),
        (["rollout.algo.kind=HERE/nowhere.py:KIND"], "no file"),
        (["rollout.val_kwargs.algo.kind=no_such_module:KIND"], "no_such_module"),
        (["rollout.algo.kind=flow_sd"], "did you mean 'flow_sde'"),
        (["rollout.algo.noise_level=1.5"], "must lie in [0, 1]"),
        (["model.architecture=HERE/nowhere.py:Spec"], "no file"),
        (["model.architecture=HERE/own_algorithm_of_a_test.py:Stranger"], "ModelSpec"),
        (["model.architecture=HERE/own_model_of_a_test.py:Slin"], "Slin"),
        (["model.architecture=qwen_imag"], "Did you mean 'qwen_image'"),
        (["model.architecture=HERE/own_model_of_a_test.py:Lost", "rollout.backend=vllm_omni"], "no_pipeline_of_a_test"),
        (["model.architecture=HERE/own_model_of_a_test.py:Diffusers", "rollout.backend=vllm_omni"], "no pipeline in"),
        (["reward.name=HERE/nowhere.py:Redness"], "no file"),
        (["reward.name=HERE/own_reward_of_a_test.py:number"], "give a function (image, prompt)"),
        (["reward.name=HERE/own_reward_of_a_test.py:Redness", "reward.options={gian: 2}"], "Did you mean 'gain'"),
        (["trainer.algorithm=no_such_module:Thing"], "no_such_module"),
        (["trainer.algorithm=thing"], "module:Class"),
        (["trainer.algorithm=HERE/json.py:Thing"], "rename the file"),
        (["trainer.algorithm=HERE/my-loss.py:Thing"], "rename the file"),
    ],
)
def test_what_cannot_be_used_is_one_line_and_nothing_starts(own, place, wrong, words, tmp_path, capsys):
    folder = tmp_path / "run"
    wrong = [one.replace("HERE", str(place)) for one in wrong]
    assert run(APP, [*own, *wrong, f"trainer.run_dir={folder}"]) == 2
    said = capsys.readouterr()
    assert words in said.err
    assert said.err.count("\n") == 1
    assert not folder.exists()


def test_options_belong_to_the_loss_and_the_algorithm_that_they_were_given_with(own, tmp_path, capsys):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        "base: builtin:tiny\n"
        f"actor: {{diffusion_loss: {{loss_mode: '{own[0].partition('=')[2]}', options: {{power: 2}}}}}}\n"
        f"trainer: {{algorithm: '{own[1].partition('=')[2]}'}}\nalgorithm: {{options: {{floor: 1}}}}\n"
    )
    assert run(APP, [f"recipe={recipe}", "--dry-run"]) == 0
    assert "power: 2" in capsys.readouterr().out
    assert (
        run(APP, [f"recipe={recipe}", "actor.diffusion_loss.loss_mode=flow_grpo", "trainer.algorithm=", "--dry-run"])
        == 0
    )
    said = capsys.readouterr().out
    assert "power: 2" not in said
    assert "floor:" not in said
