"""The recipes with published hyper-parameters: they load, validate and dry-run without the model, and say what they should."""

import importlib.util
import re

import dpo_online.cli
import flowgrpo.cli
import huggingface_hub
import pytest
from huggingface_hub import constants
from omegaconf import OmegaConf
from ray_trainer.cli import parse, run
from ray_trainer.errors import TrainerError
from ray_trainer.validate import validate_config

APPS = [flowgrpo.cli.APP, dpo_online.cli.APP]
RECIPES = [(a, p.stem) for a in APPS for p in sorted(a.recipes.glob("*.yaml")) if not p.stem.startswith("tiny_")]
IDS = [f"{app.name}-{recipe}" for app, recipe in RECIPES]
# vLLM-Omni is an extra; its recipes are checked with the other backend where it is not installed.
NO_ENGINE = [] if importlib.util.find_spec("vllm_omni") else ["rollout.backend=diffusers", "rollout.num_replicas=1"]

CLIP, LR, G, P = "actor.diffusion_loss.clip_ratio", "actor.optim.lr", "rollout.n", "data.prompts_per_step"
KL, KIND, MINI = "actor.diffusion_loss.ref_kl_coef", "actor.diffusion_loss.kl_kind", "actor.ppo_mini_batch_size"
K, CFG, CAP = (
    "rollout.pipeline.num_inference_steps",
    "rollout.pipeline.true_cfg_scale",
    "actor.diffusion_loss.adv_clip_max",
)
RANK, ALPHA, STD, EPS = "model.lora_rank", "model.lora_alpha", "algorithm.advantage_std", "algorithm.advantage_eps"
MODE, ETA, SDE = "actor.diffusion_loss.loss_mode", "rollout.algo.noise_level", "rollout.algo.sde_type"
BETA, DPO, OLD = "actor.diffusion_loss.mix_beta", "actor.diffusion_loss.dpo_beta", "algorithm.old_policy"
SIZE, RANGE, SAME = "rollout.algo.sde_window_size", "rollout.algo.sde_window_range", "rollout.algo.shared_noise"
SOLVER, TAIL, ADAPTER = "rollout.algo.solver", "rollout.algo.tail_ratio", "rollout.rollout_adapter"

# Published figures, written down a second time, so that a slip of the pen in a recipe is caught.
SD35 = {
    MODE: "flow_grpo",
    CLIP: 1e-4,
    LR: 3e-4,
    G: 24,
    P: 48,
    MINI: 576,
    K: 10,
    RANK: 32,
    ALPHA: 64,
    STD: "batch",
    CAP: 5.0,
}
SD35 |= {SDE: "flow_sde", ETA: 0.7, SAME: False}
MIX = {
    MODE: "mix_grpo",
    CLIP: 1e-4,
    LR: 1e-5,
    G: 12,
    K: 25,
    KL: 0.0,
    ETA: 0.7,
    SDE: "flow_sde",
    SIZE: 4,
    RANGE: [0, 23],
}
MIX |= {
    SAME: True,
    STD: "group",
    EPS: 1e-8,
    CAP: 5.0,
    "algorithm.advantage_ddof": 1,
    "rollout.algo.sample_strategy": "progressive",
}
DANCE = {
    MODE: "dance_grpo",
    SDE: "dance_sde",
    CLIP: 1e-4,
    LR: 1e-5,
    K: 16,
    KL: 0.0,
    SAME: True,
    STD: "group",
    EPS: 1e-8,
}
DANCE |= {CAP: 5.0, "algorithm.step_fraction": 0.6, "algorithm.advantage_ddof": 1}
SLOW = {f"{OLD}.decay_start": 0, f"{OLD}.decay_rate": 1e-3, f"{OLD}.decay_max": 0.5}
NFT = {
    MODE: "diffusion_nft",
    LR: 3e-4,
    K: 10,
    CFG: 1.0,
    SDE: "ode",
    SOLVER: "dpm2",
    ADAPTER: "old",
    KL: 1e-4,
    BETA: 1.0,
}
NFT |= {CAP: 5.0, "actor.forward_process.schedule_fraction": 0.99, "model.policy_state_adapters": ["default", "old"]}
AWM = {MODE: "awm", CLIP: 1.0, KL: 3e-3, CAP: 5.0, "actor.diffusion_loss.awm_weighting": "ghuber"}
AWM |= {"actor.diffusion_loss.awm_power": 0.25, "actor.diffusion_loss.awm_advantage": "unit"}
PUBLISHED = {
    "qwen_image_ocr": {MODE: "flow_grpo", CLIP: 1e-4, LR: 3e-4, KL: 0.04, KIND: "flow_grpo", CAP: 5.0},
    "qwen_image_mix_grpo": MIX,
    "qwen_image_grpo_guard": {MODE: "grpo_guard", CLIP: 2e-6, CAP: 5.0, "actor.diffusion_loss.step_weighting": "auto"},
    "qwen_image_flow_dppo": {
        MODE: "flow_dppo",
        "actor.diffusion_loss.kl_mask_threshold": 1e-5,
        "actor.diffusion_loss.kl_mask_boundary": "at_or_above",
        "actor.diffusion_loss.dppo_clamp_advantages": False,
    },
    "sd35_geneval": SD35 | {KL: 0.04, KIND: "flow_grpo"},
    "sd35_ocr": SD35 | {KL: 0.04, KIND: "flow_grpo"},
    "sd35_pickscore": SD35 | {KL: 0.01, KIND: "flow_grpo"},
    "sd35_fast": SD35 | {CLIP: 1e-5, KL: 0.01, SIZE: 2, RANGE: [0, 7], SAME: True},
    "sd35_cps": SD35 | {SDE: "flow_cps", KIND: "unscaled"},
    "flux_dance_grpo": DANCE | {ETA: 0.3, G: 12},
    "flux_mix_grpo": MIX,
    "flux_mix_grpo_flash": MIX | {TAIL: 0.4, SOLVER: "dpm2"},
    "z_image_ocr": {MODE: "flow_grpo", CLIP: 1e-4, LR: 3e-4, KL: 0.04, ETA: 0.7, RANK: 32, ALPHA: 64},
    "wan22_video": {MODE: "flow_grpo", STD: "group", KIND: "std"},
    "wan22_dance_grpo": DANCE | {ETA: 0.25, G: 24},
    "sd35_nft_geneval": NFT | SLOW,
    "sd35_nft_pickscore": NFT | SLOW,
    "sd35_nft_ocr": NFT | {BETA: 0.1, f"{OLD}.decay_start": 75, f"{OLD}.decay_rate": 7.5e-3, f"{OLD}.decay_max": 0.999},
    "qwen_image_nft": NFT | {BETA: 0.5, KL: 0.0, f"{OLD}.decay_rate": 0.0, f"{OLD}.update_every": 1},
    "z_image_nft": NFT | SLOW,
    "wan22_nft": NFT | SLOW,
    "sd35_dpo": {MODE: "dpo", DPO: 100.0, f"{OLD}.update_every": 40, "actor.forward_process.reference_state": "old"},
    "qwen_image_dpo": {MODE: "dpo", DPO: 100.0, "actor.forward_process.reference_state": "reference"},
    "sd35_awm": AWM,
    "flux_awm": AWM,
}
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


