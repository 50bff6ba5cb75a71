"""Several rewards and several prompt sources: how a config says them, what a step draws, and what becomes of scores."""

import asyncio
import math
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from image_rewards import RewardResult
from omni_rollout.samples import column
from ray_trainer import scoring
from ray_trainer.compose import compose
from ray_trainer.config import DataConfig, PromptSource, to_yaml
from ray_trainer.errors import TrainerError
from ray_trainer.prompts import PromptSampler, load_prompt_sets
from ray_trainer.validate import validate_config
from tensordict import TensorDict

TWO = """
base: builtin:tiny
reward:
  num_workers: 2
  several:
    right: {name: shapes}
    small: {name: jpeg_compressibility, weight: 0.5, num_workers: 1, options: {quality: 80}}
data:
  prompts_per_step: 6
  sources:
    scenes: {train_file: builtin:tiny_shapes_train, val_file: builtin:tiny_shapes_heldout, share: 2}
    free: {train_file: builtin:creative_train, val_file: builtin:creative_heldout, rewards: [small]}
"""


@pytest.fixture
def make(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def make(*given, text=TWO):
        (tmp_path / "r.yaml").write_text(text)
        return compose("flowgrpo", tmp_path / "r.yaml", list(given))

    return make


def test_a_reward_takes_from_the_section_what_it_does_not_say_and_the_config_reads_itself_back(make, tmp_path):
    config = make("reward.several.right.options.strict_weight=0.25")
    assert (config.reward.name, config.data.train_file, config.data.val_file) == ("", "", "")
    right, small = config.reward.each.values()
    assert (right.num_workers, small.num_workers, right.weight, small.weight) == (2, 1, 1.0, 0.5)
    assert (right.options, small.options) == ({"strict_weight": 0.25}, {"quality": 80})
    again = make(text=to_yaml(config))
    assert (again.reward, again.data) == (config.reward, config.data)
    # another reward under the same name does not get the options of the first one
    assert make("reward.several.small.name=sharpness").reward.several["small"].options == {}
    # and one of the old kind puts the several away, on either side
    one = make("reward.name=sharpness", "data.train_file=builtin:tiny_shapes_train")
    assert (one.reward.several, one.data.sources, list(one.reward.each)) == ({}, {}, [""])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("reward.several.right.weigt=2", "unknown config key 'reward.several.right.weigt'"),
        ("reward.several.right.num_workers=0", "reward.several.right.num_workers=0 is out of range"),
        ("reward.several.Right.name=ocr", "small letters"),
        ("reward.several.third.weight=1", "reward.several.third has no name"),
        ("data.sources.free.rewards=[smal]", "names 'smal', and reward.several has right, small"),
        ("data.sources.scenes.rewards=[small]", "reward.several.right scores no source"),
        ("data.sources.free.share=0.01", "data.sources.free.share=0.01 of data.prompts_per_step=6 prompts is none"),
        ("data.sources.free.rewards=[right]", "reward.several.right 'shapes'.*creative_train.jsonl, line 1"),
        ("reward.several.small.weight=0", "have weight 0"),
        ("reward.combine=gdpo|algorithm.advantage_std=none", "gdpo divides by standard deviations"),
        (
            "reward.combine=gdpo|algorithm.advantage_std=batch",
            "compares samples that a reward scores with those of other",
        ),
        ("reward.several.small_count.name=ocr", "may also be the name of a part of 'small'"),
        ("reward.several.source_a.name=ocr", "may also be the name of a part of 'source'"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(make, given, said):
    with pytest.raises(TrainerError, match=said):
        validate_config(make(*given.split("|")))


def test_one_layer_with_both_forms_is_refused(make):
    with pytest.raises(TrainerError, match=r"reward.several and reward.name are two ways"):
        make("reward.name=ocr", "reward.several.a.name=ocr")


def test_every_step_has_each_sources_share_and_depends_on_seed_and_step_alone(make):
    data = make().data
    train, held_out = load_prompt_sets(data)
    assert len({p.uid for p in train}) == len(train)
    assert [p.source for p in held_out[:4]] == ["scenes", "free"] * 2  # by turns, so that a cut leaves some of each
    sampler, again = PromptSampler(train, data, 3), PromptSampler(train, data, 3)
    drawn = [sampler.at(step) for step in range(24)]
    assert all(Counter(p.source for p in prompts) == {"scenes": 4, "free": 2} for prompts in drawn)
    assert drawn[17] == again.at(17)  # no state: what a resumed run asks for
    scenes = [p.uid for prompts in drawn for p in prompts if p.source == "scenes"]
    assert len(set(scenes)) == 96 == len(scenes)  # each once in its own epoch of 24 steps
    alone = PromptSampler(load_prompt_sets(DataConfig())[0], DataConfig(), 3)
    assert {p.source for p in alone.at(0)} == {""}


def test_shares_are_rounded_by_the_largest_remainder():
    data = DataConfig(
        prompts_per_step=7, sources={n: PromptSource(share=s) for n, s in {"a": 3, "b": 2, "c": 1}.items()}
    )
    from ray_trainer.prompts import counts

    assert counts(data) == {"a": 4, "b": 2, "c": 1}  # 3.5, 2.33, 1.17


class Pool:
    """A reward pool that scores by a sample's number."""

    def __init__(self, name, options, **given):
        self.name, self.given, self.slept = name, given, 0

    async def score_all(self, samples):
        made = {
            "shapes": lambda i: RewardResult(i / 10, {"count": 1.0}),
            "jpeg_compressibility": lambda i: RewardResult(-i),
        }
        return [made[self.name](one.index) if one.index < 9 else RewardResult.failed("E: bad") for one in samples]

    async def sleep(self):
        self.slept += 1

    def shutdown(self):
        pass


def score(config, monkeypatch):
    monkeypatch.setattr(scoring, "RewardLoopManager", Pool)
    return scoring.Scoring(config, {})


def test_a_deadline_and_a_batch_follow_the_frames_of_the_longest_video(make, monkeypatch):
    given = [
        "reward.several.right={batch_size: 16, timeout_s: 10, frame_timeout_s: 0.5}",
        "reward.several.small.batch_size=4",
    ]
    frames = ["rollout.pipeline.num_frames=5", "rollout.val_kwargs.pipeline.num_frames=7"]

    def limits(*keys):
        pools = score(make(*given, *keys), monkeypatch).pools.values()
        return [(pool.given["timeout_s"], pool.given["batch_size"]) for pool in pools]

    assert limits(*frames) == [(13.5, 2), (120.0, 1)]
    assert limits() == [(10.5, 16), (120.0, 4)]


def test_those_that_share_the_trainers_cards_are_put_to_sleep_and_no_other(make, monkeypatch):
    monkeypatch.setattr(scoring, "RewardLoopManager", Pool)
    config = make("reward.several.right={num_workers: 2, num_gpus: 0.5, share_trainers_gpus: true}")
    made = scoring.Scoring(config, {}, [("node", "3")])
    assert made.pools["right"].given["beside"] == [("node", "3")] * 2
    asyncio.run(made.leave_gpu())
    assert {name: pool.slept for name, pool in made.pools.items()} == {"right": 1, "small": 0}


def ask(made, uids, indices):
    requests = [
        SimpleNamespace(uid=uid, index=index, prompt="", metadata={}) for uid, index in zip(uids, indices, strict=True)
    ]
    return asyncio.run(made.score(requests, [None] * len(requests)))


def test_scores_are_summed_by_weight_and_kept_apart_and_a_source_has_its_own(make, monkeypatch):
    made = score(make(), monkeypatch)
    both, alone, bad = ask(made, ["step1/scenes-line2", "step1/free-line7", "val/scenes-line1"], [4, 4, 9])
    total, parts, error = both
    assert total == pytest.approx(0.4 - 0.5 * 4)
    assert parts == {"right": 0.4, "small": -4.0, "right_count": 1.0, "source_scenes": total}
    assert error is None
    assert alone == (-2.0, {"small": -4.0, "source_free": -2.0}, None)
    assert math.isnan(bad[0])
    assert bad[2] == "right: E: bad"


def test_a_reward_that_only_watches_takes_no_sample_away(make, monkeypatch):
    made = score(make("reward.several.right.weight=0"), monkeypatch)
    monkeypatch.setattr(made.pools["right"], "name", "jpeg_compressibility")
    monkeypatch.setattr(made.pools["small"], "score_all", lambda samples: every_one(samples))
    ((total, parts, error),) = ask(made, ["step1/scenes-line2"], [9])
    assert (total, parts["small"], error) == (-0.5, -1.0, "right: E: bad")


async def every_one(samples):
    return [RewardResult(-1.0) for _ in samples]


def test_gdpo_hears_a_small_reward_beside_a_large_one_and_the_sum_does_not(make):
    text = TWO.replace("free: {", "free: {share: 1, ").replace(", rewards: [small]", "")
    generator = torch.Generator().manual_seed(0)
    small, large = torch.rand(64, generator=generator), 1000 * torch.rand(64, generator=generator)
    batch = TensorDict({"rm_scores": (small + large)[:, None]}, batch_size=[64])
    batch["uid"] = column([f"step0/scenes-line{i // 16}" for i in range(64)])
    batch["reward_components"] = column(
        [{"right": float(s), "small": float(b)} for s, b in zip(small, large, strict=True)]
    )

    def likeness(combine, values):
        config = make(f"reward.combine={combine}", "reward.several.small.weight=1", text=text)
        return float(
            torch.corrcoef(torch.stack([scoring.advantages(config, batch).advantages.double(), values.double()]))[0, 1]
        )

    assert likeness("weighted_sum", small) < 0.2
    assert likeness("gdpo", small) > 0.5
    assert likeness("gdpo", large) > 0.5


def test_a_reward_that_a_source_does_not_use_says_nothing_there(make):
    batch = TensorDict({"rm_scores": torch.tensor([1.0, 2.0, 3.0, 9.0])[:, None]}, batch_size=[4])
    batch["uid"] = column(["step0/free-line1"] * 2 + ["step0/scenes-line1"] * 2)
    batch["reward_components"] = column(
        [{"small": 2.0}, {"small": 4.0}, {"right": 5.0, "small": 1.0}, {"right": 1.0, "small": 1.0}]
    )
    result = scoring.advantages(make("reward.combine=gdpo"), batch)
    assert bool(result.mask.all())
    assert result.advantages[0] == -result.advantages[1] < 0
    assert result.advantages[2] == -result.advantages[3] > 0
    assert result.metrics["advantages/small_equal_groups"] == 1
