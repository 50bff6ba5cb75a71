"""The config of a run: structured, typed, composed as defaults < recipe < `key=value` on the command line.

The schema is plain dataclasses and imports without torch. A key is one field, here or in the package that reads it: its name, its
default, and in its type the words or the range that it takes (`omni_rollout.allowed`). A recipe is a short YAML file that says only
what differs.
"""

from __future__ import annotations

import difflib
import os
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache, partial
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from annotated_types import Interval, Len
from diffusion_losses.config import NotNegative
from diffusion_losses.decay import old_policy_decay
from fsdp_diffusers_engine.config import DREW, DiffusionModelConfig, FSDPDiffusionActorConfig
from omni_rollout.allowed import Count, CountOrZero, Seconds, Seed, fault, kinds
from omni_rollout.config import DiffusionRolloutConfig
from yaml import MappingNode, Node, ScalarNode

from .assets import resolve
from .doors import importable
from .errors import TrainerError
from .values import Reference, convert, dump, expand, free, is_section, parse_yaml, read_yaml, section

Thousands = Annotated[int, Interval(ge=1, le=10_000)]
Weight = Annotated[float, Interval(ge=-1e9, le=1e9)]
Share = Annotated[float, Interval(ge=0, le=1)]
SyncMode = Literal["lora", "merged", "full"]


@dataclass
class PromptSource:
    """One of several places that prompts come from."""

    train_file: str | list[str] = ""
    """As `data.train_file`."""
    val_file: str | list[str] = ""
    """As `data.val_file`."""
    share: Annotated[float, Interval(gt=0, le=1e9)] = 1.0
    """Its part of every step's prompts, against the other sources' shares; see `prompts.counts`."""
    rewards: list[str] = field(default_factory=list)
    """Names in `reward.several` that score its samples; empty takes all."""


@dataclass
class DataConfig:
    """Prompts. A file is JSON lines, a JSON list, text, CSV, TSV or Parquet, a data set on disk, or a folder of these, or
    `builtin:NAME`; `[a,b]` is a list of them. A prompt may bring `negative_prompt` and `metadata`; see
    `image_rewards.prompt_files`."""

    train_file: str | list[str] = "builtin:tiny_shapes_train"
    """Prompts to train on."""
    val_file: str | list[str] = "builtin:tiny_shapes_heldout"
    """Empty holds out a tenth of the training file's texts, always the same ones; so does a train_file given without it."""
    sources: dict[str, PromptSource] = field(default_factory=dict)
    """Several places by name, in place of `train_file` and `val_file`."""
    prompts_per_step: Count = 6
    """P; each prompt is sampled `rollout.n` times."""
    offline: bool = False
    """Train on finished pictures that the prompts of `train_file` bring, `chosen` and `rejected` (dpo) or `image` (sft); nothing is
    drawn or scored but in validation. See `given`."""
    val_max_prompts: Count = 48
    """Validation draws `rollout.val_kwargs.n` samples of each of the first this many prompts of `val_file`."""


@dataclass
class RewardPool:
    """One reward of image_rewards, what scores with it, and what a failure of it means for training."""

    name: str = ""
    """A name of image_rewards, an installed one's, "module:attribute" or "./file.py:attribute"."""
    options: dict[str, Any] = field(default_factory=dict)
    """What that reward takes."""
    num_workers: Thousands = 1
    """Processes that score."""
    num_cpus: Annotated[float, Interval(ge=0, le=10_000)] = 0.1
    """CPUs that Ray sets aside for each worker."""
    num_gpus: Annotated[float, Interval(ge=0, le=8)] = 0.0
    """GPUs of each worker, or the share of one; a reward of this package that runs a network then runs there."""
    share_trainers_gpus: bool = False
    """Whether these are the trainers' GPUs, and the reward leaves them during the update; else GPUs of its own."""
    concurrency: Thousands = 1
    """Samples in flight per worker; more than 1 is for rewards that wait for a server."""
    batch_size: Count = 16
    """Most pictures handed to a worker at once; of videos, most frames, but at least one video."""
    policy: Literal["required", "skip", "value"] = "required"
    """required: a failure stops the run; skip: the sample leaves its group; value: it counts as `failure_value`."""
    failure_value: Annotated[float, Interval(ge=-1e9, le=1e9)] = 0.0
    """The score of a sample that could not be scored, with `policy=value`."""
    max_retries: Annotated[int, Interval(ge=0, le=1000)] = 2
    """Further attempts at a sample."""
    timeout_s: Seconds = 120.0
    """Longest time of one attempt."""
    frame_timeout_s: Annotated[float, Interval(ge=0, le=1e7)] = 0.0
    """What each frame of a video adds to `timeout_s`."""


