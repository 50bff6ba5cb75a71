"""Every shipped recipe loads and validates; the command line's surface is what the documents say."""

import re
import subprocess
import sys
from pathlib import Path

import dpo_online.cli
import flowgrpo.cli
import pytest
from ray_trainer.cli import parse, run
from ray_trainer.errors import TrainerError
from ray_trainer.validate import validate_config

APPS = [flowgrpo.cli.APP, dpo_online.cli.APP]
# The tiny ones; those with published hyper-parameters are in test_published_recipes.py.
RECIPES = [(app, path.stem) for app in APPS for path in sorted(app.recipes.glob("tiny_*.yaml"))]
IDS = [f"{app.name}-{recipe}" for app, recipe in RECIPES]


@pytest.mark.parametrize(("app", "recipe"), RECIPES, ids=IDS)
def test_a_recipe_validates_and_is_short(app, recipe, tmp_path):
    config, dry_run = parse(app, [f"recipe={recipe}", f"trainer.run_dir={tmp_path / 'run'}", "--dry-run"])
    assert dry_run
    assert validate_config(config)[0].startswith("trains QwenImagePipeline")
    assert not (tmp_path / "run").exists()
    text = (app.recipes / f"{recipe}.yaml").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 40
    assert re.search(r"^# .*(arXiv \d{4}\.\d{5}|public flow_grpo code)", text, re.M), "a comment names the source"


