"""Going on with a run: only by the config that it began with, but for what a person allows and what decides no result."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from run_report.changes import ConfigChange, within

from . import checkpoint
from .config import RunConfig, to_tree, to_yaml
from .errors import TrainerError
from .keys import kind_of
from .prompts import Prompt
from .run_dir import RunDir, is_config
from .values import free, read_yaml

ALWAYS = (
    # how long and how often, where, and what is kept
    *("recipe", "trainer.total_steps", "trainer.max_hours", "trainer.val_before_train", "trainer.val_every"),
    *("trainer.save_every", "trainer.trackers", "trainer.watchdog"),
    *("trainer.keep_checkpoints", "trainer.run_dir", "trainer.on_existing", "trainer.allow_config_change"),
    "actor.checkpoint.save_contents",
    # which machines, how much of them, and how long they may take
    *(
        "ray",
        "reward.num_workers",
        "reward.num_cpus",
        "reward.num_gpus",
        "reward.share_trainers_gpus",
        "reward.concurrency",
    ),
    *("reward.max_retries", "reward.timeout_s", "reward.frame_timeout_s"),
    *("rollout.router", "rollout.placement", "rollout.vllm_omni.openai_port", "rollout.vllm_omni.enable_sleep_mode"),
    *("actor.fsdp_config.timeout_s", "actor.fsdp_config.peak_tflops"),
    # where tensors wait: the same numbers are computed
    *("actor.fsdp_config.offload_policy", "actor.fsdp_config.param_offload", "actor.fsdp_config.optimizer_offload"),
    *("actor.fsdp_config.state_offload", "rollout.sync"),
    *("actor.fsdp_config.activation_offload", "actor.fsdp_config.reshard_after_forward"),
    *("actor.fsdp_config.forward_prefetch", "model.enable_gradient_checkpointing"),
)
"""Keys and sections that may differ when a run goes on: none of them decides a result."""

NEVER = (
    *("app", "model.architecture", "model.transformer_subfolder", "model.transformer_config", "model.lora_rank"),
    *("model.lora_alpha", "model.target_modules", "model.exclude_modules", "model.policy_state_adapters"),
)
"""Keys that decide which tensors a checkpoint holds and what they mean: no permission makes them fit."""

PROMPT_FILES = ("data.train_file", "data.val_file")
_DECAY = "actor.optim.total_training_steps"
_INPUTS = "inputs.json"
_ENTRY = re.compile(r"^(reward)\.several\.\w+\.")
_OPTIONS = (
    "reward.options",
    "reward.several",
    "data.sources",
    "rollout.vllm_omni.engine_kwargs",
    "model.transformer_config",
)


def _fingerprint(prompts: Sequence[Prompt]) -> str:
    rows = [asdict(prompt) | {"where": ""} for prompt in prompts]  # the place of a file decides nothing
    for row in rows:
        del row["folder"]
        if not row["source"]:
            del row["source"]  # as versions without sources wrote it
    text = json.dumps(rows, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """A config's tree by dotted keys."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    if prefix and not tree:
        return {}
    return {k: v for key, value in tree.items() for k, v in flat(value, f"{prefix}.{key}".lstrip(".")).items()}


def _hashes(file: Path) -> dict[str, Any]:
    """Hashes of the prompts that a run began with; none in the folder of an older version."""
    if not file.is_file():
        return {}
    try:
        hashes = json.loads(file.read_bytes())
        if isinstance(hashes, dict):
            return hashes
    except (ValueError, RecursionError):
        pass
    raise TrainerError(
        f"{file} is damaged: it must hold the hashes of the run's prompts; delete it to go on without them"
    )


def _follows_length(flat: Mapping[str, Any]) -> bool:
    """Whether the learning rate ends with the run: then its length follows `trainer.total_steps`, and may change with it."""
    return bool(flat[_DECAY] % flat["trainer.total_steps"] == 0) or flat["actor.optim.lr_scheduler_type"] == "constant"