@dataclass
class NamedReward(RewardPool):
    """One of several rewards. What it does not set it takes from `reward`, but for name, options and weight."""

    weight: Weight = 1.0
    """Its part of the sum; 0 logs a reward without training on it."""


@dataclass
class RewardConfig(RewardPool):
    """What scores a sample: one reward, or several by name."""

    name: str = "shapes"
    """A name of image_rewards, an installed one's, "module:attribute" or "./file.py:attribute"."""
    several: dict[str, NamedReward] = field(default_factory=dict)
    """Rewards by a name of one's own, in place of `reward.name`. Each has a curve, `reward/NAME_mean` and `val/NAME_mean`."""
    combine: Literal["weighted_sum", "gdpo"] = "weighted_sum"
    """weighted_sum: advantages of the sum of weight x score. gdpo: every reward is normalised within its group first, then
    summed by weight, then normalised over the batch (GDPO, arXiv 2601.05242), so that its scale does not matter."""

    @property
    def each(self) -> dict[str, NamedReward]:
        """Every reward by its name; "" is the one of `reward.name`."""
        own = {f.name: getattr(self, f.name) for f in fields(RewardPool)}
        return self.several or {"": NamedReward(**own)}

    @property
    def own_gpus(self) -> float:
        """GPUs that no trainer and no engine has."""
        return sum(one.num_workers * one.num_gpus for one in self.each.values() if not one.share_trainers_gpus)


@dataclass
class OldPolicyConfig:
    """How the policy state `old` follows the trained one: old ← d·old + (1 - d)·new, with
    d = decay_rate·(n - decay_start) held within 0 and decay_max, n the optimizer steps so far.

    Read when `model.policy_state_adapters` holds `old`. DiffusionNFT's published schedules are (rate 0), a plain copy;
    (start 0, rate .001, max .5); and (start 75, rate .0075, max .999).
    """

    update_every: Count = 1
    """Training steps between two refreshes."""
    decay_start: CountOrZero = 0
    """Optimizer steps until d begins to rise."""
    decay_rate: Share = 0.0
    """How much d rises with each."""
    decay_max: Share = 0.0
    """What d rises to at most."""

    def decay(self, optimizer_steps: int) -> float:
        """d after this many optimizer steps."""
        return old_policy_decay(optimizer_steps, self.decay_start, self.decay_rate, self.decay_max)


@dataclass
class RolloutCorrectionConfig:
    """What is done about samples of a policy that is not quite the trained one; see `diffusion_losses.correction`.

    A ratio here is exp(trainer's log-prob - rollout's), and log-probs are means over latent elements.
    """

    mode: Literal["none", "decoupled", "bypass"] = "none"
    """decoupled: the clip is around the trainer's policy at the start of the step, and each element is weighted by its ratio;
    bypass: the clip is around the rollout's policy, without weights. Both cost one forward pass per step."""
    level: Literal["step", "trajectory", "trajectory_mean"] = "step"
    """What has a ratio: each step, or the window as a whole, as the product or the geometric mean of its steps."""
    cap: Annotated[float, Interval(gt=0, le=1e9)] = 2.0
    """Weights are at most this (decoupled)."""
    reject: Annotated[list[NotNegative], Len(2, 2)] | None = None
    """[low, high]: what has a ratio outside is not trained; null trains all."""


