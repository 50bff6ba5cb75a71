"""A key that a person sets works or is refused: what these programs cannot do yet is said before anything starts."""

import pytest
from ray_trainer.config import compose
from ray_trainer.errors import TrainerError
from ray_trainer.validate import validate_config

REFUSED = {
    "model.lora_rank=0": "full fine-tuning",
    "model.lora.merge=true": "nothing here sends merged weights",
    "actor.fsdp_config.ema_decay=0.99": "no validation and no export reads the average",
    "actor.fsdp_config.ulysses_sequence_parallel_size=2": "ranks of one sequence need the same",
    "rollout.agent.default_agent_loop=my_loop": "neither one of diffusion_single_turn_agent",
    "rollout.vllm_omni.engine_kwargs={ulysses_degree: 2}": "sets ulysses_degree",
    "rollout.vllm_omni.engine_kwargs.pipeline_parallel_size=2": "sets pipeline_parallel_size",
    "rollout.vllm_omni.gpu_memory_utilization=0.6": "unknown config key",
    "app=dpo-online": "this program is flowgrpo",
    "actor.strategy=fsdp3": "actor.strategy",
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

    with pytest.raises(TrainerError, match="nothing does not exist"):
        check("nothing")
    write("sdxl.safetensors", "unet.mid_block.attentions.0.proj_in")
    with pytest.raises(TrainerError, match=r"model.lora_adapter_path=.*Stable Diffusion"):
        check("sdxl.safetensors")
    write("flux.safetensors", "transformer.single_transformer_blocks.0.attn.to_q")
    with pytest.raises(TrainerError, match="LoRA for flux"):
        check("flux.safetensors")
    write("ours.safetensors", "transformer.transformer_blocks.0.attn.to_q")
    assert any("is a guess" in line for line in check("ours.safetensors"))
