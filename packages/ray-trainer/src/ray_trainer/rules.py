"""Keys that contradict each other, or that these programs cannot serve: each rule says what is wrong, and nothing is ignored.

Imports no torch, but for an agent loop of somebody's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from fsdp_diffusers_engine.config import DREW
from omni_rollout.errors import RolloutConfigError
from omni_rollout.loops import LOOPS, get_agent_loop
from run_report.trackers import missing_trackers
from sde_samplers.kinds import find_kind

from .config import DRAWING, LORA, RolloutCorrectionConfig, RunConfig, updates_per_step
from .errors import TrainerError
from .watchdog import RULES


def check_rules(config: RunConfig) -> None:
    """Raise `TrainerError` with the first rule that the config breaks."""
    spec = config.actor.diffusion_loss.spec
    broken = [
        _sizes,
        _log_probs,
        _policy_states,
        _weights,
        _guidance,
        _rewards,
        *([_window] if spec.replays else []),
        *([_pairs] if spec.paired else []),
        _given,
        _watchdog,
    ]
    for rules in (*broken, _support):
        for complaint in rules(config):
            raise TrainerError(complaint)


def _sizes(config: RunConfig) -> Iterator[str]:
    """Every worker gets as many rows as the others, and every sample has another to be compared with."""
    n, prompts, workers = config.rows_per_prompt, config.data.prompts_per_step, config.trainer.num_workers
    if n < 2 and not config.data.offline and config.actor.diffusion_loss.spec.scored:
        yield f"rollout.n={n} is too small: advantages compare the samples of one prompt, so give at least 2"
    if prompts * n % workers:
        yield f"data.prompts_per_step x {n} = {prompts * n} rows must divide by trainer.num_workers={workers}"
    if config.actor.ppo_mini_batch_size % workers:
        yield f"actor.ppo_mini_batch_size = {config.actor.ppo_mini_batch_size} must divide by trainer.num_workers={workers}"


def _policy_states(config: RunConfig) -> Iterator[str]:
    """The old policy: kept where somebody reads it, following as it should, and the one that drew the samples."""
    states, old = config.model.policy_state_adapters, config.algorithm.old_policy
    sampler, reference = config.rollout.rollout_adapter, config.actor.forward_process.reference_state
    loss, updates = config.actor.diffusion_loss, updates_per_step(config)
    for name in (DREW, DRAWING):
        if name in states:
            yield f"model.policy_state_adapters={states} names {name!r}, which trainer.staleness=1 keeps itself; take another name"
    for key, name in (("rollout.rollout_adapter", sampler), ("actor.forward_process.reference_state", reference)):
        if name not in ("reference", *states):
            yield f"{key}={name!r} is no policy state of this run ({', '.join(states)}); add it to model.policy_state_adapters"
    if loss.spec.replays and sampler != "default":
        yield (
            f"rollout.rollout_adapter={sampler!r} with loss_mode={loss.loss_mode}: its ratios need samples of the trained policy, "
            "so use default"
        )
    if not loss.needs_old_velocity:
        return
    if loss.lag_kl_coef > 0:  # `old` is what it is pulled to, and not the policy that sampled
        if "old" not in states or sampler != "default" or updates != 1:
            yield (
                f"actor.diffusion_loss.lag_kl_coef={loss.lag_kl_coef} pulls to the policy state old, so samples come from default "
                f"and train one update (here {sampler!r} and {updates}): set model.policy_state_adapters=[default,old], "
                "rollout.rollout_adapter=default and actor.ppo_mini_batch_size to all samples of a step"
            )
        return
    lags = old.update_every > 1 or (old.decay_rate > 0 and old.decay_max > 0)
    if "old" in states and sampler != "old" and (sampler != "default" or lags):
        yield (
            f"loss_mode={loss.loss_mode} compares with the policy state old, and rollout.rollout_adapter={sampler!r} draws the "
            "samples: set it to old, or let old be a copy after every step (algorithm.old_policy at its defaults)"
        )
    if "old" not in states and (sampler != "default" or updates != 1):
        yield (
            f"loss_mode={loss.loss_mode} with {updates} updates per step and samples of {sampler!r} needs the policy that sampled: "
            "set model.policy_state_adapters=[default,old]"
        )


def _weights(config: RunConfig) -> Iterator[str]:
    """What is trained, what is kept beside it, and what samplers are sent."""
    model, fsdp, rollout, mode = config.model, config.actor.fsdp_config, config.rollout, config.sync_mode
    if mode == "full":
        changed = [name for name in LORA if getattr(model, name) != getattr(type(model)(), name)]
        if model.lora.merge or changed:
            key = "model.lora.merge" if model.lora.merge else f"model.{changed[0]}"
            yield f"model.lora_rank=0 trains all weights, so there is no adapter for {key}; leave it out, or set model.lora_rank"
        if fsdp.model_dtype not in ("fp32", "float32"):
            yield (
                f"model.lora_rank=0 with actor.fsdp_config.model_dtype={fsdp.model_dtype}: an update is smaller than the steps of "
                "that dtype and would be lost; use model_dtype=fp32, and actor.fsdp_config.mixed_precision.param_dtype=bf16 to "
                "compute in bf16"
            )
        if config.actor.diffusion_loss.needs_reference and "reference" not in model.policy_state_adapters:
            states = ",".join([*model.policy_state_adapters, "reference"])
            yield (
                f"model.lora_rank=0 with loss_mode={config.actor.diffusion_loss.loss_mode}, which compares with the policy that "
                f"training starts from: keep a copy of it with model.policy_state_adapters=[{states}], or set "
                "actor.diffusion_loss.ref_kl_coef=0 where that is all it is for"
            )
    elif fsdp.state_offload:
        yield "actor.fsdp_config.state_offload=true: policy states of a LoRA are adapters and stay on the card; leave it out"
    if fsdp.mixed_precision is not None and fsdp.sharding == "replicate":
        yield (
            "actor.fsdp_config.mixed_precision is done by sharded modules, and actor.fsdp_config.sharding=replicate makes none; "
            "use auto or shard (one process can shard too)"
        )
    if fsdp.ema_decay == 0:
        if config.trainer.val_weights == "ema":
            yield "trainer.val_weights=ema needs an average: set actor.fsdp_config.ema_decay, such as 0.9"
        if fsdp.ema_every > 1 or fsdp.ema_warmup:
            key = "ema_every" if fsdp.ema_every > 1 else "ema_warmup"
            yield f"actor.fsdp_config.{key} is of the average that actor.fsdp_config.ema_decay keeps; set that too, or leave it out"
    if rollout.sync in ("shared_memory", "nccl") and mode == "lora":
        yield f"rollout.sync={rollout.sync}: an adapter is small and always goes by ray; leave it at auto, or send all weights"
    if rollout.sync != "auto" and config.shares_weights:
        yield f"rollout.sync={rollout.sync}: the trainers sample with their own weights and send none; leave it at auto"
    if mode != "lora" and not config.shares_weights and model.transformer_subfolder:
        yield (
            f"model.transformer_subfolder={model.transformer_subfolder!r} trains one of several transformers, and replicas want "
            "the weights of all; train a LoRA without model.lora.merge, or use rollout.backend=diffusers with one replica"
        )
    if (
        config.trainer.staleness
        and mode != "lora"
        and not config.shares_weights
        and config.val_adapter != rollout.rollout_adapter
    ):
        yield (
            f"trainer.staleness=1 draws under the update, when replicas cannot be sent the weights of {rollout.rollout_adapter!r} "
            f"after validation with those of {config.val_adapter!r}; let both be one (trainer.val_weights, "
            "rollout.rollout_adapter), or use staleness=0"
        )
    elif config.trainer.staleness and mode != "lora" and not config.shares_weights and rollout.router.restart:
        yield (
            "rollout.router.restart=true with trainer.staleness=1 and all weights sent: a replica that starts again during an "
            "update would be sent weights that are half trained; set rollout.router.restart=false, or staleness=0"
        )
    if mode != "lora" and rollout.fp8 and rollout.backend == "vllm_omni":
        yield "rollout.fp8=true with all weights sent: the engine rounds its own when it starts, and takes no others; leave it off"


def _log_probs(config: RunConfig) -> Iterator[str]:
    """Old log-probs and the correction of the rollout's: only where there are some, and only what has an effect."""
    loss, algorithm = config.actor.diffusion_loss, config.algorithm
    old, fix = algorithm.old_log_probs, algorithm.rollout_correction
    mode = f"algorithm.rollout_correction.mode={fix.mode}"
    if not loss.spec.replays and (old == "auto" or fix.mode != "none"):
        key = mode if fix.mode != "none" else "algorithm.old_log_probs=auto"
        yield f"{key} with loss_mode={loss.loss_mode}: it has no log-probs of what was drawn; leave that key out"
    if old == "auto" and loss.needs_old_means:
        yield (
            f"algorithm.old_log_probs=auto with loss_mode={loss.loss_mode}: its clip is on means, with which log-probs cannot be "
            "compared; set rollout or trainer"
        )
    if fix.mode == "decoupled" and old == "rollout":
        yield f"{mode} weighs by the trainer's log-probs against the rollout's: set algorithm.old_log_probs=trainer or auto"
    if fix.mode == "decoupled" and old == "auto" and config.trainer.staleness:
        yield (
            f"{mode} with algorithm.old_log_probs=auto and trainer.staleness=1: auto may settle on the rollout's log-probs, and "
            "nothing would be corrected; set algorithm.old_log_probs=trainer"
        )
    if fix.mode == "bypass" and old != "rollout":
        yield f"{mode} clips around the policy that drew, and algorithm.old_log_probs={old} around another; set rollout"
    plain = RolloutCorrectionConfig()
    for name, used in (
        ("level", ("decoupled", "bypass")),
        ("reject", ("decoupled", "bypass")),
        ("cap", ("decoupled",)),
    ):
        if getattr(fix, name) != getattr(plain, name) and fix.mode not in used:
            yield f"algorithm.rollout_correction.{name}={getattr(fix, name)} has no effect with {mode}; set mode={used[0]}"
    if fix.mode == "bypass" and fix.level != plain.level and fix.reject is None:
        yield f"algorithm.rollout_correction.level={fix.level} has no effect with {mode} without reject; set reject=[low,high]"
    if fix.reject is not None and fix.reject[0] >= fix.reject[1]:
        yield f"algorithm.rollout_correction.reject={fix.reject} keeps nothing; give [low,high] with low below high"


