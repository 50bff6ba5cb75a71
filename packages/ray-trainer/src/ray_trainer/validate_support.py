"""Refuse what a package can do and these programs cannot yet: a key works or is refused, never ignored. Imports no torch, but
for an agent loop of somebody's own."""

from __future__ import annotations

from omni_rollout.errors import RolloutConfigError
from omni_rollout.loops import LOOPS, get_agent_loop

from ray_trainer.config import RunConfig
from ray_trainer.errors import TrainerError
from ray_trainer.validate_algorithm import require


def check_supported(config: RunConfig) -> None:
    """Raise `TrainerError` for the first setting that would change nothing, or would be wrong, in a run of the programs."""
    model, actor, rollout = config.model, config.actor, config.rollout
    require(
        model.lora_rank >= 1,
        f"model.lora_rank={model.lora_rank}: the loop trains a LoRA; full fine-tuning is in fsdp-diffusers-engine so far",
    )
    require(
        not model.lora.merge,
        "model.lora.merge=true: samplers take the adapter as it is, and nothing here sends merged weights; leave it false",
    )
    require(
        actor.fsdp_config.ema_decay == 0,
        f"actor.fsdp_config.ema_decay={actor.fsdp_config.ema_decay}: no validation and no export reads the average; leave it at 0",
    )
    size = actor.fsdp_config.ulysses_sequence_parallel_size
    require(
        size == 1,
        f"actor.fsdp_config.ulysses_sequence_parallel_size={size}: the loop gives every rank other samples, and ranks of one "
        "sequence need the same; leave it at 1",
    )
    size, workers = actor.fsdp_config.fsdp_size, config.trainer.num_workers
    require(
        size == -1 or workers % size == 0,
        f"actor.fsdp_config.fsdp_size={size} does not divide trainer.num_workers={workers}; use -1 for those of one machine",
    )
    require(
        size == -1 or actor.fsdp_config.sharding != "replicate",
        f"actor.fsdp_config.fsdp_size={size} divides the model, and actor.fsdp_config.sharding='replicate' keeps all of it on "
        "every GPU; use sharding=shard, or leave fsdp_size at -1",
    )
    optim = actor.optim
    require(
        optim.lr_scheduler_type == "constant" or optim.lr_warmup_steps < optim.total_training_steps,
        f"actor.optim.lr_warmup_steps={optim.lr_warmup_steps} leaves nothing of actor.optim.total_training_steps="
        f"{optim.total_training_steps} for the {optim.lr_scheduler_type} schedule; warm up for fewer steps, or use constant",
    )
    loop = rollout.agent.default_agent_loop
    if loop not in LOOPS:  # a class of somebody's own
        try:
            get_agent_loop(loop)
        except RolloutConfigError as error:
            raise TrainerError(f"rollout.agent.default_agent_loop: {error}") from error
    parallel = [name for name in rollout.vllm_omni.engine_kwargs if name.endswith(("_parallel_size", "_degree"))]
    require(
        not parallel,
        f"rollout.vllm_omni.engine_kwargs sets {', '.join(parallel)}: the engine gets as many GPUs as "
        "rollout.vllm_omni.tensor_model_parallel_size says and no more; set that one",
    )
