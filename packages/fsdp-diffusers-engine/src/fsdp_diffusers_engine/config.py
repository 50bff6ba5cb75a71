"""Config dataclasses of the engine. This file imports no torch, so that a command line can validate before it loads one.

The type of a field says which values it takes: a word of a `Literal`, or a number of an `Interval`. OmegaConf's structured
configs support them; `"???"` is OmegaConf's mark for "must be given".
Where verl-omni, whose names these are, nests options that do nothing for a diffusion transformer (tokenizers, expert
parallelism, …), they are left out: every field below is read by something in this package.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Interval, Len
from diffusion_losses.config import DiffusionLossConfig

MISSING: Any = "???"
DREW = "drew"
"""Policy state that drew the samples, where neither the trained one nor `old` is it."""

Dtype = Literal["fp32", "float32", "bf16", "bfloat16", "fp16", "float16"]
Sharding = Literal["auto", "shard", "replicate"]
LoRAInit = Literal["gaussian", "kaiming"]
Schedule = Literal["constant", "linear", "cosine"]
Content = Literal["model", "optimizer", "extra", "lora", "hf_model"]
Levels = Literal["schedule", "uniform", "logit_normal"]
Choice = Literal["any", "stratified"]
Count = Annotated[int, Interval(ge=1, le=1_000_000_000)]
CountOrZero = Annotated[int, Interval(ge=0, le=1_000_000_000)]
Seed = Annotated[int, Interval(ge=0, le=2**63 - 1)]
NotNegative = Annotated[float, Interval(ge=0, le=1e9)]
Share = Annotated[float, Interval(ge=0, le=1)]
PositiveShare = Annotated[float, Interval(gt=0, le=1)]
BelowOne = Annotated[float, Interval(ge=0, lt=1)]


@dataclass
class LoRAOptions:
    """How an adapter leaves the trainer."""

    merge: bool = False
    """What samples is the weights with the adapter folded in, W + (alpha / r) B A, and no adapter beside them. Training stays a
    LoRA's."""


@dataclass
class DiffusionModelConfig:
    """Which transformer is trained, and which of its parameters."""

    path: str = MISSING
    """Folder of a diffusers pipeline (with `model_index.json`)."""
    architecture: str | None = None
    """Name known to `model_specs.get_spec`; None reads it from `model_index.json`."""
    transformer_subfolder: str | None = None
    """Train the transformer in this folder of `path` alone (`transformer_2`: Wan's low-noise expert); None trains
    what the pipeline samples with, both experts of Wan2.2's A14B included."""
    transformer_config: dict[str, Any] | None = None
    """Builds the transformer from this config with seeded random weights and reads none from `path`: benchmarks."""
    enable_gradient_checkpointing: bool = True
    """Recompute blocks' activations in backward where memory does not hold them: `recompute_blocks` of them. False keeps all."""
    recompute_blocks: Annotated[int, Interval(ge=0, le=10_000)] | None = None
    """How many blocks are recomputed, the first ones. None measures how many must be (on CUDA, with whole weights on each
    rank) and else takes all."""
    attn_backend: str | None = None
    """Attention backend by diffusers' name (`native`, `flash`, `_native_cudnn` …); None keeps the default."""
    lora_rank: Annotated[int, Interval(ge=0, le=65_536)] = 0
    """Rank of the LoRA. 0 trains the whole transformer."""
    lora_alpha: Count = 64
    """The adapter's output is scaled by `lora_alpha / lora_rank`."""
    lora_init_weights: LoRAInit = "gaussian"
    """`gaussian` (A ~ N(0, 1/rank²)) or `kaiming`; B starts at zero in both, so the first policy is the base."""
    lora_seed: Seed = 0
    """Seed of that draw. Each tensor is drawn from (seed, its name): the same on any number of ranks."""
    target_modules: Any = "all-linear"
    """`all-linear` (the spec's attention and MLP layers), `attention`, a regular expression, or a list of name ends."""
    exclude_modules: Any = None
    """Modules to leave out of `target_modules`: a regular expression or a list of name ends."""
    lora_adapter_path: str | None = None
    """Warm start: a saved LoRA (file or folder, PEFT, diffusers or this package's export) put into `default`."""
    lora_dtype: Dtype = "fp32"
    """dtype in which adapters are kept and optimised. The product is computed in the activations' dtype."""
    lora: LoRAOptions = field(default_factory=LoRAOptions)
    """How the adapter is sent to the rollout."""
    policy_state_adapters: list[str] = field(default_factory=lambda: ["default"])
    """Named copies of the policy; `default` is trained. Add `old` for DiffusionNFT, `reference` to keep the
    start of a full fine-tuning (with a LoRA, `reference` is the base with adapters off and needs no entry)."""
    fsdp_layer_prefixes: list[str] = field(default_factory=list)
    """Names of the module lists whose items are sharded one by one; empty takes the blocks that diffusers declares."""