@pytest.mark.parametrize(("app", "recipe"), RECIPES, ids=IDS)
def test_a_recipe_dry_runs(app, recipe, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(app, [f"recipe={recipe}", "--dry-run"]) == 0
    assert "# trains QwenImagePipeline" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("app", APPS, ids=[a.name for a in APPS])
def test_help_names_every_recipe(app, capsys):
    assert run(app, ["--help"]) == 0
    text = capsys.readouterr().out
    assert all(path.stem in text for path in app.recipes.glob("*.yaml"))
    assert "trainer.on_existing=resume" in text


def test_dry_run_prints_a_config_that_is_itself_a_recipe(tmp_path, capsys):
    assert run(APPS[0], ["--dry-run", f"trainer.run_dir={tmp_path / 'run'}", "actor.optim.lr=5e-4"]) == 0
    text = capsys.readouterr().out
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(text)
    config, _ = parse(APPS[0], [f"recipe={recipe}"])
    assert config.actor.optim.lr == 5e-4
    assert config.actor.diffusion_loss.ref_kl_coef == 0.5
    assert config.recipe == "mine"


BAD = {
    "typo": (["actor.optim.lrr=1"], "did you mean 'actor.optim.lr'"),
    "wrong section": (["trainer.lora_rank=4"], "did you mean 'model.lora_rank'"),
    "wrong type": (["rollout.n=many"], "rollout.n"),
    "value outside its range": (["rollout.backend=mystery"], "rollout.backend"),
    "flag": (["--fast"], "is not understood"),
    "recipe": (["recipe=nothing"], "there is no recipe 'nothing'; known are"),
    "model folder": (["model.path=/nowhere/at/all"], "holds no diffusers pipeline"),
    "group of one": (["rollout.n=1"], "give at least 2"),
    "prompt file": (["data.train_file=/nowhere.jsonl"], "there is no prompt file"),
    "run folder": (["trainer.run_dir=/proc/run"], "cannot write into"),
    "negative steps": (["trainer.total_steps=0"], "trainer.total_steps=0 is out of range: it must be 1 to 1000000000"),
    "too many prompts": (["data.prompts_per_step=97"], "must lie between 1 and 96, as many prompts"),
    "reward": (["reward.name=shape"], "shapes"),
    "reward option": (["reward.options={strict_wait: 1}"], "strict_weight"),
    "loss of another program": (["actor.diffusion_loss.loss_mode=dpo"], "none of flowgrpo's"),
    "unknown loss": (["actor.diffusion_loss.loss_mode=flow_gpro"], "flow_grpo"),
    "policy state": (["rollout.rollout_adapter=old"], "add it to model.policy_state_adapters"),
    "model on the hub": (
        ["model.path=nobody/no-model"],
        "set model.architecture (flux, qwen_image, sd3, wan, z_image)",
    ),
    "architecture": (
        ["model.architecture=flux"],
        "means FluxPipeline, but model.path='builtin:tiny_qwen_image' is a Qwen",
    ),
    "unknown architecture": (["model.architecture=qwen_imag"], "Did you mean 'qwen_image'?"),
    "no noise to train on": (["rollout.algo.kind=ode"], "draws no noise"),
    "window outside the run": (["rollout.pipeline.num_inference_steps=1"], "sde_window_range=[0, 2] leaves"),
    "empty window": (["rollout.algo.sde_window_size=0"], "must be 1 to 2"),
    "samples of another policy": (["rollout.rollout_adapter=reference"], "ratios need samples of the trained policy"),
    "no epochs": (["actor.ppo_epochs=0"], "actor.ppo_epochs=0 is out of range: it must be 1 to 10000"),
    "full weights in bf16": (["model.lora_rank=0", "actor.fsdp_config.model_dtype=bf16"], "use model_dtype=fp32"),
    "filled in": (["actor.model_config.path=x"], "is filled in from 'model'; set that one"),
}


@pytest.mark.parametrize(("arguments", "complaint"), BAD.values(), ids=list(BAD))
def test_bad_input_is_one_clear_line_and_exit_code_2(arguments, complaint, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(APPS[0], arguments) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []  # nothing half-written


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["recipe=tiny_nft", "rollout.rollout_adapter=default"], "compares with the policy state old"),
        (["recipe=tiny_awm", "actor.ppo_mini_batch_size=24"], "set model.policy_state_adapters=[default,old]"),
        (["recipe=tiny_dpo", "actor.ppo_micro_batch_size_per_gpu=5"], "must be even"),
        (
            ["recipe=tiny_dpo", "algorithm.pair_mode=worst"],
            "must be one of best_worst, all; did you mean 'best_worst'?",
        ),
    ],
)
def test_contradictions_of_a_forward_process_are_named(arguments, complaint, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(APPS[1], arguments) == 2
    assert complaint in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_broken_prompt_line_is_named(tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "ok"}\n{"prompt": }\n')
    assert run(APPS[0], [f"data.train_file={prompts}"]) == 2
    assert "line 2 is not JSON" in capsys.readouterr().err


def test_a_prompt_without_a_target_for_its_reward_is_named(tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "two red circles on a white background"}\n{"prompt": "a cat"}\n' * 3)
    assert run(APPS[0], [f"data.train_file={prompts}", "data.val_file=builtin:tiny_shapes_heldout"]) == 2
    error = capsys.readouterr().err
    assert "prompts.jsonl, line 2" in error
    assert error.count("\n") == 1


def test_a_prompt_that_the_encoder_does_not_take_is_named(tmp_path, capsys):
    prompts, long = tmp_path / "prompts.csv", "one red circle on a white background " * 9
    prompts.write_text(f"prompt,negative_prompt\n{long[:37]},\n{long},\n" + f"{long[:37]},\n" * 5)
    arguments = [
        f"data.train_file={prompts}",
        "data.val_file=builtin:tiny_shapes_heldout",
        "rollout.pipeline.max_sequence_length=40",
        "--dry-run",
    ]
    assert run(APPS[0], arguments) == 2
    error = capsys.readouterr().err
    assert "prompts.csv, line 3: The prompt 'one red circle" in error
    assert "max_sequence_length is 40" in error
    assert run(APPS[0], [*arguments, "rollout.pipeline.max_sequence_length=512"]) == 0
    prompts.write_text(f"prompt,negative_prompt\n{long[:37]},{long}\n" + f"{long[:37]},\n" * 5)
    assert run(APPS[0], arguments) == 2
    assert "prompts.csv, line 2, negative prompt: The prompt" in capsys.readouterr().err


def test_parse_refuses_what_it_cannot_read(tmp_path):
    recipe = tmp_path / "list.yaml"
    recipe.write_text("- 1\n- 2\n")
    with pytest.raises(TrainerError, match="not a mapping"):
        parse(APPS[0], [f"recipe={recipe}"])


def test_validation_needs_no_heavy_imports():
    code = (
        "import sys, flowgrpo.cli as c; code = c.main(['--dry-run']) + c.main(['--dry-run', 'recipe=sd35_pickscore']); "
        "heavy = {'torch', 'diffusers', 'transformers', 'ray'} & set(sys.modules); "
        "assert code == 0; assert not heavy, heavy"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parent, timeout=60
    )
    assert done.returncode == 0, done.stderr[-2000:]
