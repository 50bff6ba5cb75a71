"""What people get wrong, and what they are told: the value, the cause and what to do, in one line, before anything is started."""

import json

import pytest
from flowgrpo.cli import APP
from ray_trainer.cli import run

TARGET = {"count": 1, "color": "red", "shape": "circle", "background": "white"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mistakes")
    for name, text in {
        "empty.jsonl": "",
        "bad.jsonl": '{"prompt": "a"}\n{"prompt": \n',
        "one.jsonl": '{"prompt": "a cat"}\n',
        "two.jsonl": '{"prompt": "a cat"}\n{"prompt": "a dog"}\n',
        "list.yaml": "- a\n",
        "wrong.yaml": "actor: {lr: 1}\n",
        "open.yaml": "a: [1\n",
        "html.safetensors": "<html>",
        "rewards.py": "class Red: pass\n",
        "other/notes.txt": "mine",
        "unnamed/model_index.json": "{}",
        "sdxl/model_index.json": '{"_class_name": "StableDiffusionXLPipeline"}',
        "long.jsonl": "".join(
            json.dumps({"prompt": f"{'word ' * n}", "metadata": TARGET}) + "\n" for n in (3000, 1, 2)
        ),
        "nothing/read.me": "",
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder / "latin.txt").write_bytes(b"caf\xe9\n")
    return folder


def written(folder):
    """Files with their times; Python's own copies of imported files are left out."""
    return {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file() and p.suffix != ".pyc"}


# Arguments, FOLDER for the place of the files above; then what the line must hold: value or key, cause, remedy.
MISTAKES = [
    ("docter", "'docter' is no command", "did you mean 'doctor'"),
    ("total_steps", "'total_steps' is no command", "config keys are key=value"),
    ("--foo", "'--foo' is not understood", "give key=value"),
    ("=3", "'=3' is not understood", "give key=value"),
    ("recipe=nope", "no recipe 'nope'", "known are"),
    ("recipe=Tiny-GRPO-Gard", "no recipe 'Tiny-GRPO-Gard'", "did you mean 'tiny_grpo_guard'"),
    ("reward.name=OCR", "no reward is named 'OCR'", "Did you mean 'ocr'"),
    ("recipe=FOLDER/none.yaml", "none.yaml'", "give the path of a .yaml file"),
    ("recipe=FOLDER/list.yaml", "list.yaml' is not a mapping", "--help"),
    ("recipe=FOLDER/wrong.yaml", "'actor.lr' in recipe wrong.yaml", "did you mean 'actor.optim.lr'"),
    ("recipe=FOLDER/open.yaml", "open.yaml is no YAML", "line 2"),
    ("trainer.total_step=3", "'trainer.total_step'", "did you mean 'trainer.total_steps'"),
    ("lr=1e-3", "'lr'", "did you mean 'actor.optim.lr'"),
    ("learning_rate=1", "'learning_rate'", "did you mean 'actor.optim.lr'"),
    ("output_dir=x", "'output_dir'", "did you mean 'trainer.run_dir'"),
    ("train.num_generations=4", "'train.num_generations'", "did you mean 'rollout.n'"),
    ("trainer=3", "'trainer'", "is a section, but '3' was given; set its keys, such as trainer.algorithm"),
    ("trainer.total_steps=abc", "'abc'", "must be a whole number"),
    ("trainer.total_steps=1.5", "'1.5'", "must be a whole number"),
    ("trainer.total_steps=", "''", "must be a whole number"),
    ("trainer.total_steps=0", "trainer.total_steps=0", "must be 1 to"),
    ("trainer.total_steps=-5", "trainer.total_steps=-5", "must be 1 to"),
    ("trainer.val_before_train=maybe", "'maybe'", "must be true or false"),
    ("trainer.seed=18446744073709551616", "18446744073709551616", "must be 0 to"),
    ("trainer.on_existing=overwrite", "'overwrite'", "one of raise, resume, delete"),
    ("trainer.num_workers=0", "trainer.num_workers=0", "must be 1 to"),
    ("trainer.algorithm=nope", "trainer.algorithm='nope'", "give module:Class"),
    ("trainer.algorithm=./none.py:X", "'./none.py:X'", "there is no file"),
    ("trainer.run_dir=s3://bucket/x", "'s3://bucket/x'", "mount the store"),
    ("trainer.run_dir=FOLDER/other", "other' exists", "choose another trainer.run_dir"),
    ("trainer.on_existing=resume", "without it every run has a new folder", "needs trainer.run_dir=FOLDER"),
    ("trainer.run_dir=FOLDER/other trainer.on_existing=delete", "no config.yaml", "choose another trainer.run_dir"),
    ("trainer.allow_config_change=[nope]", "'nope'", "--dry-run"),
    ("actor.optim.lr=nan", "lr=nan", "must be 0 to 1"),
    ("actor.optim.lr=-1", "lr=-1", "must be 0 to 1"),
    ("actor.optim.lr=2", "lr=2", "must be 0 to 1"),
    ("actor.optim.betas=[0.9]", "betas=[0.9]", "must be a list of 2 numbers"),
    ("actor.optim.betas=[0.9,1.5]", "betas=[0.9, 1.5]", "0 to below 1"),
    ("actor.optim.lr=${nope.key}", "${nope.key}", "write the value itself"),
    ("actor.model_config.path=x", "'actor.model_config'", "filled in from 'model'"),
    ("actor.fsdp_config.model_dtype=int8", "'int8'", "one of fp32"),
    ("actor.fsdp_config.ulysses_sequence_parallel_size=5", "size=5", "use a divisor"),
    ("actor.diffusion_loss.loss_mode=grpo", "actor.diffusion_loss.loss_mode='grpo'", "did you mean 'gspo'"),
    ("actor.diffusion_loss.loss_mode=dpo", "'dpo' is a forward_process loss", "flow_grpo"),
    ("actor.diffusion_loss.clip_ratio=0", "clip_ratio=0", "must be above 0"),
    ("actor.diffusion_loss.ref_kl_coef=-1", "ref_kl_coef=-1", "must be 0 to"),
    ("rollout.backend=vllm", "'vllm'", "did you mean 'vllm_omni'"),
    ("rollout.dtype=fp4", "'fp4'", "one of float32, bfloat16"),
    ("rollout.n=0", "rollout.n=0", "must be 1 to"),
    ("rollout.n=1", "rollout.n=1", "give at least 2"),
    ("rollout.algo.kind=sde", "rollout.algo.kind='sde'", "use one of flow_sde"),
    ("rollout.algo.kind=nomodule:X", "rollout.algo.kind='nomodule:X'", "No module named 'nomodule'"),
    ("rollout.algo.noise_level=-1", "noise_level=-1", "must be 0 to 100"),
    ("rollout.algo.sde_window_size=99", "rollout.algo.sde_window_size=99", "must be at most"),
    ("rollout.algo.sde_window_range=[3,3]", "rollout.algo.sde_window_range=[3, 3]", "first < end"),
    ("rollout.pipeline.height=65", "rollout.pipeline.height=65", "multiple of 16 for this model, such as 64"),
    ("rollout.pipeline.height=0", "height=0", "must be 1 to"),
    ("rollout.pipeline.num_inference_steps=0", "num_inference_steps=0", "must be 1 to"),
    ("rollout.val_kwargs.pipeline.width=33", "val_kwargs.pipeline.width=33", "such as 32"),
    ("data.prompts_per_step=1000", "prompts_per_step=1000", "between 1 and 96, as many prompts"),
    ("data.train_file=/nowhere.jsonl", "no prompt file '/nowhere.jsonl'", "give a file"),
    ("data.train_file=builtin:nope", "no built-in 'nope'", "known are"),
    ("data.train_file=FOLDER/empty.jsonl", "empty.jsonl' holds no prompt", "write one a line"),
    ("data.train_file=FOLDER/bad.jsonl", "bad.jsonl, line 2 is not JSON", "column 11"),
    ("data.train_file=FOLDER/latin.txt", "latin.txt, line 1, byte 3", "save the file as UTF-8"),
    ("data.train_file=FOLDER/one.jsonl", "one.jsonl' holds one text", "give data.val_file=FILE"),
    ("data.train_file=FOLDER/one.jsonl", "needs 6 prompts or more", "and data.prompts_per_step=1"),
    ("data.train_file=FOLDER/two.jsonl", "prompts_per_step=6", "between 1 and 1, as many prompts"),
    ("data.train_file=FOLDER/nothing", "nothing' holds no prompt file", ".jsonl"),
    (
        "data.train_file=FOLDER/long.jsonl data.val_file=FOLDER/long.jsonl data.prompts_per_step=1",
        "long.jsonl, line 1",
        "tokens",
    ),
    ("reward.name=nope", "no reward is named 'nope'", "Known:"),
    ("reward.name=shape", "'shape'", "Did you mean 'shapes'"),
    ("reward.name=ocr", "144 prompts have no usable target", "Give metadata text="),
    ("reward.name=pickscore", "'pickscore' needs the option 'path'", "set reward.options.path=VALUE"),
    ("reward.name=http", "'http' needs the option 'url'", "set reward.options.url=VALUE"),
    ("reward.name=nomodule:X", "'nomodule:X'", "No module named 'nomodule'"),
    ("reward.name=FOLDER/rewards.py:Nothing", "has no 'Nothing'", "rewards"),
    ("reward.name=FOLDER/none.py:A", "none.py:A'", "there is no file"),
    ("reward.options={foo:.1}", "no option 'foo:.1'", "Options: strict_weight"),
    ("reward.options=[1", "reward.options=[1", "is no YAML"),
    ("reward.policy=ignore", "'ignore'", "one of required, skip, value"),
    ("reward.timeout_s=0", "timeout_s=0", "must be above 0"),
    ("model.path=/nowhere", "model.path='/nowhere'", "give the folder that"),
    ("model.path=some/where", "'some/where' is neither a folder nor", "set model.architecture"),
    ("model.path=builtin:nope", "no built-in 'nope'", "tiny_qwen_image"),
    ("model.path=FOLDER/unnamed", "names no _class_name", "save it again"),
    ("model.path=FOLDER/sdxl", "StableDiffusionXLPipeline", "known are FluxPipeline"),
    ("model.architecture=flux", "model.architecture='flux' means FluxPipeline", "change one of them"),
    ("model.architecture=nope", "'nope'", "Known: flux"),
    ("model.lora_rank=-1", "lora_rank=-1", "must be 0 to"),
    ("model.target_modules=[to_x]", "'to_x' matches no linear layer", "names like it"),
    ("model.exclude_modules=.*", "exclude_modules='.*'", "exclude less"),
    ("model.transformer_subfolder=transformer_9", "'transformer_9'", "none of transformer"),
    ("model.lora_adapter_path=/nowhere", "lora_adapter_path='/nowhere'", "give the file or folder of a LoRA"),
    ("model.lora_adapter_path=FOLDER/html.safetensors", "html.safetensors", "copy it again"),
    ("ray.address=nonsense", "ray.address='nonsense'", "give HOST:PORT"),
    ("ray.object_store_mb=10", "object_store_mb=10", "must be 75 to"),
    ("ray.object_store_mb=900000000", "object_store_mb=900000000", "the memory of this machine"),
    ("plan gpu=Potato", "gpu='Potato'", "take one of H100"),
    ("report", "not nothing", "give one run folder"),
    ("report /nowhere", "'/nowhere' is no folder of a run", "give the run's trainer.run_dir"),
    ("export runs/mine --to x", "invalid choice: 'x'", "such as: flowgrpo export"),
    ("compare base", "got 1", "give run folders"),
]


@pytest.mark.parametrize(("arguments", "value", "remedy"), MISTAKES, ids=[mistake[0] for mistake in MISTAKES])
def test_a_mistake_is_one_line_that_says_what_to_do(place, capsys, monkeypatch, arguments, value, remedy):
    monkeypatch.chdir(place)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    given = arguments.replace("FOLDER", str(place)).split(" ")
    command = given[0] in ("plan", "report", "export", "compare")
    before = written(place)
    assert run(APP, given if command else [*given, "--dry-run"]) == 2
    said = capsys.readouterr()
    assert value in said.err
    assert remedy in said.err
    assert said.err.startswith("flowgrpo: error: ")
    assert len(said.err.splitlines()) == 1
    assert said.out == ""
    assert written(place) == before


def test_there_are_as_many_as_promised():
    assert len({mistake[0] for mistake in MISTAKES}) >= 60


def test_debug_shows_where_a_mistake_was_found(capsys):
    assert run(APP, ["trainer.total_steps=0", "--debug"]) == 2
    said = capsys.readouterr().err
    assert "Traceback (most recent call last)" in said
    assert said.splitlines()[-1].startswith("flowgrpo: error: trainer.total_steps=0")