@dataclass
class AlgorithmConfig:
    """From rewards to the numbers that the loss sees."""

    advantage_std: Literal["group", "batch", "none"] = "group"
    """Whose standard deviation divides the centred reward: group, batch or none."""
    advantage_ddof: Literal[0, 1] = 1
    """What is taken off the number of samples in that deviation."""
    advantage_eps: Share = 1e-4
    """Added to that deviation."""
    flat_groups: Literal["keep", "drop"] = "keep"
    """Samples whose prompt's samples all have one reward, which compare with nothing and have advantage 0. keep: they are
    trained on, so they count in the loss's mean and in the KL (DiffusionNFT, AWM, DanceGRPO, MixGRPO, verl-omni); drop: they
    are left out before the update (flow_grpo). A sample without a score is always left out."""
    old_log_probs: Literal["rollout", "trainer", "auto"] = "rollout"
    """rollout: the sampler's own, when sampler and trainer agree to the bit; trainer: one more forward of what is trained after the
    first optimizer step, or of all; auto: as the difference of the two at the first step says, against the loss's clip."""
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
    pair_mode: Literal["best_worst", "all"] = "best_worst"
    """Preference pairs of one prompt: best_worst or all (dpo)."""
    pair_ties: Literal["skip", "keep"] = "skip"
    """What becomes of a prompt whose samples all have one reward, with pair_mode best_worst and pair_margin 0: skip counts it; keep
    makes a pair of it all the same, as flow_grpo and verl-omni do (dpo)."""
    pair_margin: Annotated[float, Interval(ge=0, le=1e9)] = 0.0
    """Pairs whose rewards differ by no more than this are skipped and counted (dpo)."""
    step_fraction: Annotated[float, Interval(gt=0, le=1)] = 1.0
    """Share of the window's steps that a sample trains, chosen anew for each; DanceGRPO trains 0.6 of them."""
    old_policy: OldPolicyConfig = field(default_factory=OldPolicyConfig)
    options: dict[str, Any] = field(default_factory=dict)
    """What an algorithm of one's own (`trainer.algorithm`) reads, by the names in its `OPTIONS`."""


@dataclass
class WatchRule:
    """From where on a rule is broken, and what is done then."""

    bound: Annotated[float, Interval(ge=-1e9, le=1e9)] = 0.0
    steps: Count = 1
    """Steps in a row for which it must be broken."""
    action: Literal["warn", "stop", "rollback", "off"] = "warn"
    """warn: say it and go on; stop: end the run; rollback: go on from the last checkpoint of before; off: do not look."""


@dataclass
class WatchdogConfig:
    """Signs of collapse, each with a bound far from what the shipped recipes do; see `watchdog` and docs/metrics.md."""

    flat_groups: WatchRule = field(default_factory=partial(WatchRule, 0.9, 10))
    """Share of prompts whose samples all have one reward."""
    ratio: WatchRule = field(default_factory=partial(WatchRule, 10.0))
    """Largest policy ratio, or one over the smallest."""
    kl: WatchRule = field(default_factory=partial(WatchRule, 1.0, 3))
    """KL to the base model."""
    grad_norm: WatchRule = field(default_factory=partial(WatchRule, 10.0, 2))
    """Gradient norm over the median of the 20 steps before."""
    saturation: WatchRule = field(default_factory=partial(WatchRule, 0.4, 5))
    """How far the pictures' saturation (0 to 1) has risen over that of the first steps."""
    sharpness: WatchRule = field(default_factory=partial(WatchRule, 0.2, 5))
    """The pictures' sharpness over that of the first steps: broken below."""
    diversity: WatchRule = field(default_factory=partial(WatchRule, 0.1, 5))
    """How different the pictures of a prompt are, over that of the first steps: broken below."""
    hacking: WatchRule = field(default_factory=partial(WatchRule, 4.0))
    """Standard errors by which a measure of `held_out` has fallen since the first validation, while the training reward rose."""
    held_out: list[str] = field(default_factory=lambda: ["reward"])
    """Measures of validation that must not fall: `reward`, or parts of it."""


