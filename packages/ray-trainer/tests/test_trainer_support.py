"""A key that a person sets works or is refused: what these programs cannot do yet is said before anything starts."""

from importlib.resources import files
from pathlib import Path
from typing import get_args

import pytest
from ray_trainer.compose import compose
from ray_trainer.errors import TrainerError
from ray_trainer.rules import check_rules
from ray_trainer.validate import validate_config

REFUSED = {
    "model={lora_rank: 0, lora: {merge: true}}": "there is no adapter for model.lora.merge",
    "model={lora_rank: 0, lora_adapter_path: /tmp}": "there is no adapter for model.lora_adapter_path",
    "model={lora_rank: 0, lora_alpha: 128}": "there is no adapter for model.lora_alpha",
    "model={lora_rank: 0, target_modules: attention}": "there is no adapter for model.target_modules",
    "actor.fsdp_config.ema_every=8": "ema_every is of the average that actor.fsdp_config.ema_decay keeps",
    "actor.fsdp_config.ema_warmup=true": "ema_warmup is of the average",
    "trainer.val_weights=ema": "trainer.val_weights=ema needs an average",
    "actor.fsdp_config.state_offload=true": "policy states of a LoRA are adapters",
    "actor.fsdp_config={sharding: replicate, mixed_precision: {param_dtype: bf16}}": "is done by sharded modules",
    "rollout.sync=ray": "the trainers sample with their own weights and send none",
    "rollout={sync: nccl, num_replicas: 2}": "an adapter is small and always goes by ray",
    "actor.fsdp_config.ulysses_sequence_parallel_size=2": "does not divide trainer.num_workers=1",
    "rollout.agent.default_agent_loop=my_loop": "neither one of diffusion_single_turn_agent",
    "rollout.vllm_omni.engine_kwargs={ulysses_degree: 2}": "sets ulysses_degree",
    "rollout.vllm_omni.engine_kwargs.pipeline_parallel_size=2": "sets pipeline_parallel_size",
    "rollout.vllm_omni.gpu_memory_utilization=0.6": "unknown config key",
    "rollout.vllm_omni.tensor_model_parallel_size=3": "does not divide the 4 attention heads",
    "app=dpo-online": "this program is flowgrpo",
    "actor.fsdp_config.model_dtype=fp8": "model_dtype='fp8' must be one of fp32, float32, bf16",
    "model.lora_dtype=half": "model.lora_dtype='half' must be one of",
    "model.lora_init_weights=zeros": "one of gaussian, kaiming",
    "actor.optim.lr_scheduler_type=cosin": "one of constant, linear, cosine",
    "actor.checkpoint.save_contents=[model,optimiser]": "save_contents=.* must be some of model, optimizer",
    "actor.forward_process.levels=logit": "one of schedule, uniform, logit_normal",
    "actor.fsdp_config.fsdp_size=3": "does not divide trainer.num_workers=1",
    "actor.optim={lr_scheduler_type: cosine, lr_warmup_steps: 5000}": "leaves nothing of actor.optim.total_training_steps",
    "rollout.pipeline.height=65": "rollout.pipeline.height=65 must be a multiple of 16 for this model, such as 64",
    "rollout.val_kwargs.pipeline.width=8": "rollout.val_kwargs.pipeline.width=8 must be a multiple of 16.*, such as 16",
    "model.target_modules=nothing": "model.target_modules='nothing': 'nothing' matches no linear layer of QwenImage.*names like it",
    "model.target_modules=[to_q,to_w]": "'to_w' matches no linear layer of QwenImage.*'to_",
    "model.target_modules=(": "model.target_modules='[(]' is no regular expression",
    "model.exclude_modules=.*": "model.exclude_modules='.*' leaves nothing of target_modules='all-linear'",
    "model.transformer_subfolder=unet": "model.transformer_subfolder='unet' is none of transformer",
    "ray.address=foo": "ray.address='foo' .* is no address of a Ray cluster; give HOST:PORT, or auto",
    "reward.timeout_s=0": "must be above 0",
    "reward.policy=skipp": "reward.policy='skipp' must be one of required, skip, value; did you mean 'skip'",
    "trainer.on_existing=overwrite": "must be one of raise, resume, delete",
    "algorithm.advantage_ddof=2": "algorithm.advantage_ddof=2 must be one of 0, 1",
    "data.train_file=": "names an empty file",
    "trainer.run_dir=.": "is no run folder",
    "trainer.run_dir=s3://bucket/run": "'s3://bucket/run' is an address",
}