def test_every_published_recipe_has_its_figures_here():
    assert sorted(PUBLISHED) == sorted(recipe for _, recipe in RECIPES)


@pytest.mark.parametrize(("app", "recipe"), RECIPES, ids=IDS)
def test_it_dry_runs_without_the_model_and_has_the_published_figures(app, recipe, tmp_path, capsys):
    assert run(app, [f"recipe={recipe}", "--dry-run", *NO_ENGINE]) == 0
    captured = capsys.readouterr()
    config = OmegaConf.create(captured.out)
    assert "is not on this machine; it will be downloaded when training starts" in captured.out
    for key, value in PUBLISHED[recipe].items():
        assert OmegaConf.select(config, key) == value, key
    assert config.model.architecture in ("qwen_image", "sd3", "flux", "z_image", "wan")
    assert config.actor.fsdp_config.model_dtype == "bf16"
    assert config.rollout.dtype == "bfloat16"
    assert config.model.enable_gradient_checkpointing
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("app", "recipe"), RECIPES, ids=IDS)
def test_it_names_its_source_and_what_is_ours(app, recipe):
    lines = (app.recipes / f"{recipe}.yaml").read_text(encoding="utf-8").splitlines()
    comment = " ".join(line.removeprefix("#").strip() for line in lines if line.startswith("#"))
    assert re.search(r"Source: .*arXiv \d{4}\.\d{5}", comment)
    assert "Published: " in comment
    assert "Ours: " in comment
    assert "Not run at full size here." in comment
    assert "data.train_file=FILE" in comment
    assert len(lines) <= 40


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


@pytest.mark.parametrize(("name", "recipe"), TINY.items())
def test_a_folder_of_the_same_architecture_takes_the_models_place(name, recipe, pipelines, tmp_path):
    def plan(folder):
        arguments = [f"recipe={recipe}", f"model.path={folder}", f"trainer.run_dir={tmp_path / 'run'}", *NO_ENGINE]
        return validate_config(parse(APPS[0], arguments)[0])

    assert not any("not on this machine" in line for line in plan(pipelines[name]))
    other = pipelines["flux" if name != "flux" else "sd35"]
    with pytest.raises(TrainerError, match=r"model\.architecture='\w+' means \w+, but model\.path=.* is a"):
        plan(other)