@dataclass
class LoopConfig:
    """The loop: how long, how often, where."""

    algorithm: str = ""
    """The trainer's class: empty for the program's own, an installed one's name, "module:Class" or "./file.py:Class"."""
    total_steps: Count = 100
    """Training steps: each draws, scores and trains one batch."""
    max_hours: Annotated[float, Interval(ge=0, le=1e5)] = 0.0
    """The run ends with a checkpoint, and can be resumed, before a step that would end later than this many hours after the start,
    if it took as long as the step before; 0 is no limit."""
    staleness: Literal[0, 1] = 0
    """1: the samples of step n + 1 are drawn and scored while step n is trained, by the policy from before that update."""
    val_before_train: bool = True
    """Validate before the first step, so that there is something to compare with."""
    val_every: CountOrZero = 50
    """Steps between two validations; 0 validates after the last step alone."""
    val_weights: Literal["trained", "ema"] = "trained"
    """What validation draws with: trained, or ema, the average that `actor.fsdp_config.ema_decay` keeps."""
    save_every: CountOrZero = 20
    """Steps between two checkpoints; 0 saves at the end alone."""
    keep_checkpoints: Count = 2
    """Checkpoints that stay; older ones are removed."""
    run_dir: str = ""
    """Folder of the run; empty makes a new one, runs/RECIPE-DATE-TIME."""
    on_existing: Literal["raise", "resume", "delete"] = "raise"
    """What to do when run_dir exists: raise, resume or delete (a folder that holds a run and nothing else)."""
    allow_config_change: list[str] = field(default_factory=list)
    """Keys or sections that a resumed run may have otherwise than before; any other that decides results is refused."""
    trackers: list[Literal["tensorboard", "wandb", "trackio", "mlflow"]] = field(default_factory=list)
    """Where rows, sample pictures and config also go; each is an extra of run-report, and finds its key where it always does."""
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)
    seed: Seed = 0
    """Decides the order of the prompts, and the noise where `rollout.seed` does not."""
    num_workers: Thousands = 1
    """Training processes: one per GPU, or one on a CPU."""


@dataclass
class RayConfig:
    """Where the actors live."""

    address: str = ""
    """Empty starts Ray on this machine; "auto" or host:port joins a running cluster."""
    num_cpus: Annotated[int, Interval(ge=0, le=10_000)] = 0
    """CPUs that a local Ray offers; 0 takes the cores that this process may use."""
    object_store_mb: Annotated[int, Interval(ge=75, le=1_000_000_000)] = 256
    """Ray takes no less than 75, and no more than the machine has."""
    worker_threads: Annotated[int, Interval(ge=0, le=1024)] = 0
    """Torch threads of a training process; 0 takes every core."""
    gpu_memory_gb: Annotated[float, Interval(gt=0, le=10_000)] | None = None
    """Memory of a GPU in 1e9 bytes, for the sums that place the weights; null asks the GPUs. --dry-run without one takes 85."""


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
        return self.rollout.backend == "diffusers" and self.rollout.num_replicas in (None, 1)

    @property
    def rollout_means(self) -> bool:
        """Whether samples bring the means of their transitions, for a loss that reads the old ones."""
        return self.actor.diffusion_loss.needs_old_means and self.algorithm.old_log_probs == "rollout"

    @property
    def update_scores_first(self) -> bool:
        """Whether the first optimizer step may take its old log-probs from its own forward: nothing else reads them, and no later
        epoch comes back to its rows."""
        return self.actor.ppo_epochs == 1 and not self.actor.diffusion_loss.needs_old_means

    @property
    def keeps_drew(self) -> bool:
        """Whether the policy that drew a batch is kept until the loss has compared with it: samples are drawn a step early."""
        return self.trainer.staleness > 0 and self.actor.diffusion_loss.needs_old_velocity

    @property
    def drawing_state(self) -> str:
        """Policy state that equals what draws next, where `keeps_drew`: `old`, or a copy of the trained one."""
        own = "old" in self.model.policy_state_adapters and self.actor.diffusion_loss.lag_kl_coef == 0
        return "old" if own else DRAWING

    @property
    def goes_on(self) -> bool:
        """Whether the agent loop may ask for clean latents to go on from: one of several turns, or of somebody's own."""
        return self.rollout.agent.default_agent_loop != "diffusion_single_turn_agent"

    def rewards_of(self, source: str) -> list[str]:
        """Names of the rewards that score the samples of a prompt source; "" is the source without a name, and the reward too."""
        return (source and self.data.sources[source].rewards) or list(self.reward.each)

    @property
    def rows_per_prompt(self) -> int:
        """Samples of a prompt in the batch of a step."""
        if not self.data.offline:
            return self.rollout.n
        return 2 if self.actor.diffusion_loss.spec.paired else 1

    @property
    def sync_mode(self) -> SyncMode:
        """What goes to whatever samples: the adapter, all weights with the adapter folded in, or all weights."""
        if self.model.lora_rank == 0:
            return "full"
        return "merged" if self.model.lora.merge else "lora"

    @property
    def val_adapter(self) -> str:
        """Policy state that validation draws with."""
        return "ema" if self.trainer.val_weights == "ema" else "default"

    @property
    def sampling_adapters(self) -> tuple[str, ...]:
        """Policy states that samplers need: one for validation, and `rollout.rollout_adapter` for what is trained on."""
        return tuple(dict.fromkeys(n for n in (self.val_adapter, self.rollout.rollout_adapter) if n != "reference"))


