"""What a person may set about rollout. Plain dataclasses, no torch: usable as OmegaConf structured configs.

The type of a field says which values it takes (see `allowed`); every dataclass refuses others when it is made.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Interval, Len
from sde_samplers.errors import SamplerError
from sde_samplers.kinds import Kind, check_noise_level
from sde_samplers.settings import Solver

from .allowed import Count, Seconds, Seed, fault, kinds
from .errors import RolloutConfigError

Backend = Literal["diffusers", "vllm_omni"]
Dtype = Literal["float32", "bfloat16", "float16"]
Side = Annotated[int, Interval(ge=1, le=32_768)]
Scale = Annotated[float, Interval(ge=0, le=1000)]
Steps = Annotated[int, Interval(ge=0, le=10_000)]


class Checked:
    """A dataclass that refuses, when it is made, a value that the type of its field does not allow."""

    def __post_init__(self) -> None:
        for name, kind in kinds(type(self)).items():  # type: ignore[arg-type]  # mypy: a class without a hash of its instances
            if wrong := fault(kind, getattr(self, name)):
                raise RolloutConfigError(name + wrong)


@dataclass
class DiffusionPipelineConfig(Checked):
    """Size of the picture and length of the denoising run."""

    height: Side = 512
    """Pixels."""
    width: Side = 512
    """Pixels."""
    num_inference_steps: Annotated[int, Interval(ge=1, le=10_000)] = 10
    """Denoising steps K; the sigma grid has K + 1 entries."""
    true_cfg_scale: Scale = 1.0
    """Classifier-free guidance with a negative prompt; 1 means one transformer call a step."""
    negative_prompt: str = ""
    """Negative prompt of samples that bring none. Qwen-Image's authors use a space; SD3, Wan and Z-Image train with ""."""
    max_sequence_length: Annotated[int, Interval(ge=1, le=1_000_000)] = 512
    """Longest prompt, in tokens. Longer prompts are refused by the encoder, never cropped."""
    guidance_scale: Scale | None = None
    """Embedded guidance of distilled models (FLUX.1-dev); None for the others."""
    num_frames: Annotated[int, Interval(ge=1, le=100_000)] = 1
    """Frames of a video; 1 for a picture."""


@dataclass
class DiffusionRolloutAlgoConfig(Checked):
    """Algorithm of the stochastic rollout: which steps inject noise, and how much."""

    noise_level: Annotated[float, Interval(ge=0, le=100)] = 1.0
    """Scale of the injected noise; 0 makes every step an ODE step."""
    kind: Kind = "flow_sde"
    """flow_sde | dance_sde | flow_cps | ddim | wan_sde | ode (verl-omni's `sde_type`), or "module:attribute" of a
    `sde_samplers.SamplerKind` of your own (in the programs also "./file.py:attribute")."""
    sde_window_size: Steps | None = None
    """Number of stochastic (trained) steps W; None takes every step of `sde_window_range`."""
    sde_window_range: Annotated[list[Steps], Len(2, 2)] | None = None
    """[first, end) of the steps that a window may cover; None is [0, K - 1): the last step stays an ODE step."""
    sample_strategy: Literal["fixed", "random", "progressive"] = "random"
    """Where the window lies at a training step."""
    iters_per_group: Count = 1
    """Training steps for which a window stays where it is."""
    sde_window_seed: Seed = 0
    """Seed of the random strategy; the window depends on it and on the training step alone, never on a rank."""
    solver: Solver = "euler"
    """Integrator of the ODE steps: euler, or DPM-Solver++ of order 1 to 3 (dpm1, dpm2, dpm3)."""
    shared_noise: bool = False
    """All samples of a group start from the noise of its sample 0; the noise of their steps stays each one's own."""
    tail_ratio: Annotated[float, Interval(gt=0, le=1)] = 1.0
    """Share of the steps after the window that is kept (MixGRPO-Flash). Below 1 `solver` integrates the tail alone."""

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            check_noise_level(self.kind, self.noise_level)
        except SamplerError as error:
            raise RolloutConfigError(str(error)) from error
        size, span = self.sde_window_size, self.sde_window_range
        if span is not None and span[0] >= span[1]:
            raise RolloutConfigError(f"sde_window_range={span} is empty: it must be [first, end) with first < end")
        if span is not None and size is not None and size > span[1] - span[0]:
            raise RolloutConfigError(f"sde_window_size={size} must be at most {span[1] - span[0]}, the steps of {span}")


@dataclass
class DiffusionSamplingConfig(Checked):
    """How pictures for validation are drawn; separate from training so that evaluation stays comparable."""

    n: Count = 1
    """Pictures per validation prompt."""
    seed: Seed = 42
    """Base seed of the validation noise."""
    pipeline: DiffusionPipelineConfig = field(default_factory=DiffusionPipelineConfig)
    algo: DiffusionRolloutAlgoConfig = field(
        default_factory=lambda: DiffusionRolloutAlgoConfig(kind="ode", noise_level=0.0)
    )