def _guidance(config: RunConfig) -> Iterator[str]:
    """A loss that compares with the velocity that sampled needs samples drawn by that velocity.

    Both DiffusionNFT and AWM are published without guidance. Guidance that is an input of the model (FLUX) is part of its
    velocity and may have any value; preference pairs may come from any sampler.
    """
    loss, scale = config.actor.diffusion_loss, config.rollout.pipeline.true_cfg_scale
    if scale > 1 and not loss.spec.guided_samples:
        yield (
            f"rollout.pipeline.true_cfg_scale={scale} with loss_mode={loss.loss_mode}: it compares the conditional velocity with "
            "the one that drew the samples, and guidance draws with another; set rollout.pipeline.true_cfg_scale=1 (as published; "
            "rollout.val_kwargs.pipeline may have guidance)"
        )


def _window(config: RunConfig) -> Iterator[str]:
    """There must be noisy steps, and they must lie within the run."""
    algo, steps = config.rollout.algo, config.rollout.pipeline.num_inference_steps
    first, end = algo.sde_window_range or (0, max(steps - 1, 1))
    size = end - first if algo.sde_window_size is None else algo.sde_window_size
    if not find_kind(algo.kind).stochastic or algo.noise_level <= 0:
        yield (
            f"rollout.algo.kind={algo.kind} with noise_level={algo.noise_level} draws no noise, and a policy gradient "
            "needs some: take flow_sde, flow_cps or dance_sde and a noise_level above 0"
        )
    if end > steps:
        yield f"rollout.algo.sde_window_range={[first, end]} leaves rollout.pipeline.num_inference_steps={steps}; end it at {steps}"
    if not 1 <= size <= end - first:
        yield f"rollout.algo.sde_window_size={size} must be 1 to {end - first}, the steps of the window's range"


