"""`plan`: its sums against what cards were measured at, and what it says of a run that does not fit.

The measured figures are those of docs/full_size.md and of the engine's MEASURED.md (2026-11-28, H200 141 GB and H100 80 GB); older
ones, of the program as it was before, are marked so. Rows of one case have the same model, size and batch as the measurement.
"""

import json
import math

import pytest
import torch
from flowgrpo.cli import APP
from model_specs import get_spec_for, tiny
from ray_trainer.card_memory import GB, measure
from ray_trainer.cli import run
from ray_trainer.compose import compose
from ray_trainer.placement import Machine, place
from ray_trainer.step_time import phases

PEAK = 989.4e12  # of both cards' data sheets
RECIPE = "tiny_flow_grpo"
COMMON = ["model.lora_rank=64", "model.target_modules=attention", "actor.fsdp_config.model_dtype=bf16", "rollout.dtype=bfloat16",
          "model.enable_gradient_checkpointing=true", "actor.ppo_micro_batch_size_per_gpu=8", "rollout.max_batch_size=16",
          "rollout.pipeline.height=512", "rollout.pipeline.width=512", "rollout.pipeline.num_inference_steps=10",
          "rollout.pipeline.true_cfg_scale=4.0", "rollout.algo.sde_window_size=2", "rollout.algo.sde_window_range=[0,5]",
          "actor.diffusion_loss.ref_kl_coef=0", "algorithm.old_log_probs=rollout", "data.prompts_per_step=1"]  # fmt: skip
EAGER, NONE, ALL = "actor.fsdp_config.use_torch_compile=false", "model.recompute_blocks=0", "model.recompute_blocks=60"


def make(*keys):
    return compose("flowgrpo", APP.recipes / f"{RECIPE}.yaml", [*COMMON, *keys])


