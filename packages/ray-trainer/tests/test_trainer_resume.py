"""A run goes on by its own config: what may differ, what needs permission, what no permission helps, and how it is shown."""

import json

import numpy as np
import pytest
from ray_trainer import resume
from ray_trainer.checkpoint import publish, step_folder
from ray_trainer.compose import compose
from ray_trainer.errors import TrainerError
from ray_trainer.keys import known_keys
from ray_trainer.prompts import load_prompts
from ray_trainer.run_dir import open_run_dir
from ray_trainer.trainer import RayDiffusionTrainer
from run_report import (
    MetricsWriter,
    comparable,
    load_changes,
    load_validations,
    save_changes,
    save_validation,
    write_report,
)
from run_report.changes import ConfigChange


class Bench:
    """A tiny recipe and a run folder that stopped after step 4."""

    def __init__(self, tmp_path):
        self.folder, self.recipe = tmp_path / "run", tmp_path / "r.yaml"
        self.recipe.write_text("base: builtin:tiny\n")
        self.prompts = tmp_path / "prompts.jsonl"
        self.prompts.write_text('{"prompt": "a red circle"}\n{"prompt": "a blue square"}\n' * 4)
        config = self.config()
        resume.begin(open_run_dir(str(self.folder), "raise"), config, self.inputs(config))
        step_folder(self.folder / "checkpoints", 4).mkdir(parents=True)
        publish(self.folder / "checkpoints", 4, keep=2)

    def config(self, *overrides):
        given = (
            f"trainer.run_dir={self.folder}",
            f"data.train_file={self.prompts}",
            "data.val_file=builtin:tiny_shapes_heldout",
            "trainer.on_existing=resume",
            *overrides,
        )
        return compose("flowgrpo", self.recipe, list(given))

    def inputs(self, config):
        return {key: load_prompts(getattr(config.data, key.split(".")[1])) for key in resume.PROMPT_FILES}

    def check(self, *overrides):
        config = self.config(*overrides)
        return resume.check_resume(config, self.inputs(config))


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


def test_the_same_config_goes_on(bench):
    assert bench.check() == []


@pytest.mark.parametrize(
    "change",
    [
        *(
            "trainer.total_steps=9",
            "trainer.save_every=3",
            "trainer.max_hours=2",
            "trainer.val_every=2",
            "trainer.keep_checkpoints=9",
            "ray.num_cpus=3",
        ),
        *("ray.worker_threads=2", "reward.num_workers=3", "reward.timeout_s=9", "rollout.router.max_retries=1"),
        *(
            "actor.fsdp_config.timeout_s=60",
            "actor.fsdp_config.param_offload=true",
            "model.enable_gradient_checkpointing=true",
        ),
    ],
)
def test_what_decides_no_result_may_always_differ(bench, change):
    assert bench.check(change) == []


@pytest.mark.parametrize(
    ("change", "keys"),
    [
        ("reward.name=sharpness", "reward.name"),
        ("reward.options={strict_weight: 0.25}", "reward.options.strict_weight"),
        ("data.val_file=builtin:tiny_shapes_train", "data.val_file"),
        ("data.val_max_prompts=7", "data.val_max_prompts"),
        ("trainer.seed=5", "actor.data_loader_seed,model.lora_seed,rollout.seed,trainer.seed"),
        ("actor.optim.lr=5e-4", "actor.optim.lr"),
        ("actor.diffusion_loss.loss_mode=dance_grpo", "actor.diffusion_loss.loss_mode"),
        ("rollout.algo.noise_level=0.3", "rollout.algo.noise_level"),
        ("rollout.n=8", "rollout.n"),
        ("trainer.num_workers=2", "trainer.num_workers"),
        ("actor.optim.total_training_steps=77", "actor.optim.total_training_steps"),
        ("model.path=elsewhere", "model.path"),
    ],
)
def test_what_decides_results_needs_permission(bench, change, keys):
    before = bench.folder.joinpath("config.yaml").read_text()
    with pytest.raises(TrainerError, match="was begun by another config") as caught:
        bench.check(change)
    assert f"trainer.allow_config_change=[{keys}]" in str(caught.value)  # the advice works as it stands
    assert "→" in str(caught.value)
    said = bench.check(change, f"trainer.allow_config_change=[{keys}]")
    assert all("from step 4 on" in line for line in said)
    assert len(said) == len(keys.split(","))
    assert bench.folder.joinpath("config.yaml").read_text() == before