def _rewards(config: RunConfig) -> Iterator[str]:
    """Several rewards, and which prompts each scores."""
    reward, algorithm = config.reward, config.algorithm
    for name, one in reward.several.items():
        if not one.name:
            yield f"reward.several.{name} has no name; set reward.several.{name}.name to a reward"
        taken = [other for other in (*reward.several, "source") if name.startswith(f"{other}_")]
        if taken:
            yield f"reward.several.{name} may also be the name of a part of {taken[0]!r} in the metrics; give it another name"
    if not any(one.weight for one in reward.each.values()):
        yield "every reward of reward.several has weight 0, so nothing is trained on; give one another weight"
    for name, one in reward.each.items():
        key = f"reward.several.{name}" if name else "reward"
        if one.num_gpus > 1 and one.num_gpus % 1:
            yield f"{key}.num_gpus={one.num_gpus:g}: a worker has a share of one GPU, or whole ones"
        if one.share_trainers_gpus and not 0 < one.num_gpus <= 1:
            yield f"{key}.share_trainers_gpus=true needs {key}.num_gpus above 0 and up to 1, not {one.num_gpus:g}"
        if one.share_trainers_gpus and config.actor.fsdp_config.device == "cpu":
            yield (
                f"{key}.share_trainers_gpus=true with actor.fsdp_config.device=cpu: the trainers have no GPU to share; set "
                f"{key}.share_trainers_gpus=false"
            )
        if one.share_trainers_gpus and config.trainer.staleness:
            yield (
                f"{key}.share_trainers_gpus=true with trainer.staleness=1: rewards are scored during the update, which needs those "
                f"GPUs; set {key}.share_trainers_gpus=false, or staleness=0"
            )
        if one.share_trainers_gpus and one.num_workers * one.num_gpus > config.trainer.num_workers:
            yield (
                f"{key}.num_workers={one.num_workers} of {one.num_gpus:g} GPUs each do not fit the GPUs of "
                f"trainer.num_workers={config.trainer.num_workers}; use fewer workers, or a smaller share"
            )
    for name, source in config.data.sources.items():
        unknown = [one for one in source.rewards if one not in reward.several]
        if unknown:
            yield (
                f"data.sources.{name}.rewards={source.rewards} names {unknown[0]!r}, and reward.several has "
                f"{', '.join(reward.several) or 'none'}"
            )
        if not any(reward.each[one].weight for one in config.rewards_of(name) if one in reward.each):
            yield f"data.sources.{name}.rewards={source.rewards} have weight 0, so its samples teach nothing; add one with a weight"
    unused = [
        n
        for n in reward.several
        if config.data.sources and not any(n in config.rewards_of(s) for s in config.data.sources)
    ]
    if unused:
        yield f"reward.several.{unused[0]} scores no source of data.sources; name it in a source's rewards, or leave it out"
    if reward.combine == "gdpo" and config.actor.diffusion_loss.spec.paired:
        yield "reward.combine=gdpo makes advantages, and dpo's pairs are made of scores; use weighted_sum"
    if reward.combine == "gdpo" and algorithm.advantage_std == "none":
        yield "reward.combine=gdpo divides by standard deviations; set algorithm.advantage_std to group (as published) or batch"
    if (
        reward.combine == "gdpo"
        and algorithm.advantage_std == "batch"
        and any(s.rewards for s in config.data.sources.values())
    ):
        yield (
            "reward.combine=gdpo with algorithm.advantage_std=batch compares samples that a reward scores with those of other "
            "sources; set it to group"
        )