DRAWING = "drawing"
"""Policy state of the trained policy as it was at the last sync."""
FILLED_IN = {"actor.model_config": "model", "rollout.architecture": "model.architecture"}
"""Fields that repeat another one, so that a package can be used alone."""


def kind_of(name: str) -> Any:
    """The type of a dotted key, also of one inside a mapping of options or of sections; None where there is no such key."""
    keys: Mapping[str, Any] = known_keys()
    parts = name.split(".")
    if name in keys:
        return keys[name]
    for cut in range(len(parts) - 1, 0, -1):
        kind = keys.get(".".join(parts[:cut]))
        if get_origin(kind) is dict:
            element, rest = get_args(kind)[1], parts[cut + 1 :]
            if not is_section(element):
                return Any
            inner = known_keys(element)
            if not rest or ".".join(rest) in inner:
                return inner[".".join(rest)] if rest else element
            return Any if get_origin(inner.get(rest[0])) is dict else None
    return None


@cache
def known_keys(schema: type = RunConfig, prefix: str = "") -> Mapping[str, Any]:
    """Every key of a config, sections included, with its type. What the program fills in itself is left out."""
    hints, keys = get_type_hints(schema), dict[str, Any]()
    for f in fields(schema):
        name = prefix + f.name
        if name in FILLED_IN:
            continue
        keys[name] = hints[f.name]
        inner = is_section(hints[f.name])
        if inner is not None:
            keys |= known_keys(inner, f"{name}.")
    return keys


OPTIONS = {
    "reward.name": "reward.options",
    "actor.diffusion_loss.loss_mode": "actor.diffusion_loss.options",
    "trainer.algorithm": "algorithm.options",
}
"""Keys that name something, and the options that go with it alone."""
DOORS = (
    "trainer.algorithm",
    "actor.diffusion_loss.loss_mode",
    "rollout.agent.default_agent_loop",
    "rollout.algo.kind",
    "rollout.val_kwargs.algo.kind",
    "model.architecture",
    "reward.name",
)
"""Keys that may name what a person wrote, as "module:attribute" or "./file.py:attribute"."""
EITHER = {"reward.several": ("reward.name", "reward.options"), "data.sources": ("data.train_file", "data.val_file")}
"""Sections with several of something, and the keys that say one of it: a layer with the one puts the other of lower layers away."""
LORA = ("lora_alpha", "lora_init_weights", "lora_dtype", "target_modules", "exclude_modules", "lora_adapter_path")
"""Keys of `model` that are of a LoRA alone: a layer with `lora_rank: 0` puts those of lower layers away."""
ELSEWHERE = {
    "learning_rate": "actor.optim.lr",
    "max_steps": "trainer.total_steps",
    "num_train_epochs": "trainer.total_steps",
    "output_dir": "trainer.run_dir",
    "num_generations": "rollout.n",
    "num_images_per_prompt": "rollout.n",
    "group_size": "rollout.n",
    "resolution": "rollout.pipeline.height",
    "num_gpus": "trainer.num_workers",
    "rank": "model.lora_rank",
    "pretrained_model_name_or_path": "model.path",
    "beta": "actor.diffusion_loss.ref_kl_coef",
}
"""What other trainers call a key, for the one that is named when it is typed here."""
PATHS = ("trainer.run_dir", "model.path", "model.lora_adapter_path", "data.train_file", "data.val_file")
"""Keys in which `~` and `$HOME` mean what they mean to a shell."""