def test_a_section_allows_what_lies_in_it_and_an_unknown_key_is_named(bench):
    change = ("reward.name=sharpness", "reward.batch_size=3")
    assert len(bench.check(*change, "trainer.allow_config_change=[reward]")) == 2
    with pytest.raises(TrainerError, match=r"reward.name.*reward.name\]"):
        bench.check(*change, "trainer.allow_config_change=[reward.batch_size]")
    with pytest.raises(TrainerError, match="names 'reward.nam', which is no config key"):
        bench.check("trainer.allow_config_change=[reward.nam]")


@pytest.mark.parametrize(
    "change",
    [
        *("model.lora_rank=8", "model.lora_alpha=8", "model.target_modules=[to_q]", "model.exclude_modules=[to_k]"),
        *("model.policy_state_adapters=[default,old]", "model.transformer_subfolder=transformer"),
    ],
)
def test_other_tensors_are_refused_with_or_without_permission(bench, change):
    for allowed in ("[]", "[model]"):
        with pytest.raises(TrainerError, match="was trained with other tensors") as caught:
            bench.check(change, f"trainer.allow_config_change={allowed}")
        assert "\n" not in str(caught.value)


def test_prompt_files_are_compared_by_what_they_hold(bench, tmp_path):
    moved = tmp_path / "moved.jsonl"
    moved.write_text(bench.prompts.read_text())
    assert bench.check(f"data.train_file={moved}") == []
    bench.prompts.write_text(bench.prompts.read_text().replace("red", "green"))
    with pytest.raises(TrainerError, match=r"data\.train_file: .*whose prompts are others now"):
        bench.check()
    assert len(bench.check("trainer.allow_config_change=[data.train_file]")) == 1


def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one_and_says_so(bench):
    newest = step_folder(bench.folder / "checkpoints", 8)
    newest.mkdir()
    (newest / "w.json").write_text("{}")
    publish(bench.folder / "checkpoints", 8, keep=2)
    assert bench.check() == []
    (newest / "w.json").write_text("")
    (line,) = bench.check()
    assert "step_000008 is damaged (w.json has 0 bytes" in line
    assert bench.check("actor.optim.lr=5e-4", "trainer.allow_config_change=[actor.optim.lr]")[1].startswith(
        "from step 4"
    )


def test_a_run_without_a_checkpoint_starts_over_with_any_config(bench):
    (bench.folder / "checkpoints" / "latest.json").unlink()
    assert bench.check("reward.name=sharpness", "model.lora_rank=8") == []