def _pairs(config: RunConfig) -> Iterator[str]:
    """Two rows that belong together must stay together."""
    algorithm = config.algorithm
    if algorithm.pair_ties == "keep" and (algorithm.pair_mode == "all" or algorithm.pair_margin > 0):
        yield (
            f"algorithm.pair_ties=keep with pair_mode={algorithm.pair_mode} and pair_margin={algorithm.pair_margin}: it goes with "
            "pair_mode=best_worst and pair_margin=0"
        )
    micro = config.actor.ppo_micro_batch_size_per_gpu
    if micro % 2:
        yield f"actor.ppo_micro_batch_size_per_gpu={micro} must be even: dpo takes pairs of rows"


def _given(config: RunConfig) -> Iterator[str]:
    """Pictures that are given go with losses that need no reward for them, and with a trainer that can encode them."""
    loss = config.actor.diffusion_loss
    if config.data.offline and not loss.spec.takes_given:
        yield (
            f"data.offline=true with loss_mode={loss.loss_mode}: it needs samples that were drawn and scored in this run; use dpo "
            "or sft, or data.offline=false"
        )
    if not config.data.offline and not loss.spec.scored:
        yield f"loss_mode={loss.loss_mode} imitates pictures that are given: set data.offline=true, and data.train_file with them"
    for key, value, nothing in _of_drawing(config) if config.data.offline else ():
        if value != nothing:
            yield f"{key}={value} with data.offline=true: nothing is drawn or compared by reward in training; set {key}={nothing}"
    files = config.data.train_file
    if config.data.offline and not config.data.sources and isinstance(files, str) and files.startswith("builtin:"):
        fields = "prompt, chosen and rejected" if loss.spec.paired else "prompt and image"
        yield f"data.offline=true trains on pictures of yours: give data.train_file=FILE, each line with {fields} (paths)"
    if config.data.offline and config.trainer.staleness:
        yield f"data.offline=true with trainer.staleness={config.trainer.staleness}: nothing is drawn; leave it at 0"
    if config.data.offline and not config.shares_weights:
        yield (
            f"data.offline=true with rollout.backend={config.rollout.backend} and rollout.num_replicas="
            f"{config.rollout.num_replicas}: the training processes encode the pictures themselves; set "
            "rollout.backend=diffusers and rollout.num_replicas=1"
        )