@dataclass
class MixedPrecisionConfig:
    """FSDP2's mixed-precision policy, for full fine-tuning of fp32 weights (a LoRA over a bf16 base needs none)."""

    param_dtype: Dtype = "bf16"
    """dtype in which gathered parameters compute; gradients are reduced in fp32."""


@dataclass
class FSDPEngineConfig:
    """Where and how the module lives: device, precision, sharding, offload."""

    device: str | None = None
    """`cpu`, `cuda`, `cuda:1` …; None takes CUDA where there is one, card `LOCAL_RANK`."""
    model_dtype: Dtype = "fp32"
    """dtype of the stored weights: `fp32`, `bf16` or `fp16`. Use bf16 for a LoRA over a large frozen base."""
    mixed_precision: MixedPrecisionConfig | None = None
    """Compute dtype of a full fine-tuning that keeps `model_dtype=fp32` weights; None computes in `model_dtype`."""
    sharding: Sharding = "auto"
    """`replicate` keeps the whole module on every rank and averages the trained part's gradient once per optimizer step;
    `shard` divides it over `fsdp_size` ranks with FSDP2 (one rank too: it starts a group of one when there is none).
    `auto` shards over several ranks; the programs decide it by `ray_trainer.placement`'s sums."""
    fsdp_size: Literal[-1] | Annotated[int, Interval(ge=1, le=100_000)] = -1
    """Ranks in one shard group; a smaller number than all replicates between groups (HSDP). -1 is all ranks; in the
    programs all of one machine, and more only where a number says so."""
    reshard_after_forward: bool = True
    """Free gathered blocks after forward (less memory) or keep them for backward (less traffic)."""
    forward_prefetch: bool = False
    """Gather the next block while the present one computes."""
    offload_policy: bool = False
    """FSDP2's own CPU offload: shards and optimizer live on the CPU, blocks visit the device. Needs sharding."""
    param_offload: bool = False
    """Move parameters to the CPU outside `train_mode` / `eval_mode`: makes room for a rollout on the same card."""
    optimizer_offload: bool | None = None
    """Keep the optimizer's state on the CPU outside `train_mode`. None does not; the programs decide it by their sums."""
    state_offload: bool | None = None
    """Keep the policy states of a full fine-tuning (reference, old, ema: copies of all weights) on the CPU; one that is used
    changes places with the trained weights for that time. None does not; the programs decide it by their sums."""
    activation_offload: bool = False
    """Keep the activations saved for backward (block inputs, or all of them without checkpointing) in pinned CPU memory."""
    ulysses_sequence_parallel_size: Annotated[int, Interval(ge=1, le=1024)] = 1
    """Ranks that share one sample's tokens (Ulysses), for transformers with a context-parallel plan in diffusers."""
    use_torch_compile: bool | None = None
    """Compile the repeated blocks (one compilation for all of them). None does so on CUDA, unless `full_determinism` is on."""
    full_determinism: bool = False
    """Bitwise equal steps on a GPU, for the whole process, with kernels that may be slower. A CPU needs no such thing."""
    ema_decay: BelowOne = 0.0
    """Above 0, an exponential average of the trained weights is kept as the policy state `ema`: ema ← d·ema + (1 - d)·trained."""
    ema_every: Count = 1
    """Optimizer steps between two updates of that average."""
    ema_warmup: bool = False
    """d = min((1 + n) / (10 + n), ema_decay) after n optimizer steps, as flow_grpo and DiffusionNFT average: the first weights are
    soon forgotten. False: d = ema_decay from the start."""
    timeout_s: Annotated[float, Interval(gt=0, le=1e7)] = 600.0
    """Deadline of a collective in a group that the engine starts; a dead rank ends the others within it."""
    peak_tflops: Annotated[float, Interval(gt=0, le=1e9)] | None = None
    """Peak of the device for `perf/mfu`, in 1e12 operations a second; None looks it up or measures it."""