def _read(name: str, node: Node | str, source: str) -> Any:
    """The value, or the tree of values, that `node` gives to key `name`.

    Raises:
        TrainerError: there is no such key (the nearest one is named), or the value does not fit.
    """
    for filled, told in FILLED_IN.items():
        if name == filled or name.startswith(f"{filled}."):
            raise TrainerError(f"config key {filled!r} in {source} is filled in from {told!r}; set that one instead")
    keys = known_keys()
    kind = kind_of(name) if name else RunConfig
    if kind is Any and name not in keys:  # reward.options.path=…
        if node == "":
            return ""
        return free(parse_yaml(node, name) if isinstance(node, str) else node, name, source)
    if kind is None:
        leaf = name.rpartition(".")[2]
        # A right name under the wrong section is the commonest slip: offer where that leaf lives.
        same = [known for known in keys if known.split(".")[-1] == leaf]
        hint = next(iter(same), ELSEWHERE.get(leaf)) or next(
            iter(difflib.get_close_matches(name, keys, n=1, cutoff=0.4)), None
        )
        raise TrainerError(
            f"unknown config key {name!r} in {source}" + (f"; did you mean {hint!r}?" if hint else "; see --help")
        )
    if is_section(kind) is None and not (get_origin(kind) is dict and is_section(get_args(kind)[1])):
        value = convert(kind, node, name, source)
        general = re.sub(r"^(reward\.several|data\.sources)\.\w+\.", lambda m: m[1].split(".")[0] + ".", name)
        if general in PATHS and value is not None and not isinstance(value, Reference):
            value = expand(value) if isinstance(value, str) else [expand(str(one)) for one in value]
        door = general in DOORS and value is not None and not isinstance(value, Reference)
        return importable(name, value) if door else value
    if isinstance(node, str):
        node = parse_yaml(node, name)
    if isinstance(node, ScalarNode) and node.value in ("null", "~") and NoneType in get_args(kind):
        return None
    if not isinstance(node, MappingNode):
        shown = repr(node.value) if isinstance(node, ScalarNode) else "a list"
        inner = is_section(kind)
        hint = f"; set its keys, such as {name}.{fields(inner)[0].name}" if name and inner else ""
        raise TrainerError(f"config key {name!r} in {source} is a section, but {shown} was given{hint}")
    return {key: _read(f"{name}.{key}" if name else key, value, source) for key, value in section(node).items()}


