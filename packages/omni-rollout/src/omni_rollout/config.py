"""What a person may set about rollout. Plain dataclasses, no torch: usable as OmegaConf structured configs.

Names, fields and defaults follow the system this design started from; fields that do nothing here are absent.
Every dataclass checks itself when it is made, and `validate()` may be called again after values were assigned.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sde_samplers.errors import SamplerError
from sde_samplers.kinds import Kind, find_kind
from sde_samplers.settings import SOLVERS

from .errors import RolloutConfigError

BACKENDS = ("diffusers", "vllm_omni")
KIND_ALIASES = {"sde": "flow_sde", "dance": "dance_sde", "cps": "flow_cps"}
WINDOW_STRATEGIES = ("fixed", "random", "progressive")
DTYPES = ("float32", "bfloat16", "float16")


def resolve_kind(sde_type: str) -> Kind:
    """The sampler name that sde_samplers knows for `sde_type` ("sde" and "cps" are accepted as older names)."""
    kind = KIND_ALIASES.get(sde_type, sde_type)
    try:
        find_kind(kind)
    except SamplerError as error:
        raise RolloutConfigError(f"sde_type={sde_type!r}: {error}") from error
    return kind


def _require(ok: bool, name: str, value: Any, rule: str) -> None:
    if not ok:
        raise RolloutConfigError(f"{name}={value!r} is not allowed: it must be {rule}.")


@dataclass
class DiffusionPipelineConfig:
    """Size of the picture and length of the denoising run."""

    height: int = 512
    """Pixels."""
    width: int = 512
    """Pixels."""
    num_inference_steps: int = 10
    """Denoising steps K; the sigma grid has K + 1 entries."""
    true_cfg_scale: float = 1.0
    """Classifier-free guidance with a negative prompt; 1 means one transformer call a step."""
    negative_prompt: str = ""
    """Negative prompt of samples that bring none. Qwen-Image's authors use a space; SD3, Wan and Z-Image train with ""."""
    max_sequence_length: int = 512
    """Longest prompt, in tokens. Longer prompts are refused by the encoder, never cropped."""
    guidance_scale: float | None = None
    """Embedded guidance of distilled models (FLUX.1-dev); None for the others."""
    num_frames: int = 1
    """Frames of a video; 1 for a picture."""

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raise `RolloutConfigError` for a value that no pipeline takes."""
        for name in ("height", "width", "num_inference_steps", "max_sequence_length", "num_frames"):
            _require(getattr(self, name) >= 1, f"pipeline.{name}", getattr(self, name), "at least 1")
        _require(self.true_cfg_scale >= 0, "pipeline.true_cfg_scale", self.true_cfg_scale, "0 or more")


@dataclass
class DiffusionRolloutAlgoConfig:
    """Algorithm of the stochastic rollout: which steps inject noise, and how much."""

    noise_level: float = 1.0
    """Scale of the injected noise; 0 makes every step an ODE step."""
    sde_type: str = "sde"
    """flow_sde | dance_sde | flow_cps | ddim | wan_sde | ode, the older names sde, dance and cps, or "module:attribute" of a
    `sde_samplers.SamplerKind` of your own (in the programs also "./file.py:attribute")."""
    sde_window_size: int | None = None
    """Number of stochastic (trained) steps W; None takes every step of `sde_window_range`."""
    sde_window_range: list[int] | None = None
    """[first, end) of the steps that a window may cover; None is [0, K - 1): the last step stays an ODE step."""
    sample_strategy: str = "random"
    """Where the window lies at a training step: fixed | random | progressive."""
    iters_per_group: int = 1
    """Training steps for which a window stays where it is."""
    sde_window_seed: int = 0
    """Seed of the random strategy; the window depends on it and on the training step alone, never on a rank."""
    solver: str = "euler"
    """Integrator of the ODE steps: euler, or DPM-Solver++ of order 1 to 3 (dpm1, dpm2, dpm3)."""
    shared_noise: bool = False
    """All samples of a group start from the noise of its sample 0; the noise of their steps stays each one's own."""
    tail_ratio: float = 1.0
    """Share of the steps after the window that is kept (MixGRPO-Flash). Below 1 `solver` integrates the tail alone."""

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raise `RolloutConfigError` for an unknown sampler or strategy, or for an impossible window."""
        resolve_kind(self.sde_type)
        _require(self.noise_level >= 0, "algo.noise_level", self.noise_level, "0 or more")
        _require(
            self.sample_strategy in WINDOW_STRATEGIES,
            "algo.sample_strategy",
            self.sample_strategy,
            "one of " + ", ".join(WINDOW_STRATEGIES),
        )
        _require(self.solver in SOLVERS, "algo.solver", self.solver, "one of " + ", ".join(SOLVERS))
        _require(0 < self.tail_ratio <= 1, "algo.tail_ratio", self.tail_ratio, "in (0, 1]")
        _require(self.iters_per_group >= 1, "algo.iters_per_group", self.iters_per_group, "at least 1")
        size, span = self.sde_window_size, self.sde_window_range
        _require(size is None or size >= 0, "algo.sde_window_size", size, "0 or more, or null")
        if span is not None:
            _require(
                len(span) == 2 and 0 <= span[0] < span[1],
                "algo.sde_window_range",
                list(span),
                "[first, end) with first < end",
            )
            if size is not None:
                _require(size <= span[1] - span[0], "algo.sde_window_size", size, f"at most {span[1] - span[0]} here")

    @property
    def kind(self) -> Kind:
        """`sde_type` under the name that sde_samplers uses."""
        return resolve_kind(self.sde_type)


@dataclass
class DiffusionSamplingConfig:
    """How pictures for validation are drawn; separate from training so that evaluation stays comparable."""

    n: int = 1
    """Pictures per validation prompt."""
    seed: int = 42
    """Base seed of the validation noise."""
    pipeline: DiffusionPipelineConfig = field(default_factory=DiffusionPipelineConfig)
    algo: DiffusionRolloutAlgoConfig = field(
        default_factory=lambda: DiffusionRolloutAlgoConfig(sde_type="ode", noise_level=0.0)
    )

    def __post_init__(self) -> None:
        _require(self.n >= 1, "val_kwargs.n", self.n, "at least 1")


@dataclass
class AgentLoopConfig:
    """Which agent loop turns a prompt into a sample."""

    default_agent_loop: str = "diffusion_single_turn_agent"
    """A name of `omni_rollout.loops.LOOPS`, or module:Class of your own (in the programs also ./file.py:Class)."""
    num_turns: int = 2
    """Turns that a multi-turn loop may take at most."""


@dataclass
class RouterConfig:
    """How requests spread over replicas, and what happens when one of them fails."""

    request_timeout_s: float = 600.0
    """How long a replica may work on one batch; 0 waits for ever."""
    max_retries: int = 2
    """Further attempts at a batch, on another replica where there is one, with the same seeds."""
    start_timeout_s: float = 900.0
    """How long a replica may take to start."""
    restart: bool = True
    """Start a dead replica again and bring it to the newest weights."""

    def __post_init__(self) -> None:
        _require(self.max_retries >= 0, "router.max_retries", self.max_retries, "0 or more")
        _require(self.request_timeout_s >= 0, "router.request_timeout_s", self.request_timeout_s, "0 or more")


@dataclass
class VllmOmniConfig:
    """Settings of the vLLM-Omni engine; read by that backend alone."""

    tensor_model_parallel_size: int = 1
    """GPUs that share one copy of the transformer."""
    enforce_eager: bool = False
    """Skip torch.compile of the transformer blocks."""
    max_num_seqs: int = 16
    """Requests that one engine batch may hold."""
    request_batch_max_wait_ms: float = 100.0
    """How long the engine waits at most for more requests before it starts a batch that is not full. It stops waiting once none
    came for a fifth of that time, and never waits for a full batch."""
    step_execution: bool = False
    """Schedule step by step instead of request by request (models that support it)."""
    enable_sleep_mode: bool = True
    """Allow the weights to leave the GPU between rollouts."""
    rollout_attn_backend: str = "TORCH_SDPA"
    """Attention kernel of the engine: TORCH_SDPA runs everywhere, FLASH_ATTN needs its wheel."""
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments, handed to AsyncOmni as they are."""
    openai_port: int | None = None
    """Port of the OpenAI-style image route for people; None starts no server."""

    def __post_init__(self) -> None:
        _require(
            self.tensor_model_parallel_size >= 1,
            "vllm_omni.tensor_model_parallel_size",
            self.tensor_model_parallel_size,
            ">= 1",
        )
        _require(self.max_num_seqs >= 1, "vllm_omni.max_num_seqs", self.max_num_seqs, "at least 1")