@pytest.mark.parametrize("given", REFUSED)
def test_what_would_change_nothing_or_be_wrong_is_refused(given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = tmp_path / "r.yaml"
    recipe.write_text("base: builtin:tiny\n")
    with pytest.raises(TrainerError, match=REFUSED[given]):
        validate_config(compose("flowgrpo", recipe, [given]))


def test_the_lora_that_a_run_starts_from_is_read_before_the_start(tmp_path, monkeypatch):
    import torch
    from safetensors.torch import save_file

    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text("base: builtin:tiny\n")

    def check(file: str) -> list[str]:
        return validate_config(compose("flowgrpo", tmp_path / "r.yaml", [f"model.lora_adapter_path={tmp_path / file}"]))

    def write(file: str, layer: str) -> None:
        save_file({f"{layer}.lora_{side}.weight": torch.ones(2, 2) for side in "AB"}, tmp_path / file)

    def write_rank(file: str, layer: str, rank: int) -> None:
        save_file(
            {f"{layer}.lora_A.weight": torch.ones(rank, 2), f"{layer}.lora_B.weight": torch.ones(2, rank)},
            tmp_path / file,
        )

    with pytest.raises(TrainerError, match="nothing does not exist"):
        check("nothing")
    write("sdxl.safetensors", "unet.mid_block.attentions.0.proj_in")
    with pytest.raises(TrainerError, match=r"model.lora_adapter_path=.*Stable Diffusion"):
        check("sdxl.safetensors")
    write("flux.safetensors", "transformer.single_transformer_blocks.0.attn.to_q")
    with pytest.raises(TrainerError, match="LoRA for flux"):
        check("flux.safetensors")
    write_rank("other_rank.safetensors", "transformer.transformer_blocks.0.attn.to_q", 2)
    with pytest.raises(TrainerError, match="has rank 2, and model.lora_rank=16"):
        check("other_rank.safetensors")
    write_rank("ours.safetensors", "transformer.transformer_blocks.0.attn.to_q", 16)
    assert any("is a guess" in line for line in check("ours.safetensors"))


def test_the_words_are_those_of_the_engine():
    from fsdp_diffusers_engine import config, precision

    assert get_args(config.Dtype) == tuple(precision.DTYPES)


FULL = {
    "actor.fsdp_config.model_dtype=bf16": "an update is smaller than the steps of that dtype",
    "actor.diffusion_loss.ref_kl_coef=0.1": r"keep a copy of it with model.policy_state_adapters=\[default,reference\]",
    "rollout={backend: vllm_omni, fp8: true}": "the engine rounds its own when it starts",
    "model.transformer_subfolder=transformer rollout.num_replicas=2": "replicas want the weights of all",
    "actor.fsdp_config.ema_decay=0.9 trainer.val_weights=ema trainer.staleness=1 rollout.num_replicas=2": "after validation with",
    "model.policy_state_adapters=[default,reference,drew]": "names 'drew', which trainer.staleness=1 keeps itself",
    "trainer.staleness=1 rollout.num_replicas=2": "would be sent weights that are half trained",
}


@pytest.mark.parametrize("given", FULL)
def test_what_full_weights_cannot_do_is_refused(given, tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("base: builtin:tiny\nmodel: {lora_rank: 0}\n")
    words = [given] if "{" in given else given.split(" ")
    with pytest.raises(TrainerError, match=FULL[given]):
        check_rules(compose("flowgrpo", recipe, words))
    check_rules(compose("flowgrpo", recipe, []))


@pytest.mark.parametrize(
    ("app", "recipe", "words"),
    [
        ("flowgrpo", "tiny_flow_grpo", "rollout_correction.mode=decoupled"),
    ],
)
def test_who_draws_ahead_is_told_what_it_costs(app, recipe, words):
    file = Path(str(files(app.replace("-", "_")))) / "recipes" / f"{recipe}.yaml"
    assert any(
        words in line
        for line in validate_config(compose(app, file, ["trainer.staleness=1", "algorithm.old_log_probs=trainer"]))
    )
    assert not any(words in line for line in validate_config(compose(app, file, [])))
