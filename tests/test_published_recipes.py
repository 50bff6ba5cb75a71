"""The recipes with published hyper-parameters: they load, validate and dry-run without the model, and say what they should."""

import importlib.util
import re
from pathlib import Path

import dpo_online.cli
import flowgrpo.cli
import huggingface_hub
import pytest
import yaml
from huggingface_hub import constants
from omegaconf import OmegaConf
from ray_trainer.assets import resolve
from ray_trainer.cli import parse, run
from ray_trainer.errors import TrainerError
from ray_trainer.validate import validate_config

APPS = [flowgrpo.cli.APP, dpo_online.cli.APP]
RECIPES = [
    (a, p.stem)
    for a in APPS
    for p in sorted(a.recipes.glob("*.yaml"))
    if not p.stem.startswith(("tiny_", "full_size", "offline_dpo", "sft"))
]
IDS = [f"{app.name}-{recipe}" for app, recipe in RECIPES]
# vLLM-Omni is an extra; its recipes are checked with the other backend where it is not installed.
NO_ENGINE = [] if importlib.util.find_spec("vllm_omni") else ["rollout.backend=diffusers", "rollout.num_replicas=1"]

TABLE = yaml.safe_load((Path(__file__).parent / "published_values.yaml").read_text(encoding="utf-8"))
DEVIATIONS, MISSING = TABLE["deviations"], TABLE["not_here_yet"]
# Every key of these that a recipe or its bases set decides training or sampling, so the table has to know it.
DECIDES = re.compile(
    r"model\.(lora_rank|lora_alpha|lora_init_weights|target_modules|policy_state_adapters)$|actor\.(optim|diffusion_loss|forward_process)\.|"
    r"actor\.(ppo_mini_batch_size|ppo_epochs|fsdp_config\.(model_dtype|ema_\w+))$|rollout\.(n|dtype|rollout_adapter)$|data\.prompts_per_step$|"
    r"rollout\.(val_kwargs\.)?pipeline\.|rollout\.algo\.(?!sde_window_seed)|algorithm\.|trainer\.(total_steps|val_weights)$"
)
OF_A_LORA = {"model.lora_alpha", "model.lora_init_weights", "model.target_modules"}


def published(recipe):
    """key -> (value, sources) of a recipe; two files of the sources may say the same, but not two things."""
    found = {}
    for source, values in TABLE["published"][recipe].items():
        for key, value in values.items():
            before = found.setdefault(key, (value, []))
            assert before[0] == value, (key, before, source)
            found[key] = (value, [*before[1], source])
    return found


def lineage(app, recipe):
    """A recipe's file and those it is based on, nearest first."""
    files, name = (
        [app.recipes / f"{recipe}.yaml"],
        yaml.safe_load((app.recipes / f"{recipe}.yaml").read_text()).get("base"),
    )
    while name:
        files.append(files[-1].parent / resolve("recipes", name))
        name = yaml.safe_load(files[-1].read_text(encoding="utf-8")).get("base")
    return files


def leaves(node, prefix=""):
    for key, value in node.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key


def comment_of(files):
    lines = [line.strip() for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    return " ".join(line.removeprefix("#").strip() for line in lines if line.startswith("#"))


TINY = {"qwen_image": "qwen_image_ocr", "sd35": "sd35_geneval", "flux": "flux_mix_grpo", "z_image": "z_image_ocr"}
TINY["wan_5b"] = "wan22_video"


@pytest.fixture(autouse=True)
def bare_machine(tmp_path, monkeypatch):
    """No model on disk, and no way to get one."""

    def refuse(*args, **kwargs):
        raise AssertionError("validation must not download")

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    monkeypatch.chdir(tmp_path)


def test_the_table_knows_every_published_recipe_and_no_other():
    names = sorted(recipe for _, recipe in RECIPES)
    assert sorted(TABLE["published"]) == names
    assert set(DEVIATIONS) - {"blocks"} == set(names)
    assert set(MISSING) - {"blocks"} <= set(names)


@pytest.mark.parametrize(("app", "recipe"), RECIPES, ids=IDS)
def test_it_dry_runs_without_the_model(app, recipe, tmp_path, capsys):
    assert run(app, [f"recipe={recipe}", "--dry-run", *NO_ENGINE]) == 0
    captured = capsys.readouterr()
    config = OmegaConf.create(captured.out)
    assert "is not on this machine; it will be downloaded when training starts" in captured.out
    assert config.model.architecture in ("qwen_image", "sd3", "flux", "z_image", "wan")
    assert config.model.enable_gradient_checkpointing
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("app", "recipe"), RECIPES, ids=IDS)
def test_its_values_are_the_published_ones_or_said_to_be_ours(app, recipe):
    config = parse(app, [f"recipe={recipe}"])[0]
    comment, deviations = comment_of(lineage(app, recipe)), dict(DEVIATIONS[recipe] or {})
    for key, (value, sources) in published(recipe).items():
        here = value_of(config, key)
        if key not in deviations:
            assert here == value, f"{key}={here!r}, but {sources} have {value!r}"
            continue
        assert here != value, f"{key} is no deviation: {sources} have {value!r} as well"
    for key, deviation in deviations.items():
        assert value_of(config, key) == deviation["ours"], key
        assert deviation["because"] in comment, f"{key}: the comment does not say {deviation['because']!r}"
    for words in MISSING.get(recipe, []):
        assert words in comment