def _load_recipe(file: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A recipe over the one that it names under `base` (`builtin:NAME`, or a file beside it), each checked by itself."""
    node = read_yaml(file, f"recipe {file.name}")
    if not isinstance(node, MappingNode):
        raise TrainerError(f"recipe {str(file)!r} is not a mapping of config keys; see --help for an example")
    entries = section(node)
    base = entries.pop("base", None)
    recipe = {key: _read(key, value, f"recipe {file.name}") for key, value in entries.items()}
    if base is None:
        return recipe
    if not isinstance(base, ScalarNode):
        raise TrainerError(
            f"recipe {file.name}: base must be builtin:NAME or a file beside it, and not a list or a section"
        )
    below = file.parent / resolve("recipes", expand(str(base.value)))
    if not os.path.isfile(below):  # false for a name that no file system takes, where Path.is_file raises
        raise TrainerError(f"recipe {file.name} is based on {base.value!r}, and there is no file {below}")
    chain = (*above, file.resolve())
    if below.resolve() in chain:
        raise TrainerError(
            f"recipe {file.name} is based on {below.name}, which is based on it; a base must end somewhere"
        )
    return _over(_load_recipe(below, chain), recipe)


def _over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """One layer of config over another. Options belong to what they are of, and a validation file to its training file: another
    reward, loss, algorithm or training file does not get them."""
    labels = _at(above, "reward.several") or {}
    several = {f"reward.several.{label}.name": f"reward.several.{label}.options" for label in labels}
    for name, options in (OPTIONS | several).items():
        if _at(above, name) not in (None, _at(below, name)):
            (_at(below, options.removesuffix(".options")) or {}).pop("options", None)
    if "train_file" in above.get("data", {}):
        below = _merge(below, {"data": {"val_file": ""}})
    for group, singles in EITHER.items():
        for key in singles if _at(above, group) else (group,) if _at(above, singles[0]) else ():
            part, _, leaf = key.partition(".")
            below.get(part, {}).pop(leaf, None)
    for key in LORA if _at(above, "model.lora_rank") == 0 else ():
        below.get("model", {}).pop(key, None)
    return _merge(below, above)


def _at(tree: Any, key: str) -> Any:
    """The value of a dotted key, None where a layer does not have it."""
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


def _merge(below: Any, above: Any) -> Any:
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    return below | {key: _merge(below[key], value) if key in below else value for key, value in above.items()}


def _given(overrides: list[str]) -> dict[str, Any]:
    """The tree of `key=value` texts; the last of two with one key counts."""
    tree: dict[str, Any] = {}
    for override in overrides:
        name, _, text = override.partition("=")
        value = _read(name, text, "the command line")
        for part in reversed(name.split(".")):
            value = {part: value}
        tree = _merge(tree, value)
    return tree


def _resolved(value: Any, tree: dict[str, Any], name: str, seen: tuple[str, ...] = ()) -> Any:
    """`value` with every `${other.key}` replaced by the value of that key."""
    if isinstance(value, dict):
        return {key: _resolved(one, tree, f"{name}.{key}".lstrip("."), seen) for key, one in value.items()}
    if isinstance(value, list):
        return [_resolved(one, tree, name, seen) for one in value]
    if not isinstance(value, Reference):
        return value
    if value in seen or value not in known_keys():
        why = "leads back to itself" if value in seen else "names no config key"
        raise TrainerError(f"{name}=${{{value}}} {why}; write the value itself")
    found = _resolved(_at(tree, value), tree, name, (*seen, str(value)))
    kind = known_keys().get(name, Any)
    if type(found) in (int, float, str) and {int, float, str} & {kind, *get_args(kind)}:  # of another type, perhaps
        return convert(kind, str(found), name, f"${{{value}}}")
    return found


def check_values(schema: type, tree: dict[str, Any], prefix: str = "") -> None:
    """Raise `TrainerError`, with key, value and what it may be, for the first value that the type of its field does not allow."""
    for name, kind in kinds(schema).items():
        value, inner = tree.get(name), is_section(kind)
        several = is_section(get_args(kind)[1]) if get_origin(kind) is dict else None
        if inner is not None and isinstance(value, dict):
            check_values(inner, value, f"{prefix}{name}.")
        elif several is not None and isinstance(value, dict):
            for label, one in value.items():
                check_values(several, one, f"{prefix}{name}.{label}.")
        elif any(isinstance(one, Reference) for one in (value if isinstance(value, list) else [value])):
            continue  # its value is not known yet
        elif wrong := fault(kind, value):
            raise TrainerError(f"{prefix}{name}{wrong}")


def _build(schema: Any, tree: dict[str, Any], prefix: str = "") -> Any:
    """The dataclass of a whole tree.

    Raises:
        TrainerError: values that do not go together, with the key of the section that says so.
    """
    made = dict(tree)
    for key, kind in get_type_hints(schema).items():
        inner, value = is_section(kind), made.get(key)
        several = is_section(get_args(kind)[1]) if get_origin(kind) is dict else None
        if inner is not None and isinstance(value, dict):
            made[key] = _build(inner, value, f"{prefix}{key}.")
        elif several is not None and isinstance(value, dict):
            made[key] = {label: _build(several, one, f"{prefix}{key}.{label}.") for label, one in value.items()}
    try:
        return schema(**made)
    except (ValueError, TypeError) as error:
        if isinstance(error, TrainerError):
            raise
        said = " ".join(str(error).split())
        named = prefix if said.partition("=")[0] in made else f"{prefix.removesuffix('.')}: " if prefix else ""
        raise TrainerError(f"{named}{said}") from error


def to_tree(config: RunConfig) -> dict[str, Any]:
    """The config as nested plain values, in schema order, without what is written twice."""
    tree = asdict(config)
    for name in FILLED_IN:
        part, _, leaf = name.partition(".")
        del tree[part][leaf]
    return tree


def _fill_several(tree: dict[str, Any], given: dict[str, Any]) -> None:
    """Complete the entries of `EITHER`'s sections, and empty the keys that they stand in for.

    Raises:
        TrainerError: one layer gave both, or a name that cannot be a metric's.
    """
    for group, singles in EITHER.items():
        for key in singles if _at(tree, group) else ():
            if _at(given, key):
                raise TrainerError(f"{group} and {key} are two ways to say one thing; give {key} inside {group}.NAME")
            part, _, leaf = key.partition(".")
            tree[part][leaf] = type(tree[part][leaf])()
        for label in _at(tree, group):
            if not re.fullmatch(r"[a-z][a-z0-9_]*", label):
                raise TrainerError(f"{group} has the name {label!r}; use small letters, digits and _: it names curves")
    reward, data = tree["reward"], tree["data"]
    shared = {f.name: reward[f.name] for f in fields(RewardPool) if f.name not in ("name", "options")}
    reward["several"] = {label: asdict(NamedReward()) | shared | one for label, one in reward["several"].items()}
    data["sources"] = {label: asdict(PromptSource()) | one for label, one in data["sources"].items()}


def compose(app: str, recipe_file: Path, overrides: list[str]) -> RunConfig:
    """Defaults < recipe file (over its base) < `key=value` texts, each value checked against its field.

    Raises:
        TrainerError: an unknown key (the nearest one is named), a value of the wrong type or out of its range, or a file that is
            no YAML mapping.
    """
    layers = _over(_load_recipe(recipe_file), _given(overrides))
    if layers.get("app", app) != app:
        raise TrainerError(
            f"app={layers['app']!r} in recipe {recipe_file.name}: this program is {app}; start the other one"
        )
    tree = _merge(to_tree(RunConfig()), layers | {"app": app, "recipe": recipe_file.stem})
    _fill_several(tree, layers)
    check_values(RunConfig, tree)  # before, so that the key that was typed is named, and not one that refers to it
    tree = _resolved(tree, tree, "")
    check_values(RunConfig, tree)
    try:
        config = _build(RunConfig, tree)
        # One place for each fact: the packages' configs get it from here.
        config.actor.model_config = model = _build(DiffusionModelConfig, tree["model"])
        config.rollout.architecture = config.model.architecture
    except (ValueError, TypeError) as error:
        if isinstance(error, TrainerError):
            raise
        raise TrainerError(f"the config does not fit: {' '.join(str(error).split())}") from error
    assert isinstance(config, RunConfig)
    if config.keeps_drew:
        model.policy_state_adapters = [*dict.fromkeys([*model.policy_state_adapters, config.drawing_state, DREW])]
    if "://" in config.trainer.run_dir:
        raise TrainerError(
            f"trainer.run_dir={config.trainer.run_dir!r} is an address, and a run is written into a folder of this machine; mount "
            "the store and give its folder"
        )
    if config.trainer.on_existing != "raise" and not config.trainer.run_dir:
        raise TrainerError(
            f"trainer.on_existing={config.trainer.on_existing} needs trainer.run_dir=FOLDER: without it every run has a new folder"
        )
    run_dir = config.trainer.run_dir or f"runs/{config.recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
    config.trainer.run_dir = str(Path(run_dir).absolute())
    _for_every_folder(config)
    if config.actor.optim.total_training_steps < 0:
        config.actor.optim.total_training_steps = config.trainer.total_steps * updates_per_step(config)
    if config.rollout.seed is None:
        config.rollout.seed = config.trainer.seed
    return config


def _for_every_folder(config: RunConfig) -> None:
    """Paths that workers read, made absolute: the processes of a cluster that was started before run in another folder."""
    for model in (config.model, config.actor.model_config):
        for key in ("path", "lora_adapter_path"):
            value = getattr(model, key)
            if value and Path(value).exists():
                setattr(model, key, str(Path(value).absolute()))
    for reward in (config.reward, *config.reward.several.values()):
        for key, value in reward.options.items():
            if isinstance(value, str) and "/" in value and Path(value).exists():
                reward.options[key] = str(Path(value).absolute())


def updates_per_step(config: RunConfig) -> int:
    """Optimizer steps of one training step when every row is trained on: equal rewards and ties leave fewer rows."""
    rows = config.data.prompts_per_step * config.rows_per_prompt
    if config.actor.diffusion_loss.spec.paired and config.algorithm.pair_mode == "best_worst":
        rows = 2 * config.data.prompts_per_step
    return -(-rows // config.actor.ppo_mini_batch_size) * config.actor.ppo_epochs


def to_yaml(config: RunConfig) -> str:
    """The resolved config as YAML, in schema order; as a recipe it is this config again."""
    return dump(to_tree(config))