def full_size(name, transformer, tmp, vae=None):
    """A pipeline folder with a transformer of full size whose weights take no disk, and a text encoder of 8.29 B."""
    import diffusers

    folder = tiny.build(name, tmp)
    spec = get_spec_for(folder)
    with torch.device("meta"):  # not accelerate's, which computes SD3.5's table of positions
        module = getattr(diffusers, spec.transformer_class)(**transformer)
    for part, file, shapes in (
        ("transformer", "diffusion_pytorch_model", {n: p.shape for n, p in module.named_parameters()}),
        ("text_encoder", "model", {"all": (8_290, 1_000_000)}),
    ):
        for old in (folder / part).glob("*.safetensors"):
            old.unlink()
        header, end = {}, 0
        for tensor, shape in shapes.items():
            size = 2 * math.prod(shape)
            header[tensor] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + size]}
            end += size
        text = json.dumps(header).encode()
        with (folder / part / f"{file}.safetensors").open("wb") as opened:
            opened.write(len(text).to_bytes(8, "little") + text)
            opened.truncate(8 + len(text) + end)
    module.save_config(folder / "transformer")
    if vae:
        config = json.loads((folder / "vae" / "config.json").read_text())
        (folder / "vae" / "config.json").write_text(json.dumps(config | vae))
    return folder


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return full_size("qwen_image", {"num_layers": 60}, tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def sd35(tmp_path_factory):
    config = {
        "sample_size": 128, "patch_size": 2, "in_channels": 16, "out_channels": 16, "num_layers": 24, "attention_head_dim": 64,
        "num_attention_heads": 24, "joint_attention_dim": 4096, "caption_projection_dim": 1536, "pooled_projection_dim": 2048,
        "pos_embed_max_size": 384, "dual_attention_layers": list(range(13)), "qk_norm": "rms_norm",
    }  # fmt: skip
    return full_size("sd3", config, tmp_path_factory.mktemp("sd35"))


@pytest.fixture(scope="module")
def wan(tmp_path_factory):
    config = {
        "patch_size": [1, 2, 2], "num_attention_heads": 24, "attention_head_dim": 128, "in_channels": 48, "out_channels": 48,
        "text_dim": 4096, "freq_dim": 256, "ffn_dim": 14336, "num_layers": 30, "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads", "eps": 1e-6, "rope_max_seq_len": 1024,
    }  # fmt: skip
    return full_size("wan_5b", config, tmp_path_factory.mktemp("wan"), {"scale_factor_spatial": 16})


def seconds(folder, keys, *, text=75, machine=None, card=141, **more):
    """Of each phase by the plan, and of the whole step."""
    config = make(*keys)
    ranks = config.trainer.num_workers
    needs = measure(folder, config, text)
    placed = place(config, [machine or Machine(ranks, ranks)], needs, card * GB)
    found = {p.name: p.seconds for p in phases(config, folder, needs, placed, text, PEAK, True, **more)}
    return found | {"step": sum(found.values())}


CASES = {
    "own rollout, compiled": (["rollout.n=16"], "rollout", 16 / 1.55),
    "own rollout, not compiled": (["rollout.n=16", EAGER], "rollout", 16 / 1.18),
    "engine": (["rollout.n=16", "rollout.backend=vllm_omni"], "rollout", 16 / 1.57),
    "update, compiled, all recomputed": (["rollout.n=16", ALL], "update", 7.7),
    "update, compiled, none recomputed": (["rollout.n=16", NONE], "update", 4.6),
    "update, not compiled, all recomputed": (["rollout.n=16", EAGER, ALL], "update", 10.9),
    "whole program: rollout": (["rollout.n=32"], "rollout", 20.6),
    "whole program: update": (["rollout.n=32", NONE], "update", 9.5),
    "whole program: step": (["rollout.n=32", NONE], "step", 32 / 1.04),
    "earlier, own: rollout": (["rollout.n=32"], "rollout", 32 / 1.41),
    "earlier, own: update": (["rollout.n=32", ALL], "update", 14.75),
    "earlier, own: step": (["rollout.n=32", ALL], "step", 32 / 0.84),
    "earlier, engine beside the trainer: update": (["rollout.n=32", ALL, "rollout.backend=vllm_omni"], "update", 14.8),
    "earlier, plain diffusers: rollout": (["rollout.n=32", EAGER], "rollout", 32 / 1.07),
    "earlier, plain diffusers: update": (["rollout.n=32", EAGER, ALL], "update", 20.6),
}
H100 = [
    "rollout.pipeline.true_cfg_scale=1.0",
    "rollout.n=8",
    "rollout.algo.sde_window_size=1",
    ALL,
    "model.target_modules=all-linear",
]
LARGE = ["rollout.n=4", NONE, "rollout.pipeline.height=1024", "rollout.pipeline.width=1024"]
LARGER = ["rollout.n=4", NONE, "rollout.pipeline.height=1328", "rollout.pipeline.width=1328"]
VIDEO = [
    "rollout.n=4",
    NONE,
    "rollout.pipeline.height=480",
    "rollout.pipeline.width=832",
    "rollout.pipeline.num_frames=33",
]
OTHERS = {
    "1024 pixels, batch 4: rollout": ("qwen", LARGE, 75, "rollout", 4 * 10 * 0.270),
    "1024 pixels, batch 4: update": ("qwen", LARGE, 75, "update", 4 * 2 * 0.661),
    "1328 pixels, batch 2: rollout": ("qwen", LARGER, 75, "rollout", 4 * 10 * 0.502),
    "1328 pixels, batch 2: update": ("qwen", LARGER, 75, "update", 4 * 2 * 1.29),
    "SD3.5 Medium: rollout": ("sd35", ["rollout.n=16", NONE], 333, "rollout", 16 / 9.2),
    "SD3.5 Medium: rollout and update": ("sd35", ["rollout.n=16", NONE], 333, "both", 16 / 6.0),
    "Wan2.2 5B: rollout": ("wan", VIDEO, 128, "rollout", 4 / 0.71),
    "Wan2.2 5B: rollout and update": ("wan", VIDEO, 128, "both", 4 / 0.49),
    "H100: update": ("qwen", H100, 128, "update", 1.065),
    "H100: update, not compiled": ("qwen", [*H100, EAGER], 128, "update", 1.830),
    "two H100 that share a copy: update of 8 rows each": (
        "qwen", [*H100, "rollout.n=16", "trainer.num_workers=2", "actor.fsdp_config.sharding=shard"], 128, "update", 1.871,
    ),
}  # fmt: skip
# verl-omni's docs/algo/performance.md and its examples/flowgrpo_trainer/qwen_image/run_qwen_image_ocr_lora.sh (main, 2026-11): four
# H800, 512 samples a step, 0.305 images/s a GPU (420 s), rewards by a model of 8 B on the same GPUs; 360 s with the rewards on a
# fifth GPU. Its engine is vLLM-Omni as it comes; old log-probs are recomputed; the update shares one copy among the four, waits on
# the host while samples are drawn, and does not compile. A picture's reward is not published; it is the difference of the two rows.
PUBLISHED = ["rollout.n=16", "data.prompts_per_step=32", "trainer.num_workers=4", "rollout.backend=vllm_omni", EAGER, ALL,
             "rollout.vllm_omni.max_num_seqs=8", "algorithm.old_log_probs=trainer", "actor.ppo_micro_batch_size_per_gpu=16",
             "actor.log_prob_micro_batch_size_per_gpu=32", "actor.fsdp_config.sharding=shard", "actor.ppo_mini_batch_size=256",
             "actor.fsdp_config.param_offload=true", "actor.fsdp_config.optimizer_offload=true",
             "model.target_modules=all-linear"]  # fmt: skip
SAME_GPUS = ["reward.num_gpus=1", "reward.share_trainers_gpus=true"]
A_PICTURE = (420 - 360) / 512
STOCK = {
    "verl-omni, rewards on the same GPUs": ([*PUBLISHED, *SAME_GPUS], "step", 512 / (4 * 0.305), A_PICTURE, 0.3),
    "verl-omni, rewards elsewhere": ([*PUBLISHED, "reward.num_gpus=1"], "step", 360, A_PICTURE, 0.3),
    # `step_time.APART` comes from this one: the first version of this program, when its engine was as it comes.
    "earlier, engine beside the trainer: rollout": (
        ["rollout.n=32", "rollout.backend=vllm_omni"], "rollout", 32 / 0.82, 0.0, 0.2,
    ),
}  # fmt: skip
"""With vLLM-Omni as it comes: keys, phase, seconds, seconds of a picture's reward, and how near the sums must be."""


@pytest.mark.parametrize("case", CASES)
def test_seconds_are_within_a_fifth_of_those_measured(qwen, case):
    keys, phase, measured = CASES[case]
    assert seconds(qwen, keys)[phase] == pytest.approx(measured, rel=0.2)


@pytest.mark.parametrize("case", STOCK)
def test_other_programs_engines_and_rewards_are_planned_too(qwen, case):
    keys, phase, measured, reward, near = STOCK[case]
    assert seconds(qwen, keys, reward=reward, apart=True)[phase] == pytest.approx(measured, rel=near)


def test_what_rewards_and_the_host_take(qwen):
    run = ["rollout.n=16"]
    alone = seconds(qwen, run)
    assert "reward" not in alone
    # Scored while others are drawn: only the last batch of 16 is waited for; where they are slower than drawing, for the rest too.
    assert seconds(qwen, run, reward=0.01)["reward"] == pytest.approx(0.16)
    assert seconds(qwen, run, reward=2.0)["reward"] == pytest.approx(32.0)
    assert seconds(qwen, [*run, "reward.num_workers=8"], reward=8.0)["reward"] == pytest.approx(16.0)
    assert seconds(qwen, [*run, *SAME_GPUS], reward=0.1)["reward"] == pytest.approx(1.6)
    assert seconds(qwen, run, reward=0.01)["step"] == pytest.approx(alone["step"] + 0.16)
    # 40.9 GB away and back at 30 GB/s.
    moved = seconds(qwen, [*run, "actor.fsdp_config.param_offload=true"])
    assert moved["to the host"] == pytest.approx(2 * 40.9 / 30, rel=0.01)
    assert moved["step"] - alone["step"] == pytest.approx(moved["to the host"])
    assert "to the host" not in alone


@pytest.mark.parametrize("case", OTHERS)
def test_other_models_sizes_and_cards_are_too(case, request):
    model, keys, text, phase, measured = OTHERS[case]
    found = seconds(request.getfixturevalue(model), keys, text=text)
    assert found.get(phase, found["rollout"] + found["update"]) == pytest.approx(measured, rel=0.2)


def test_memory_is_within_a_tenth_of_what_was_measured(qwen):
    # An update of 8 rows with 128 text tokens: 51.1 GB in one process, 29.8 GB in each of two that share a copy; without
    # encoders and CUDA's context.
    for keys, measured in ((H100, 51.1), ([*H100, "trainer.num_workers=2", "actor.fsdp_config.sharding=shard"], 29.8)):
        config = make(*keys)
        needs = measure(qwen, config, 128)
        placed = place(config, [Machine(2, config.trainer.num_workers)], needs, 85 * GB)
        parts = placed.parts["transformer"] + placed.parts["adapters, gradient, optimizer"] + needs.update
        assert parts / GB == pytest.approx(measured, rel=0.1)


def test_a_run_that_does_not_fit_is_told_what_would(qwen, capsys):
    keys = [
        *COMMON,
        f"model.path={qwen}",
        "model.enable_gradient_checkpointing=false",
        "ray.gpu_memory_gb=85",
        "gpu=H100",
    ]
    assert run(APP, ["plan", f"recipe={RECIPE}", *keys]) == 1
    out = capsys.readouterr().out
    assert "on 1 x H100, 989 TFLOP/s" in out
    assert "it does not fit: with model.enable_gradient_checkpointing=true" in out
    assert run(APP, ["plan", f"recipe={RECIPE}", *keys, "model.enable_gradient_checkpointing=true", "price=2"]) == 0
    out = capsys.readouterr().out
    for part in ("transformer", "text encoder, VAE", "in all", "rollout", "update", "images/s", "dollars"):
        assert part in out
    assert "16 samples a GPU x 10 steps x 2 for guidance" in out


def test_the_tiny_policy_on_a_cpu_and_what_cannot_be_planned(monkeypatch, capsys):
    monkeypatch.setattr("ray_trainer.commands.doctor.gpus", list)
    assert run(APP, ["plan"]) == 0
    out = capsys.readouterr().out
    assert "1 x CPU" in out
    assert "96 samples, without rewards" in out
    assert run(APP, ["plan", "reward=0.5"]) == 0
    out = capsys.readouterr().out
    assert "without rewards" not in out
    assert "96 pictures, 48.0 s in all" in out
    assert run(APP, ["plan", "--help"]) == 0
    assert "price=2.5" in capsys.readouterr().out
    for wrong, said in (
        (["model.path=some/where", "model.architecture=qwen_image"], "download it first"),
        (["gpu=Potato"], "gpu='Potato' is in no table"),
        (["price=cheap"], "price='cheap' is no number"),
        (["reward=slow"], "reward='slow' is no number; give seconds that a picture takes"),
        (["engine=fast"], "engine='fast' is unknown; give own or stock"),
    ):
        assert run(APP, ["plan", *wrong]) == 2
        assert said in capsys.readouterr().err
