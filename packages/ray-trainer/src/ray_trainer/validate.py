"""Refuse, before anything is started or written, what cannot work; and say in a few lines what will run."""

from __future__ import annotations

import json
from pathlib import Path

from ray_trainer.config import RunConfig, updates_per_step
from ray_trainer.errors import TrainerError
from ray_trainer.prompts import Prompt, PromptSampler, load_prompts, resolve
from ray_trainer.run_dir import check_run_dir


def _check_model(location: str) -> str:
    """The pipeline class of a model folder."""
    folder = Path(resolve("models", location))
    index = folder / "model_index.json"
    if not index.is_file():
        raise TrainerError(
            f"model.path={location!r} holds no diffusers pipeline (no {index}); give the folder that "
            "DiffusionPipeline.save_pretrained wrote, or builtin:tiny_qwen_image"
        )
    try:
        pipeline = json.loads(index.read_text(encoding="utf-8"))["_class_name"]
    except (json.JSONDecodeError, KeyError) as error:
        raise TrainerError(f"{index} is no pipeline index ({error!r}); save the pipeline again") from error
    missing = [part for part in ("transformer", "vae") if not (folder / part / "config.json").is_file()]
    if missing:
        raise TrainerError(
            f"model.path={location!r} lacks {', '.join(missing)}/config.json; copy the whole pipeline folder"
        )
    return str(pipeline)


def _check_reward(config: RunConfig, prompts: dict[str, list[Prompt]]) -> None:
    """The reward's name and options, and that every prompt holds the target which the reward needs.

    The reward made here reads targets only; the ones that score are made in their workers.
    """
    from image_rewards import load
    from image_rewards.errors import RewardError
    from image_rewards.targets import check_prompts

    name, options = config.reward.name, config.reward.options
    try:
        reward = load(name, **options)
        check_prompts(
            reward,
            (
                (f"{file}, {p.uid.replace('line', 'line ')}", p.text, p.metadata)
                for file, ps in prompts.items()
                for p in ps
            ),
        )
    except RewardError as error:
        lines = str(error).splitlines()
        raise TrainerError(f"reward {name!r} with options {options!r}: {' '.join(lines[:2])}") from error


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise TrainerError(message)


def validate_config(config: RunConfig) -> list[str]:
    """Check values, files and folders of a config.

    Returns:
        What will run, a line each.

    Raises:
        TrainerError: the first thing that cannot work, with the key, its value and what to change.
    """
    r, t, d, a = config.rollout, config.trainer, config.data, config.actor
    pipeline = _check_model(config.model.path)
    train, val = load_prompts(d.train_file), load_prompts(d.val_file)
    PromptSampler(train, d.prompts_per_step, t.seed)
    _check_reward(config, {d.train_file: train, d.val_file: val})
    _require(
        r.n >= 2, f"rollout.n={r.n} is too small: advantages compare the samples of one prompt, so give at least 2"
    )
    _require(
        config.algorithm.advantage_std in ("group", "batch", "none"),
        f"algorithm.advantage_std={config.algorithm.advantage_std!r} must be group, batch or none",
    )
    _require(
        config.algorithm.old_log_probs in ("rollout", "trainer"),
        f"algorithm.old_log_probs={config.algorithm.old_log_probs!r} must be rollout or trainer",
    )
    _require(
        config.reward.policy in ("required", "skip", "value"),
        f"reward.policy={config.reward.policy!r} must be required, skip or value",
    )
    # What other parts can do and the loop cannot yet: refused, never ignored.
    _require(
        r.backend == "diffusers",
        f"rollout.backend={r.backend!r} is not connected to the loop yet; use diffusers (the engine runs alone in omni-rollout)",
    )
    _require(
        r.num_replicas == 1,
        f"rollout.num_replicas={r.num_replicas} needs engines of their own; the diffusers backend has 1",
    )
    _require(
        config.model.lora_rank >= 1,
        f"model.lora_rank={config.model.lora_rank}: the loop trains a LoRA; full fine-tuning is in fsdp-diffusers-engine so far",
    )
    for key, value in (
        ("trainer.total_steps", t.total_steps),
        ("trainer.num_workers", t.num_workers),
        ("rollout.val_kwargs.n", r.val_kwargs.n),
        ("data.val_max_prompts", d.val_max_prompts),
        ("actor.ppo_mini_batch_size", a.ppo_mini_batch_size),
        ("reward.num_workers", config.reward.num_workers),
    ):
        _require(value >= 1, f"{key}={value} must be at least 1")
    for key, value in (("trainer.val_every", t.val_every), ("trainer.save_every", t.save_every)):
        _require(value >= 0, f"{key}={value} must be 0 (never, but for the end) or a number of steps")
    for key, value in (
        ("data.prompts_per_step x rollout.n", d.prompts_per_step * r.n),
        ("actor.ppo_mini_batch_size", a.ppo_mini_batch_size),
    ):
        _require(value % t.num_workers == 0, f"{key} = {value} must divide by trainer.num_workers={t.num_workers}")
    check_run_dir(t.run_dir, t.on_existing)
    samples = d.prompts_per_step * r.n
    held_out = min(len(val), d.val_max_prompts)
    return [
        f"trains {pipeline} at {r.pipeline.height}x{r.pipeline.width} with loss {a.diffusion_loss.loss_mode}, "
        f"LoRA rank {config.model.lora_rank}, reward {config.reward.name}",
        f"{t.total_steps} steps of {d.prompts_per_step} prompts x {r.n} samples = {samples} samples, "
        f"{updates_per_step(config)} update(s) each",
        f"validation on {held_out} prompts x {r.val_kwargs.n} samples of {d.val_file}",
        f"run folder {t.run_dir}",
    ]