def _watchdog(config: RunConfig) -> Iterator[str]:
    """Who goes back needs a checkpoint to go back to."""
    for name in RULES if not config.trainer.save_every else ():
        if getattr(config.trainer.watchdog, name).action == "rollback":
            yield (
                f"trainer.watchdog.{name}.action=rollback with trainer.save_every=0: there is no checkpoint to go back to; set "
                "trainer.save_every, or action=stop"
            )


def _of_drawing(config: RunConfig) -> Iterator[tuple[str, Any, Any]]:
    """Keys that only say how training samples are drawn and their rewards compared; each with its value and its default."""
    for section, part, names in (
        ("rollout", config.rollout, ("n", "rollout_adapter")),
        ("reward", config.reward, ("combine",)),
        ("algorithm", config.algorithm, ("advantage_std", "advantage_ddof", "advantage_eps", "flat_groups")),
        ("algorithm", config.algorithm, ("pair_mode", "pair_ties", "pair_margin")),
    ):
        for name in names:
            yield f"{section}.{name}", getattr(part, name), getattr(type(part)(), name)


def _support(config: RunConfig) -> Iterator[str]:
    """What a package can do and these programs cannot yet."""
    optim, fsdp, workers = config.actor.optim, config.actor.fsdp_config, config.trainer.num_workers
    size, ranks = fsdp.fsdp_size, fsdp.ulysses_sequence_parallel_size
    if workers % ranks:
        yield (
            f"actor.fsdp_config.ulysses_sequence_parallel_size={ranks} does not divide trainer.num_workers={workers}: that many "
            "workers share a sample; use a divisor"
        )
    rows = config.data.prompts_per_step * config.rows_per_prompt
    if rows < workers // ranks:
        yield (
            f"data.prompts_per_step x {config.rows_per_prompt} = {rows} samples a step leave some of "
            f"trainer.num_workers={workers} without any; use fewer workers, or draw more"
        )
    if size != -1 and workers % size:
        yield f"actor.fsdp_config.fsdp_size={size} does not divide trainer.num_workers={workers}; use -1 for those of one machine"
    if size != -1 and fsdp.sharding == "replicate":
        yield (
            f"actor.fsdp_config.fsdp_size={size} divides the model, and actor.fsdp_config.sharding='replicate' keeps all of it on "
            "every GPU; use sharding=shard, or leave fsdp_size at -1"
        )
    if optim.lr_scheduler_type != "constant" and optim.lr_warmup_steps >= optim.total_training_steps:
        yield (
            f"actor.optim.lr_warmup_steps={optim.lr_warmup_steps} leaves nothing of actor.optim.total_training_steps="
            f"{optim.total_training_steps} for the {optim.lr_scheduler_type} schedule; warm up for fewer steps, or use constant"
        )
    if config.rollout.backend == "vllm_omni" and find_spec("vllm_omni") is None:
        yield (
            f"rollout.backend='vllm_omni' needs vLLM-Omni: uv run --extra vllm apps/{config.app} …, or "
            "uv pip install './packages/omni-rollout[vllm]'"
        )
    for name in missing_trackers(config.trainer.trackers):
        yield (
            f"trainer.trackers names {name}, which is not installed: uv run --extra trackers apps/{config.app} …, or "
            f"pip install './packages/run-report[{name}]'"
        )
    loop = config.rollout.agent.default_agent_loop
    if loop not in LOOPS:  # a class of somebody's own
        try:
            get_agent_loop(loop)
        except RolloutConfigError as error:
            yield f"rollout.agent.default_agent_loop: {error}"
    parallel = [name for name in config.rollout.vllm_omni.engine_kwargs if name.endswith(("_parallel_size", "_degree"))]
    if parallel:
        yield (
            f"rollout.vllm_omni.engine_kwargs sets {', '.join(parallel)}: the engine gets as many GPUs as "
            "rollout.vllm_omni.tensor_model_parallel_size says and no more; set that one"
        )


def check_experts(config: RunConfig, index: Mapping[str, Any]) -> None:
    """Two experts behind one module (Wan2.2 A14B): processes that share its weights must enter the same one together.

    Args:
        index: content of the model's `model_index.json`.
    """
    loss, share = config.actor.diffusion_loss, config.algorithm.step_fraction
    # Whole copies need nothing of each other. A worker asks again once it is known whether they are whole.
    shared = config.trainer.num_workers > 1 and config.actor.fsdp_config.sharding == "shard"
    if index.get("boundary_ratio") is None or not shared or (loss.spec.replays and share == 1):
        return
    cause = f"algorithm.step_fraction={share} draws steps for each sample"
    if not loss.spec.replays:
        cause = f"loss_mode={loss.loss_mode} draws a noise level for each sample"
    raise TrainerError(
        f"model.path={config.model.path!r} has two experts (boundary_ratio={index['boundary_ratio']}), and {cause}: with "
        f"trainer.num_workers={config.trainer.num_workers} processes that share weights would wait for each other in different "
        "experts; set actor.fsdp_config.sharding=replicate or trainer.num_workers=1, or take "
        "a loss that trains the same steps of all samples (algorithm.step_fraction=1)"
    )