@pytest.mark.parametrize(("app", "recipe"), RECIPES, ids=IDS)
def test_the_table_has_every_value_that_the_recipe_sets(app, recipe):
    known = set(published(recipe)) | set(DEVIATIONS[recipe] or {})
    set_here = {k for file in lineage(app, recipe) for k in leaves(yaml.safe_load(file.read_text(encoding="utf-8")))}
    if parse(app, [f"recipe={recipe}"])[0].model.lora_rank == 0:
        known |= OF_A_LORA  # of its base, and read by nobody
    assert sorted(key for key in set_here if DECIDES.match(key) and key not in known) == []


def value_of(config, key):
    """A leaf of the resolved config."""
    for name in key.split("."):
        config = getattr(config, name)
    return config


@pytest.mark.parametrize(("app", "recipe"), RECIPES, ids=IDS)
def test_it_names_its_sources_and_what_is_ours(app, recipe):
    lines = (app.recipes / f"{recipe}.yaml").read_text(encoding="utf-8").splitlines()
    comment = comment_of([app.recipes / f"{recipe}.yaml"])
    assert re.search(r"Source: .*arXiv \d{4}\.\d{5}", comment)
    assert re.search(r"Published \(\S+/\S+ \S.*@[0-9a-f]{7}", comment)
    assert "Ours: " in comment
    assert "Not run at full size here." in comment
    assert "data.train_file=FILE" in comment
    assert len(lines) <= 40
    everything = comment_of(lineage(app, recipe))
    for source in TABLE["published"][recipe]:
        repository, commit = source.split(" ")[0], source.split("@")[1]
        assert re.search(rf"{re.escape(repository)} [^()]*@{commit}", everything), source


@pytest.mark.parametrize("app", APPS, ids=[a.name for a in APPS])
def test_the_readme_lists_every_published_recipe(app):
    readme = (app.recipes.parent.parent.parent / "README.md").read_text(encoding="utf-8")
    section = readme.split("## Published settings")[1]
    assert re.findall(r"^\| `(\w+)` \|", section, re.M) == [r for a, r in RECIPES if a is app]


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory):
    """A tiny pipeline folder of every architecture."""
    from model_specs import tiny

    return {name: tiny.build(name, tmp_path_factory.mktemp(name)) for name in TINY}


@pytest.mark.parametrize(("app", "recipe"), RECIPES, ids=IDS)
def test_its_lora_goes_where_the_source_has_it(app, recipe, pipelines):
    import diffusers
    from fsdp_diffusers_engine.adapters import inject_adapters
    from model_specs import get_spec

    model = parse(app, [f"recipe={recipe}"])[0].model
    if model.lora_rank == 0:
        return  # all weights
    folder = pipelines[{"sd3": "sd35", "wan": "wan_5b"}.get(model.architecture, model.architecture)]
    spec = type(get_spec(model.architecture))(folder)
    network = getattr(diffusers, spec.transformer_class).from_pretrained(folder, subfolder="transformer")
    inject_adapters(network, model, spec, ["default"])  # refuses a name that is nowhere
    trained = {
        name.split(".lora_A")[0] for name, p in network.named_parameters() if ".lora_A" in name and p.requires_grad
    }
    assert trained
    if model.architecture == "sd3":  # SD3.5's second attention ends in the same names, and no source trains it
        assert any(".attn2." in name for name, _ in network.named_parameters())
        assert not [name for name in trained if ".attn2." in name]


@pytest.mark.parametrize(("name", "recipe"), TINY.items())
def test_a_folder_of_the_same_architecture_takes_the_models_place(name, recipe, pipelines, tmp_path):
    def plan(folder):
        arguments = [f"recipe={recipe}", f"model.path={folder}", f"trainer.run_dir={tmp_path / 'run'}", *NO_ENGINE]
        return validate_config(parse(APPS[0], arguments)[0])

    assert not any("not on this machine" in line for line in plan(pipelines[name]))
    other = pipelines["flux" if name != "flux" else "sd35"]
    with pytest.raises(TrainerError, match=r"model\.architecture='\w+' means \w+, but model\.path=.* is a"):
        plan(other)
