"""The config of a run: structured, typed, composed as defaults < recipe < `key=value` on the command line.

The schema is plain dataclasses and imports without torch. Every default lives in exactly one place: a field here or in the
package that reads it. A recipe is a short YAML file that says only what differs.
"""

from __future__ import annotations

import difflib
import time
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from diffusion_losses.config import DiffusionLossConfig
from fsdp_diffusers_engine.config import DiffusionModelConfig, FSDPDiffusionActorConfig
from omni_rollout.config import DiffusionRolloutConfig

from ray_trainer.errors import TrainerError
from ray_trainer.prompts import resolve

__all__ = [
    "AlgorithmConfig",
    "DataConfig",
    "DiffusionLossConfig",
    "LoopConfig",
    "OldPolicyConfig",
    "RayConfig",
    "RewardConfig",
    "RunConfig",
    "compose",
    "to_yaml",
]


@dataclass
class DataConfig:
    """Prompts: a JSON-lines file with `prompt` and optional `metadata` and `negative_prompt` on each line, or `builtin:NAME`."""

    train_file: str = "builtin:tiny_shapes_train"
    val_file: str = "builtin:tiny_shapes_heldout"
    prompts_per_step: int = 6
    """P; each prompt is sampled `rollout.n` times."""
    val_max_prompts: int = 48
    """Validation draws `rollout.val_kwargs.n` samples of each of the first this many prompts of `val_file`."""


@dataclass
class RewardConfig:
    """Which reward of image_rewards scores a sample, and what a failure of it means for training."""

    name: str = "shapes"
    options: dict[str, Any] = field(default_factory=dict)
    num_workers: int = 1
    num_cpus: float = 0.1
    """CPUs that Ray sets aside for each worker."""
    concurrency: int = 1
    """Samples in flight per worker; more than 1 is for rewards that wait for a server."""
    batch_size: int = 16
    """Most samples handed to a worker at once."""
    policy: str = "required"
    """required: a failure stops the run; skip: the sample leaves its group; value: it counts as `failure_value`."""
    failure_value: float = 0.0
    max_retries: int = 2
    timeout_s: float = 120.0


@dataclass
class OldPolicyConfig:
    """How the policy state `old` follows the trained one: old ← d·old + (1 - d)·new, with
    d = decay_rate·(n - decay_start) held within 0 and decay_max, n the optimizer steps so far.

    Read when `model.policy_state_adapters` holds `old`. DiffusionNFT's published schedules are (rate 0), a plain copy;
    (start 0, rate .001, max .5); and (start 75, rate .0075, max .999).
    """

    update_every: int = 1
    """Training steps between two refreshes."""
    decay_start: int = 0
    decay_rate: float = 0.0
    decay_max: float = 0.0

    def decay(self, optimizer_steps: int) -> float:
        """d after this many optimizer steps."""
        return min(max(self.decay_rate * (optimizer_steps - self.decay_start), 0.0), self.decay_max)


@dataclass
class AlgorithmConfig:
    """From rewards to the numbers that the loss sees."""

    advantage_std: str = "group"
    """Whose standard deviation divides the centred reward: group, batch or none."""
    advantage_ddof: int = 1
    advantage_eps: float = 1e-4
    old_log_probs: str = "rollout"
    """rollout: the sampler's own, when sampler and trainer agree to the bit; trainer: one more forward pass per step."""
    pair_mode: str = "best_worst"
    """Preference pairs of one prompt: best_worst or all (dpo)."""
    pair_margin: float = 0.0
    """Pairs whose rewards differ by no more than this are skipped and counted (dpo)."""
    step_fraction: float = 1.0
    """Share of the window's steps that a sample trains, chosen anew for each; DanceGRPO trains 0.6 of them."""
    old_policy: OldPolicyConfig = field(default_factory=OldPolicyConfig)


@dataclass
class LoopConfig:
    """The loop: how long, how often, where."""

    total_steps: int = 100
    val_before_train: bool = True
    val_every: int = 50
    save_every: int = 20
    keep_checkpoints: int = 2
    run_dir: str = ""
    """Folder of the run; empty makes a new one, runs/RECIPE-DATE-TIME."""
    on_existing: str = "raise"
    """What to do when run_dir exists: raise, resume or delete."""
    seed: int = 0
    num_workers: int = 1
    """Training processes: one per GPU, or one on a CPU."""


@dataclass
class RayConfig:
    """Where the actors live."""

    address: str = ""
    """Empty starts Ray on this machine; "auto" or host:port joins a running cluster."""
    num_cpus: int = 0
    """CPUs that a local Ray offers; 0 takes the cores that this process may use."""
    object_store_mb: int = 256
    worker_threads: int = 0
    """Torch threads of a training process; 0 takes every core."""