def differences(config: RunConfig, prompts: Mapping[str, Sequence[Prompt]]) -> list[ConfigChange]:
    """What decides results and is not as in the run folder, when its run goes on.

    Args:
        config: the new one.
        prompts: by key of their file; files are compared by what they hold, wherever they lie.
    """
    folder = Path(config.trainer.run_dir)
    goes_on = config.trainer.on_existing == "resume" and (folder / "config.yaml").is_file()
    step = checkpoint.latest(folder / "checkpoints") if goes_on else None
    if step is None:
        return []
    written = read_yaml(folder / "config.yaml", str(folder / "config.yaml"))
    if not is_config(written):
        raise TrainerError(
            f"{folder / 'config.yaml'} is not one that a run wrote, so what the run began with is unknown; put it back, or choose "
            "another trainer.run_dir"
        )
    old = flat(free(written, "config.yaml", "the run folder"))
    new, defaults = flat(to_tree(config)), flat(to_tree(RunConfig()))
    # A key that the older version of the program lacked counts as its default; one that the newer lacks, as unchanged.
    before = {key: old.get(key, defaults.get(key)) for key in {*old, *new}}
    after = {key: new.get(key, None if within(key, _OPTIONS) else before[key]) for key in before}
    if _follows_length(before) and _follows_length(after):
        after[_DECAY] = before[_DECAY]
    inputs = _hashes(folder / _INPUTS)
    for key in PROMPT_FILES:
        if key not in inputs:
            continue
        if inputs[key] == _fingerprint(prompts[key]):
            before[key] = after[key]
        elif before[key] == after[key]:
            after[key] = f"{after[key]}, whose prompts are others now"
    return [
        ConfigChange(step, key, before[key], after[key])
        for key in sorted(before)
        if before[key] != after[key] and not within(_ENTRY.sub(r"\1.", key), ALWAYS)
    ]


def check_resume(config: RunConfig, prompts: Mapping[str, Sequence[Prompt]]) -> list[str]:
    """What to say about a run that goes on with allowed changes, or from an older checkpoint than its newest, a line each.

    Raises:
        TrainerError: a change that is not allowed, or a name in `trainer.allow_config_change` that no key has.
    """
    allowed = config.trainer.allow_config_change
    for name in allowed:
        if kind_of(name) is None:
            raise TrainerError(
                f"trainer.allow_config_change={allowed} names {name!r}, which is no config key; see --dry-run"
            )
    found = differences(config, prompts)
    folder = config.trainer.run_dir
    # Drawing ahead keeps one policy state more where the loss compares with what drew.
    kept = ("trainer.staleness",) if config.actor.diffusion_loss.needs_old_velocity else ()
    never = [change for change in found if within(change.key, (*NEVER, *kept))]
    if never:
        raise TrainerError(
            f"run {folder!r} was trained with other tensors ({'; '.join(map(str, never))}), and its checkpoints fit no others; "
            "go on with the old values, or start a new run with another trainer.run_dir"
        )
    refused = [change for change in found if not within(change.key, allowed)]
    if refused:
        keys = ",".join(dict.fromkeys(change.key for change in refused))
        raise TrainerError(
            f"run {folder!r} was begun by another config ({'; '.join(map(str, refused))}); give the old values, or allow the "
            f"change with trainer.allow_config_change=[{keys}]"
        )
    goes_on = config.trainer.on_existing == "resume"
    notes = checkpoint.passed_over(Path(folder) / "checkpoints") if goes_on else []
    return [*notes, *(f"from step {change.step} on another {change}" for change in found)]


def begin(run: RunDir, config: RunConfig, prompts: Mapping[str, Sequence[Prompt]]) -> None:
    """Write what the run is made of into its folder, once it is sure that it goes on: `config.yaml` and its prompts' hashes."""
    hashes = {key: _fingerprint(prompts[key]) for key in PROMPT_FILES}
    for file, text in ((run.config, to_yaml(config)), (run.path / _INPUTS, json.dumps(hashes, indent=1) + "\n")):
        draft = file.with_name(f"{file.name}.tmp")  # a full disk costs the draft and not what the run began with
        draft.write_text(text, encoding="utf-8")
        draft.replace(file)
