"""Refuse, before anything is started or written, what cannot work; and say in a few lines what will run."""

from __future__ import annotations

import math
import warnings
from importlib.util import find_spec
from pathlib import Path

from fsdp_diffusers_engine.errors import EngineError
from fsdp_diffusers_engine.targets import resolve_targets
from model_specs.base import ModelSpec
from model_specs.errors import SpecError
from model_specs.registry import available
from omni_rollout.errors import RolloutConfigError
from omni_rollout.specs import pipeline_class

from .card_memory import check_split
from .cluster import check_ray
from .config import RunConfig, to_tree, updates_per_step
from .errors import TrainerError
from .given import check_given
from .keys import check_values
from .model_folder import check_folder, linear_layers, part_shapes, read_index, size_multiple, transformers
from .models import locate, spec_class
from .no_secrets import check_secrets
from .prompts import Prompt, PromptSampler, check_lengths, load_prompt_sets
from .resume import check_resume
from .rules import check_experts, check_rules
from .run_dir import check_run_dir


def validate_config(config: RunConfig) -> list[str]:
    """Check values, files and folders of a config.

    Returns:
        What will run, a line each.

    Raises:
        TrainerError: the first thing that cannot work, with the key, its value and what to change.
    """
    r, t, d, loss = config.rollout, config.trainer, config.data, config.actor.diffusion_loss
    check_secrets(to_tree(config))  # before any message that repeats a value
    check_values(RunConfig, to_tree(config))  # `compose` did; a config that was made in Python comes here first
    check_rules(config)
    spec, folder, notes = _check_model(config)
    if r.backend == "vllm_omni":
        try:
            pipeline_class(spec, r.vllm_omni.step_execution)
        except RolloutConfigError as error:
            raise TrainerError(f"rollout.backend={r.backend!r}: {error}") from error
    notes += _check_first_lora(config, spec)
    train, val = load_prompt_sets(d)
    drawn = PromptSampler(train, d, t.seed).counts
    if d.offline:
        check_given(config, spec, train)
    _check_reward(config, val if d.offline else [*train, *val])
    if folder is not None:
        _check_drawn(config, spec, folder, train, val)
    check_ray(config.ray)
    check_run_dir(t.run_dir, t.on_existing)
    notes += check_resume(config, {"data.train_file": train, "data.val_file": val})
    if r.val_kwargs.pipeline.num_frames > 1 and find_spec("av") is None:
        notes.append(
            f"videos are kept as three frames each; for mp4 files: uv run --extra video apps/{config.app} …, or "
            "pip install './packages/run-report[video]'"
        )
    old, corrected = config.algorithm.old_log_probs, config.algorithm.rollout_correction.mode != "none"
    if t.staleness and loss.spec.replays and old != "rollout" and not corrected:
        notes.append(
            f"warning: trainer.staleness=1 with algorithm.old_log_probs={old} takes samples of the policy before for samples of "
            "the present one; set algorithm.rollout_correction.mode=decoupled, or algorithm.old_log_probs=rollout"
        )
    if config.actor.optim.lr > LARGE_LR:
        notes.append(f"warning: actor.optim.lr={config.actor.optim.lr:g} is very large; recipes use 1e-5 to 2e-3")
    per_prompt, kind = config.rows_per_prompt, "given" if d.offline else "samples"
    samples, held_out = d.prompts_per_step * per_prompt, min(len(val), d.val_max_prompts)
    source = d.val_file or f"{len(val)} held-out prompts of {d.train_file}, always the same; {len(train)} train"
    if d.sources:
        source = "the sources by turns"
        notes.append(f"prompts of a step: {', '.join(f'{count} of {name}' for name, count in drawn.items())}")
    if len(config.reward.several) > 1:
        notes.append(f"rewards are combined by {config.reward.combine}")
    shown = [f"{name} ({one.name}, weight {one.weight:g})" for name, one in config.reward.several.items()]
    return [
        f"trains {spec.pipeline_class} at {r.pipeline.height}x{r.pipeline.width} with loss {loss.loss_mode}, "
        f"{_trained(config)}, reward {', '.join(shown) or config.reward.name}",
        *notes,
        f"{t.total_steps} steps of {d.prompts_per_step} prompts x {per_prompt} {kind} = {samples} samples, "
        f"{updates_per_step(config)} update(s) each",
        f"validation on {held_out} prompts x {r.val_kwargs.n} samples of {source}",
        f"run folder {t.run_dir}",
    ]


def _trained(config: RunConfig) -> str:
    """What is trained, in words."""
    ema = ", validated as its average" if config.trainer.val_weights == "ema" else ""
    merged = " (merged for sampling)" if config.sync_mode == "merged" else ""
    return (f"LoRA rank {config.model.lora_rank}{merged}" if config.model.lora_rank else "all weights") + ema