@pytest.mark.parametrize("text", ["", "<html>", "- a", "app: flowgrpo"])
def test_a_config_that_is_none_any_more_is_said(bench, text):
    (bench.folder / "config.yaml").write_text(text)
    with pytest.raises(TrainerError, match=r"config.yaml is not one that a run wrote.*put it back"):
        bench.check()


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000, "\xff"])
def test_damaged_hashes_of_prompts_are_said(bench, text):
    (bench.folder / "inputs.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(TrainerError, match="inputs.json is damaged.*delete it"):
        bench.check()


@pytest.mark.parametrize("text", ['{"step": 1e999}', '{"step": "x"}', "[" * 100_000])
def test_a_damaged_pointer_is_said(bench, text):
    (bench.folder / "checkpoints" / "latest.json").write_text(text)
    with pytest.raises(TrainerError, match="latest.json is unreadable"):
        bench.check()


def test_an_older_folder_is_read_by_its_defaults(bench):
    """Keys that a version lacked are its defaults; keys that this one lacks decide nothing any more."""
    text = bench.folder.joinpath("config.yaml").read_text()
    old = "".join(
        line + "\n" for line in text.splitlines() if "keep_checkpoints" not in line and "pair_margin" not in line
    )
    bench.folder.joinpath("config.yaml").write_text(old + "gone: {key: 3}\n")
    (bench.folder / "inputs.json").unlink()
    assert bench.check() == []
    with pytest.raises(TrainerError, match="algorithm.pair_margin: 0.0 → 0.5"):
        bench.check("algorithm.pair_margin=0.5")


def test_the_lists_name_keys_that_exist():
    assert {*resume.ALWAYS, *resume.NEVER, *resume.PROMPT_FILES} <= set(known_keys())
    assert not set(resume.ALWAYS) & set(resume.NEVER)


def validation(folder, step, reward, component):
    records = [
        {"prompt": f"p{i}", "uid": f"u{i}", "seed": 0, "reward": reward + i / 10, "components": {component: reward}}
        for i in range(3)
    ]
    save_validation(folder, step, np.full((3, 3, 8, 8), 99, dtype=np.uint8), records)


class Trainer(RayDiffusionTrainer):
    def prepare_update(self, batch, step):
        raise NotImplementedError


def test_numbers_of_two_rewards_are_never_compared(bench):
    trainer = Trainer(bench.config())
    trainer.run = open_run_dir(str(bench.folder), "resume")
    for step, reward in ((0, 0.5), (4, 0.7)):
        validation(bench.folder, step, reward, "strict")
    assert any("0.600" in line and "0.800" in line for line in trainer.summary())
    writer = MetricsWriter(bench.folder)
    for step in (1, 4, 6, 8):
        writer.append(step, {"reward/mean": 0.5, "val/reward_mean": 0.5})
    save_changes(bench.folder, 4, [ConfigChange(4, "reward.name", "shapes", "sharpness")])
    validation(bench.folder, 6, -1.0, "size")
    text = "\n".join(trainer.summary())
    assert "from step 4 on with another reward.name: shapes → sharpness" in text
    assert "are not compared" in text
    assert "0.600" not in text
    validation(bench.folder, 8, -0.5, "size")
    text = "\n".join(trainer.summary())
    assert "step 6 → 8" in text
    page = write_report(bench.folder).read_text()
    assert 'id="changes"' in page
    assert "<code>reward.name</code></th><td>4</td><td>shapes</td><td>sharpness</td>" in page
    assert page.count('class="mark"') == 1  # the reward chart; no other has a curve here
    assert "before <small>step 6</small>" in page


def test_other_changes_leave_validations_comparable(bench):
    for step in (0, 4, 8):
        validation(bench.folder, step, 0.1, "strict")
    found = load_validations(bench.folder)
    assert len(comparable(found, [ConfigChange(4, "actor.optim.lr", 1e-3, 1e-4)])) == 3
    for key in ("reward.options.x", "data.val_file", "data.val_max_prompts", "rollout.val_kwargs.pipeline.height"):
        assert [v.step for v in comparable(found, [ConfigChange(4, key, 1, 2)])] == [8]


def test_changes_after_the_step_that_a_run_goes_on_from_are_forgotten(tmp_path):
    save_changes(tmp_path, 4, [ConfigChange(4, "a", 1, 2)])
    save_changes(tmp_path, 8, [ConfigChange(8, "b", 1, 2)])
    assert [c.step for c in load_changes(tmp_path)] == [4, 8]
    save_changes(tmp_path, 6, [])
    assert [c.step for c in load_changes(tmp_path)] == [4]
    assert json.loads((tmp_path / "changes.jsonl").read_text())["key"] == "a"
    save_changes(tmp_path, 0, [])
    assert not (tmp_path / "changes.jsonl").exists()
