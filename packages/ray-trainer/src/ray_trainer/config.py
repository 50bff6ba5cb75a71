"""The config of a run: every key that this package declares, in sections, and what follows from them.

Plain dataclasses that import without torch. A key is one field, here or in the package that reads it: its name, its default, and in
its type the words or the range that it takes (`omni_rollout.allowed`). `compose` makes one from a recipe and a command line.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from functools import partial
from typing import Annotated, Any, Literal

from annotated_types import Interval, Len
from diffusion_losses.config import NotNegative
from diffusion_losses.decay import old_policy_decay
from fsdp_diffusers_engine.config import DiffusionModelConfig, FSDPDiffusionActorConfig
from omni_rollout.allowed import Count, CountOrZero, Seconds, Seed
from omni_rollout.config import DiffusionRolloutConfig

from .values import dump

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
LORA = ("lora_alpha", "lora_init_weights", "lora_dtype", "target_modules", "exclude_modules", "lora_adapter_path")
"""Keys of `model` that are of a LoRA alone."""
FILLED_IN = {"actor.model_config": "model", "rollout.architecture": "model.architecture"}
"""Fields that repeat another one, so that a package can be used alone."""


def updates_per_step(config: RunConfig) -> int:
    """Optimizer steps of one training step when every row is trained on: equal rewards and ties leave fewer rows."""
    rows = config.data.prompts_per_step * config.rows_per_prompt
    if config.actor.diffusion_loss.spec.paired and config.algorithm.pair_mode == "best_worst":
        rows = 2 * config.data.prompts_per_step
    return -(-rows // config.actor.ppo_mini_batch_size) * config.actor.ppo_epochs


def to_tree(config: RunConfig) -> dict[str, Any]:
    """The config as nested plain values, in schema order, without what is written twice."""
    tree = asdict(config)
    for name in FILLED_IN:
        part, _, leaf = name.partition(".")
        del tree[part][leaf]
    return tree


def to_yaml(config: RunConfig) -> str:
    """The resolved config as YAML, in schema order; as a recipe it is this config again."""
    return dump(to_tree(config))