@dataclass
class FSDPOptimizerConfig:
    """AdamW and its learning-rate schedule. Steps are optimizer steps."""

    lr: Share = 1e-4
    """Peak learning rate."""
    betas: Annotated[list[BelowOne], Len(2, 2)] = field(default_factory=lambda: [0.9, 0.999])
    """Decay rates of AdamW's two moments."""
    eps: PositiveShare = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, Interval(ge=0, le=100)] = 1e-4
    """Decoupled weight decay."""
    clip_grad: NotNegative = 1.0
    """Largest norm of the whole gradient; 0 turns clipping off (the norm is measured all the same)."""
    lr_scheduler_type: Schedule = "constant"
    """`constant`, `linear` or `cosine`: how the rate goes from `lr` to `lr * min_lr_ratio` after the warmup."""
    lr_warmup_steps: CountOrZero = 0
    """Steps of linear warmup from `lr / (lr_warmup_steps + 1)`."""
    total_training_steps: Annotated[int, Interval(ge=-1, le=2**63 - 1)] = -1
    """Step at which `linear` and `cosine` reach their end; they need it, `constant` does not."""
    min_lr_ratio: Share = 0.0
    """End of `linear` and `cosine` as a share of `lr`."""


@dataclass
class CheckpointConfig:
    """What a checkpoint holds."""

    save_contents: list[Content] = field(default_factory=lambda: ["model", "optimizer", "extra"])
    """Any of `model` (trained weights and every policy state), `optimizer`, `extra` (schedule, counters, RNG),
    which a checkpoint is loaded from, and `lora` or `hf_model` (an export beside them that other tools load)."""


@dataclass
class ForwardProcessConfig:
    """Where a forward-process loss (NFT, DPO, AWM) looks at a clean latent."""

    levels: Levels = "schedule"
    """Noise levels: `schedule` (the sampler's own sigmas, a new random choice per sample), `uniform`, or
    `logit_normal`."""
    num_levels: Annotated[int, Interval(ge=0, le=10_000)] = 0
    """Levels per sample in one update; 0 takes all that `schedule_fraction` allows (one for the other kinds)."""
    schedule_fraction: PositiveShare = 0.99
    """Share of the schedule that one update uses; DiffusionNFT drops one random level of ten by 0.99."""
    schedule_choice: Choice = "any"
    """Which of its levels: `any` draws from all of it, without repetition; `stratified` takes the first `schedule_fraction` of it,
    the noisier end, and draws one level from each of `num_levels` equal parts (AWM's and Flow-Factory's `discrete`)."""
    logit_mean: Annotated[float, Interval(ge=-100, le=100)] = 0.0
    """Mean of the logit of `logit_normal` levels."""
    logit_std: Annotated[float, Interval(gt=0, le=100)] = 1.0
    """Their standard deviation."""
    shift: Annotated[float, Interval(gt=0, le=1000)] = 1.0
    """Shift of `uniform` and `logit_normal` levels, `s t / (1 + (s - 1) t)`; SD3's schedule has 3. None is below 1e-3."""
    reference_state: str = "reference"
    """Policy state of the reference: `reference` (adapters off) or a lagged copy such as `old`."""


@dataclass
class FSDPDiffusionActorConfig:
    """One update of a policy: batch sizes, epochs, loss, optimizer. Read by `TrainingWorker`."""

    ppo_mini_batch_size: Count = 256
    """Samples of one optimizer step, over all ranks."""
    ppo_micro_batch_size_per_gpu: Count = 8
    """Samples of one forward and backward on one rank."""
    log_prob_micro_batch_size_per_gpu: Count | None = None
    """The same for forward-only passes; None takes `ppo_micro_batch_size_per_gpu`."""
    ppo_epochs: Annotated[int, Interval(ge=1, le=10_000)] = 1
    """Passes over the batch of a training step."""
    shuffle: bool = False
    """Draw a new order of the samples for every epoch."""
    data_loader_seed: Seed = 42
    """Seed of that order, together with the training step and the epoch."""
    diffusion_loss: DiffusionLossConfig = field(default_factory=DiffusionLossConfig)
    """The loss; its `loss_mode` also picks the engine (policy gradient or forward process)."""
    forward_process: ForwardProcessConfig = field(default_factory=ForwardProcessConfig)
    """Noise levels of a forward-process loss; policy gradients do not read it."""
    optim: FSDPOptimizerConfig = field(default_factory=FSDPOptimizerConfig)
    """Optimizer."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Checkpoints."""
    model_config: DiffusionModelConfig = field(default_factory=DiffusionModelConfig)
    """The model."""
    fsdp_config: FSDPEngineConfig = field(default_factory=FSDPEngineConfig)
    """Device, precision, sharding, offload."""


@dataclass
class TrainingWorkerConfig:
    """One rank of a trainer."""

    actor: FSDPDiffusionActorConfig = field(default_factory=FSDPDiffusionActorConfig)
    """What it trains and how."""
    rank: int = 0
    """This process among the ranks."""
    world_size: int = 1
    """Number of ranks."""
    init_method: str | None = None
    """Where the ranks meet, for example `tcp://10.0.0.1:29500`; one rank needs none."""