@dataclass
class AgentLoopConfig(Checked):
    """Which agent loop turns a prompt into a sample."""

    default_agent_loop: str = "diffusion_single_turn_agent"
    """A name of `omni_rollout.loops.LOOPS`, or module:Class of your own (in the programs also ./file.py:Class)."""
    num_turns: Annotated[int, Interval(ge=1, le=1000)] = 2
    """Turns that a multi-turn loop may take at most."""


@dataclass
class RouterConfig(Checked):
    """How requests spread over replicas, and what happens when one of them fails."""

    request_timeout_s: Annotated[float, Interval(ge=0, le=1e7)] = 600.0
    """How long a replica may work on one batch; 0 waits for ever."""
    max_retries: Annotated[int, Interval(ge=0, le=1000)] = 2
    """Further attempts at a batch, on another replica where there is one, with the same seeds."""
    start_timeout_s: Seconds = 900.0
    """How long a replica may take to start."""
    restart: bool = True
    """Start a dead replica again and bring it to the newest weights."""


@dataclass
class VllmOmniConfig(Checked):
    """Settings of the vLLM-Omni engine; read by that backend alone."""

    tensor_model_parallel_size: Annotated[int, Interval(ge=1, le=1024)] | None = None
    """GPUs that share one copy of the transformer. null: one, and in the programs as few as hold it."""
    enforce_eager: bool = False
    """Skip torch.compile of the transformer blocks."""
    max_num_seqs: Count = 16
    """Requests that one engine batch may hold."""
    request_batch_max_wait_ms: Annotated[float, Interval(ge=0, le=1e7)] = 100.0
    """How long the engine waits at most for more requests before it starts a batch that is not full. It stops waiting once none
    came for a fifth of that time, and never waits for a full batch."""
    step_execution: bool = False
    """Schedule step by step instead of request by request (models that support it)."""
    enable_sleep_mode: bool | None = None
    """Beside a trainer on one GPU. true: the weights leave the GPU during updates. false: they stay. null: they stay where an
    engine can use the trainer's own (only an adapter is trained, in the rollout's dtype, unsharded): the GPU holds one copy then;
    and they leave it elsewhere."""
    rollout_attn_backend: str | None = None
    """Attention kernel of the engine. null: CUDNN_ATTN for 16-bit weights on a GPU (4 % more pictures than TORCH_SDPA, measured
    on an H200 with Qwen-Image at 512²), else TORCH_SDPA. FLASH_ATTN is as fast and needs its wheel."""
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments, handed to AsyncOmni as they are."""
    openai_port: Annotated[int, Interval(ge=1, le=65_535)] | None = None
    """Port of the OpenAI-style image route for people; None starts no server."""

    @property
    def gpus(self) -> int:
        """GPUs of one engine."""
        return self.tensor_model_parallel_size or 1


@dataclass
class DiffusionRolloutConfig(Checked):
    """Everything about rollout."""

    backend: Backend = "diffusers"
    """diffusers: in the trainer's process, sharing its weights. vllm_omni: engines of their own."""
    n: Count = 1
    """Samples per prompt (the group size G)."""
    seed: Seed | None = None
    """Base seed of the rollout noise; None lets the trainer's seed stand."""
    dtype: Dtype = "bfloat16"
    """Dtype of the rollout's transformer. Latents and log-probs are fp32 whatever it is."""
    fp8: bool = False
    """Sample with the frozen weights in fp8 (e4m3): faster from Ada and Hopper GPUs on, and no longer quite the trainer's
    policy: `actor/rollout_log_prob_diff_max` says how far off, recomputed old log-probs take it into account."""
    max_batch_size: Count = 64
    """Samples that are denoised together in the diffusers backend."""
    num_replicas: Annotated[int, Interval(ge=1, le=10_000)] | None = None
    """Replicas of the policy that the router spreads requests over. null: one in the diffusers backend, and as many engines as the
    GPUs hold that are free."""
    placement: Literal["pack", "spread"] = "pack"
    """How replicas spread over the nodes of a cluster: pack (fill one node first) or spread."""
    architecture: str | None = None
    """Name or "module:Class" of the model's spec, for replicas; None reads it from the model's folder."""
    sync: Literal["auto", "ray", "shared_memory", "nccl"] = "auto"
    """How full or merged weights travel to replicas. ray: through its object store, to any machine; shared_memory: to processes of
    this one; nccl: broadcast between cards (over gloo where all are CPUs). auto: shared_memory where all replicas are on the
    trainer's machine, else ray. An adapter always goes by ray, and weights that are shared go nowhere."""
    device: str = "cpu"
    """Device of replicas with weights of their own in the diffusers backend; one that shares them lives where they are."""
    rollout_adapter: str = "default"
    """LoRA adapter that samples ("reference" is the policy with adapters off)."""
    pipeline: DiffusionPipelineConfig = field(default_factory=DiffusionPipelineConfig)
    algo: DiffusionRolloutAlgoConfig = field(default_factory=DiffusionRolloutAlgoConfig)
    val_kwargs: DiffusionSamplingConfig = field(default_factory=DiffusionSamplingConfig)
    agent: AgentLoopConfig = field(default_factory=AgentLoopConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    vllm_omni: VllmOmniConfig = field(default_factory=VllmOmniConfig)