def _check_model(config: RunConfig) -> tuple[ModelSpec, Path | None, list[str]]:
    """The spec of a model, its folder where it is here, and what to say beforehand. Nothing is downloaded."""
    model = config.model
    location, named = model.path, None if model.architecture is None else spec_class(model.architecture)
    folder = locate(location)
    if folder is None:
        if named is None:
            raise TrainerError(
                f"model.path={location!r} is neither a folder nor, as a Hugging Face Hub id, in the local cache; correct "
                f"it, or set model.architecture ({', '.join(available())}) to have it downloaded when training starts"
            )
        return named(), None, [f"model {location} is not on this machine; it will be downloaded when training starts"]
    index = folder / "model_index.json"
    if not index.is_file():
        raise TrainerError(
            f"model.path={location!r} holds no diffusers pipeline (no {index}); give the folder that "
            "DiffusionPipeline.save_pretrained wrote, a Hugging Face Hub id, or builtin:tiny_qwen_image"
        )
    pipeline = read_index(folder)["_class_name"]
    if named is not None and named.pipeline_class != pipeline:
        raise TrainerError(
            f"model.architecture={model.architecture!r} means {named.pipeline_class}, but model.path={location!r} is a {pipeline}; "
            "change one of them"
        )
    try:
        spec = check_folder(folder, model.architecture)
    except (TrainerError, SpecError) as error:
        raise TrainerError(f"model.path={location!r}: {error}") from error
    if not type(spec).__module__.startswith("model_specs."):
        return spec, folder, []  # it knows its own folder
    there, wanted = transformers(folder), model.transformer_subfolder
    if wanted not in (None, *there):
        raise TrainerError(f"model.transformer_subfolder={wanted!r} is none of {', '.join(there)}")
    shapes = [part_shapes(folder, part) for part in ([wanted] if wanted else there)]
    try:
        for tensors in shapes:
            resolve_targets(list(linear_layers(tensors)), model, spec)
    except EngineError as error:
        raise TrainerError(f"model.{error}") from error
    return spec, folder, _warn_about_size(config, sum(map(math.prod, shapes[0].values())))


FULL_SIZE = 1e9
"""Parameters from which a transformer is no longer a toy: the smallest published one here has 2.2e9."""


def _warn_about_size(config: RunConfig, parameters: int) -> list[str]:
    """What a recipe for a tiny policy would do to a model of full size: one line with the keys to change, or none."""
    rows, lr = config.actor.ppo_micro_batch_size_per_gpu, config.actor.optim.lr
    gigabytes = 4 * parameters / 1e9
    wanted = {
        "model.enable_gradient_checkpointing=true (all activations are kept)": not config.model.enable_gradient_checkpointing,
        f"actor.ppo_micro_batch_size_per_gpu=8 (now {rows})": rows > 16,
        f"actor.optim.lr=3e-4 (now {lr:g})": lr > 5e-4,
        f"actor.fsdp_config.model_dtype=bf16 (fp32 weights take {gigabytes:.0f} GB)": config.actor.fsdp_config.model_dtype
        == "fp32",
    }
    keys = [key for key, due in wanted.items() if due]
    if parameters < FULL_SIZE or not keys:
        return []
    return [
        f"warning: {config.recipe} is made for a tiny policy, and this transformer has {parameters / 1e9:.1f} billion parameters; "
        f"set {', '.join(keys)}, or start from a recipe for full size (--help lists them)"
    ]


def _check_first_lora(config: RunConfig, spec: ModelSpec) -> list[str]:
    """Read the LoRA that training starts from: a file of another kind or model ends here. Returns what to say about it."""
    path, rank = config.model.lora_adapter_path, config.model.lora_rank
    if path is None:
        return []
    from lora_sync import LoRASyncError, load_any

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            payload, _ = load_any(path, architecture=spec.lora_names)
        except (LoRASyncError, OSError) as error:
            raise TrainerError(f"model.lora_adapter_path={path!r}: {error}") from error
    for name, tensor in payload.tensors.items():
        if ".lora_A." in name and len(tensor) != rank:
            raise TrainerError(
                f"model.lora_adapter_path={path!r} has rank {len(tensor)}, and model.lora_rank={rank}; set them to the same"
            )
    return [f"model.lora_adapter_path: {warning.message}" for warning in said]


def _check_drawn(config: RunConfig, spec: ModelSpec, folder: Path, train: list[Prompt], val: list[Prompt]) -> None:
    """What depends on the model's own numbers: experts, heads, sizes of pictures and lengths of prompts."""
    check_experts(config, read_index(folder))
    multiple, validation = size_multiple(spec), config.rollout.val_kwargs.pipeline
    for key, drawn in (("rollout.pipeline", config.rollout.pipeline), ("rollout.val_kwargs.pipeline", validation)):
        for name, side in (("height", drawn.height), ("width", drawn.width)):
            if side % multiple:
                raise TrainerError(
                    f"{key}.{name}={side} must be a multiple of {multiple} for this model, such as "
                    f"{max(round(side / multiple), 1) * multiple}"
                )
    check_split(config, folder, multiple)
    check_lengths(spec, folder, train, config.rollout.pipeline)
    check_lengths(spec, folder, val[: config.data.val_max_prompts], validation)


def _check_reward(config: RunConfig, prompts: list[Prompt]) -> None:
    """The rewards' names and options, and that every prompt holds the target which its rewards need.

    The rewards made here read targets only; the ones that score are made in their workers.
    """
    from image_rewards import load
    from image_rewards.errors import RewardError
    from image_rewards.targets import check_prompts

    for key, reward in config.reward.each.items():
        using = [p for p in prompts if key in (config.rewards_of(p.source))]
        try:
            made = load(reward.name, **reward.options)
            check_prompts(made, ((p.where, p.text, p.metadata) for p in using))
        except RewardError as error:
            lines, label = str(error).splitlines(), f"reward.several.{key} " if key else "reward "
            raise TrainerError(
                f"{label}{reward.name!r} with options {reward.options!r}: {' '.join(lines[:2])}"
            ) from error


LARGE_LR = 0.02
"""Ten times the largest rate of a shipped recipe; AdamW moves every weight of a LoRA by about this much in a step."""