@dataclass
class DiffusionRolloutConfig:
    """Everything about rollout."""

    backend: str = "diffusers"
    """diffusers: in the trainer's process, sharing its weights. vllm_omni: engines of their own."""
    n: int = 1
    """Samples per prompt (the group size G)."""
    seed: int | None = None
    """Base seed of the rollout noise; None lets the trainer's seed stand."""
    dtype: str = "bfloat16"
    """Dtype of the rollout's transformer. Latents and log-probs are fp32 whatever it is."""
    max_batch_size: int = 64
    """Samples that are denoised together in the diffusers backend."""
    num_replicas: int = 1
    """Replicas of the policy that the router spreads requests over."""
    placement: str = "pack"
    """How replicas spread over the nodes of a cluster: pack (fill one node first) or spread."""
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

    def __post_init__(self) -> None:
        _require(self.backend in BACKENDS, "rollout.backend", self.backend, "one of " + ", ".join(BACKENDS))
        _require(self.placement in ("pack", "spread"), "rollout.placement", self.placement, "pack or spread")
        _require(self.dtype in DTYPES, "rollout.dtype", self.dtype, "one of " + ", ".join(DTYPES))
        for name in ("n", "max_batch_size", "num_replicas"):
            _require(getattr(self, name) >= 1, f"rollout.{name}", getattr(self, name), "at least 1")