@dataclass
class RunConfig:
    """Everything that decides a run. `config.yaml` in the run folder is this, resolved."""

    app: str = "flowgrpo"
    recipe: str = ""
    model: DiffusionModelConfig = field(default_factory=DiffusionModelConfig)
    actor: FSDPDiffusionActorConfig = field(default_factory=FSDPDiffusionActorConfig)
    rollout: DiffusionRolloutConfig = field(default_factory=DiffusionRolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    data: DataConfig = field(default_factory=DataConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    trainer: LoopConfig = field(default_factory=LoopConfig)
    ray: RayConfig = field(default_factory=RayConfig)

    @property
    def shares_weights(self) -> bool:
        """Whether the trainers sample with their own weights; else replicas in other processes do."""
        return self.rollout.backend == "diffusers" and self.rollout.num_replicas == 1

    @property
    def rollout_means(self) -> bool:
        """Whether samples bring the means of their transitions, for a loss that reads the old ones."""
        return self.actor.diffusion_loss.needs_old_means and self.algorithm.old_log_probs == "rollout"

    @property
    def sampling_adapters(self) -> tuple[str, ...]:
        """Policy states that samplers need: `default` validates, `rollout.rollout_adapter` draws what is trained on."""
        return tuple(dict.fromkeys(n for n in ("default", self.rollout.rollout_adapter) if n != "reference"))


def _known_keys(schema: type, prefix: str = "") -> list[str]:
    hints = get_type_hints(schema)
    keys: list[str] = []
    for f in fields(schema):
        kind = hints[f.name]
        keys.append(prefix + f.name)
        if isinstance(kind, type) and is_dataclass(kind):
            keys += _known_keys(kind, f"{prefix}{f.name}.")
    return keys


def _refuse_unknown(node: Any, schema: type, source: str, prefix: str = "") -> None:
    """Raise for the first key of `node` that the schema lacks, naming the nearest one."""
    hints = get_type_hints(schema)
    for key, value in node.items():
        if prefix + str(key) == "actor.model_config":
            raise TrainerError(
                f"config key 'actor.model_config' in {source} is filled in from 'model'; set model.* instead"
            )
        kind = hints.get(str(key))
        if kind is None:
            known = _known_keys(RunConfig)
            name = f"{prefix}{key}"
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
            # A right name under the wrong section is the commonest slip: offer where that leaf lives.
            leaf = [k for k in known if k.split(".")[-1] == str(key)]
            hint = leaf[0] if leaf else (near[0] if near else None)
            raise TrainerError(
                f"unknown config key {name!r} in {source}" + (f"; did you mean {hint!r}?" if hint else "; see --help")
            )
        if isinstance(kind, type) and is_dataclass(kind):
            if not hasattr(value, "items"):
                raise TrainerError(
                    f"config key {prefix + str(key)!r} in {source} is a section, but {value!r} was given"
                )
            _refuse_unknown(value, kind, source, f"{prefix}{key}.")


def _load_recipe(file: Path, above: tuple[Path, ...] = ()) -> Any:
    """A recipe over the one that it names under `base` (`builtin:NAME`, or a file beside it), each checked by itself."""
    from omegaconf import DictConfig, OmegaConf

    recipe = OmegaConf.load(file)
    if not isinstance(recipe, DictConfig):
        raise TrainerError(f"recipe {str(file)!r} is not a mapping of config keys; see --help for an example")
    base = recipe.pop("base", None)
    _refuse_unknown(OmegaConf.to_container(recipe, resolve=False), RunConfig, f"recipe {file.name}")
    if base is None:
        return recipe
    below = file.parent / resolve("recipes", str(base))
    if not below.is_file():
        raise TrainerError(f"recipe {file.name} is based on {base!r}, and there is no file {below}")
    chain = (*above, file.resolve())
    if below.resolve() in chain:
        raise TrainerError(
            f"recipe {file.name} is based on {below.name}, which is based on it; a base must end somewhere"
        )
    return _over(_load_recipe(below, chain), recipe)


def _over(below: Any, above: Any) -> Any:
    """One layer of config over another. Options belong to their reward: another reward does not get them."""
    from omegaconf import OmegaConf

    name = OmegaConf.select(above, "reward.name")
    if name is not None and name != OmegaConf.select(below, "reward.name") and "reward" in below:
        below.reward.options = {}
    return OmegaConf.merge(below, above)


def compose(app: str, recipe_file: Path, overrides: list[str]) -> RunConfig:
    """Defaults < recipe file (over its base) < overrides, checked against the schema.

    Args:
        app: name of the program, stored in the config.
        recipe_file: YAML file.
        overrides: `key=value` strings, values in YAML.

    Raises:
        TrainerError: an unknown key (the nearest one is named), a value of the wrong type, or a file that is no YAML mapping.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        recipe = _load_recipe(recipe_file)
        given = OmegaConf.from_dotlist(overrides)
        _refuse_unknown(OmegaConf.to_container(given, resolve=False), RunConfig, "the command line")
        # One place for each fact: the engine's config holds the model too, and gets it from here.
        fixed = {"app": app, "recipe": recipe_file.stem, "actor": {"model_config": "${model}"}}
        merged = OmegaConf.merge(OmegaConf.structured(RunConfig), _over(recipe, given), fixed)
        config = OmegaConf.to_object(merged)
    except (OmegaConfBaseException, YAMLError, ValueError) as error:
        if isinstance(error, TrainerError):
            raise
        text = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
        raise TrainerError(f"the config does not fit: {text}") from error
    assert isinstance(config, RunConfig)
    config.trainer.run_dir = config.trainer.run_dir or f"runs/{config.recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
    if config.actor.optim.total_training_steps < 0:
        config.actor.optim.total_training_steps = config.trainer.total_steps * updates_per_step(config)
    if config.rollout.seed is None:
        config.rollout.seed = config.trainer.seed
    return config


def updates_per_step(config: RunConfig) -> int:
    """Optimizer steps of one training step when every row is trained on: equal rewards and ties leave fewer rows."""
    rows = config.data.prompts_per_step * config.rollout.n
    if config.actor.diffusion_loss.loss_mode == "dpo" and config.algorithm.pair_mode == "best_worst":
        rows = 2 * config.data.prompts_per_step
    return -(-rows // config.actor.ppo_mini_batch_size) * config.actor.ppo_epochs


def to_yaml(config: RunConfig) -> str:
    """The resolved config as YAML, in schema order."""
    from omegaconf import OmegaConf

    node: Any = OmegaConf.create(OmegaConf.to_container(OmegaConf.structured(config), resolve=True))
    del node["actor"]["model_config"]  # the same as "model"
    return OmegaConf.to_yaml(node)
