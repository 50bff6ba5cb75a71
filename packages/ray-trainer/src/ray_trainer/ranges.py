"""The range of every number in a config, and the words that a word must be one of: two tables, checked before anything else looks
at a value. Imports no torch.

A row is named after the section's dataclass, because one section may stand in two places (`rollout.pipeline` and
`rollout.val_kwargs.pipeline`). The bounds are what the code can use, with room: they catch slips of the pen and overflows, and do
not judge taste. What depends on other keys is checked where those are known (`validate`, `validate_algorithm`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

from ray_trainer.errors import TrainerError
from ray_trainer.values import Reference, is_section

__all__ = ["RANGES", "Range", "check_ranges"]


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both included unless `above` (then not `low`) or `below` (then not `high`).

    `count` is the length of a list of such numbers; `but` is one number inside that is none.
    """

    low: float
    high: float
    above: bool = False
    below: bool = False
    count: int | None = None
    but: int | None = None

    def holds(self, value: float) -> bool:
        """Whether the number lies in the range; NaN and infinity never do."""
        inside = (self.low < value if self.above else self.low <= value) and (
            value < self.high if self.below else value <= self.high
        )
        return math.isfinite(value) and inside and value != self.but

    def __str__(self) -> str:
        low = f"above {self.low:g}" if self.above else f"{self.low:g}" if abs(self.low) < 1e6 else str(self.low)
        high = f"{self.high:g}" if self.high < 1e6 or isinstance(self.high, float) else str(self.high)
        text = f"{low} to {'below ' if self.below else ''}{high}"
        return text + (f", but not {self.but}" if self.but is not None else "")


MANY = 1_000_000_000
_SEED = Range(0, 2**63 - 1)
_COUNT, _COUNT0 = Range(1, MANY), Range(0, MANY)
_POSITIVE, _NOT_NEGATIVE = Range(0, 1e9, above=True), Range(0, 1e9)
_SHARE, _PART = Range(0, 1), Range(0, 1, above=True)
_SECONDS = Range(0, 1e7)  # some 116 days; more is a slip, and timers overflow

RANGES: dict[str, dict[str, Range]] = {
    "DataConfig": {"prompts_per_step": _COUNT, "val_max_prompts": _COUNT},
    "RewardConfig": {
        "num_workers": Range(1, 10_000),
        "num_cpus": Range(0, 10_000),
        "concurrency": Range(1, 10_000),
        "batch_size": _COUNT,
        "failure_value": Range(-1e9, 1e9),
        "max_retries": Range(0, 1000),
        "timeout_s": Range(0, 1e7, above=True),
    },
    "OldPolicyConfig": {"update_every": _COUNT, "decay_start": _COUNT0, "decay_rate": _SHARE, "decay_max": _SHARE},
    "AlgorithmConfig": {
        "advantage_ddof": Range(0, 1),
        "advantage_eps": _SHARE,
        "pair_margin": _NOT_NEGATIVE,
        "step_fraction": _PART,
    },
    "LoopConfig": {
        "total_steps": _COUNT,
        "val_every": _COUNT0,
        "save_every": _COUNT0,
        "keep_checkpoints": _COUNT,
        "seed": _SEED,
        "num_workers": Range(1, 10_000),
    },
    "RayConfig": {
        "num_cpus": Range(0, 10_000),
        "object_store_mb": Range(75, MANY),  # Ray takes no less; the upper end is what the machine has
        "worker_threads": Range(0, 1024),
    },
    "DiffusionModelConfig": {
        "recompute_blocks": Range(0, 10_000),
        "lora_rank": Range(0, 65_536),
        "lora_alpha": Range(1, MANY),
        "lora_seed": _SEED,
    },
    "FSDPEngineConfig": {
        "fsdp_size": Range(-1, 100_000, but=0),
        "ulysses_sequence_parallel_size": Range(1, 1024),
        "ema_decay": Range(0, 1, below=True),
        "timeout_s": Range(0, 1e7, above=True),
        "peak_tflops": _POSITIVE,
    },
    "FSDPOptimizerConfig": {
        "lr": _SHARE,
        "betas": Range(0, 1, below=True, count=2),
        "eps": _PART,
        "weight_decay": Range(0, 100),
        "clip_grad": _NOT_NEGATIVE,
        "lr_warmup_steps": _COUNT0,
        "total_training_steps": Range(-1, 2**63 - 1),
        "min_lr_ratio": _SHARE,
    },
    "CheckpointConfig": {"max_ckpt_to_keep": _COUNT},
    "ForwardProcessConfig": {
        "num_levels": Range(0, 10_000),
        "schedule_fraction": _PART,
        "logit_mean": Range(-100, 100),
        "logit_std": Range(0, 100, above=True),
        "shift": Range(0, 1000, above=True),
        "min_sigma": Range(0, 1, below=True),
    },
    "FSDPDiffusionActorConfig": {
        "ppo_mini_batch_size": _COUNT,
        "ppo_micro_batch_size_per_gpu": _COUNT,
        "log_prob_micro_batch_size_per_gpu": _COUNT,
        "ppo_epochs": Range(1, 10_000),
        "data_loader_seed": _SEED,
    },
    "DiffusionLossConfig": {
        "clip_ratio": _POSITIVE,
        "adv_clip_max": _POSITIVE,
        "mix_beta": _POSITIVE,
        "ref_kl_coef": _NOT_NEGATIVE,
        "adaptive_weight_min": _POSITIVE,
        "dpo_beta": _POSITIVE,
        "kl_mask_threshold": _NOT_NEGATIVE,
        "awm_power": Range(0, 100, above=True),
    },
    "DiffusionPipelineConfig": {
        "height": Range(1, 32_768),
        "width": Range(1, 32_768),
        "num_inference_steps": Range(1, 10_000),
        "true_cfg_scale": Range(0, 1000),
        "max_sequence_length": Range(1, 1_000_000),
        "guidance_scale": Range(0, 1000),
        "num_frames": Range(1, 100_000),
    },
    "DiffusionRolloutAlgoConfig": {
        "noise_level": Range(0, 100),
        "sde_window_size": Range(0, 10_000),
        "sde_window_range": Range(0, 10_000, count=2),
        "iters_per_group": _COUNT,
        "sde_window_seed": _SEED,
        "tail_ratio": _PART,
    },
    "DiffusionSamplingConfig": {"n": _COUNT, "seed": _SEED},
    "AgentLoopConfig": {"num_turns": Range(1, 1000)},
    "RouterConfig": {
        "request_timeout_s": _SECONDS,
        "max_retries": Range(0, 1000),
        "start_timeout_s": Range(0, 1e7, above=True),
    },
    "VllmOmniConfig": {
        "tensor_model_parallel_size": Range(1, 1024),
        "max_num_seqs": _COUNT,
        "request_batch_max_wait_ms": Range(0, 1e7),
        "openai_port": Range(1, 65_535),
    },
    "DiffusionRolloutConfig": {"n": _COUNT, "seed": _SEED, "max_batch_size": _COUNT, "num_replicas": Range(1, 10_000)},
}

_DTYPES = ("fp32", "float32", "bf16", "bfloat16", "fp16", "float16")

WORDS: dict[str, dict[str, tuple[str, ...]]] = {
    "DiffusionModelConfig": {"lora_dtype": _DTYPES, "lora_init_weights": ("gaussian", "kaiming")},
    "MixedPrecisionConfig": {"param_dtype": _DTYPES, "reduce_dtype": _DTYPES},
    "FSDPEngineConfig": {"model_dtype": _DTYPES, "sharding": ("auto", "shard", "replicate")},
    "FSDPOptimizerConfig": {"lr_scheduler_type": ("constant", "linear", "cosine")},
    "CheckpointConfig": {
        "save_contents": ("model", "optimizer", "extra", "lora", "hf_model"),
        "load_contents": ("model", "optimizer", "extra", "lora", "hf_model"),
    },
    "ForwardProcessConfig": {"levels": ("schedule", "uniform", "logit_normal")},
}
"""What the engine knows; a test holds the two together. Repeated here because the engine's own tables need torch."""


def check_ranges(schema: type, tree: dict[str, Any], prefix: str = "") -> None:
    """Raise `TrainerError`, with key, value and what it may be, for the first number out of its range or unknown word."""
    ranges, words = RANGES.get(schema.__name__, {}), WORDS.get(schema.__name__, {})
    for name, kind in get_type_hints(schema).items():
        value, inner, span = tree.get(name), is_section(kind), ranges.get(name)
        if inner is not None and isinstance(value, dict):
            check_ranges(inner, value, f"{prefix}{name}.")
        for word in (value if isinstance(value, list) else (value,)) if name in words else ():
            if word not in words[name] and not isinstance(word, Reference):
                raise TrainerError(
                    f"{prefix}{name}={value!r} must be {'some' if isinstance(value, list) else 'one'} of {', '.join(words[name])}"
                )
        if span is None or value is None or isinstance(value, Reference):
            continue
        if span.count is not None and len(value) != span.count:
            raise TrainerError(f"{prefix}{name}={value} must be a list of {span.count} numbers, each {span}")
        for number in value if span.count is not None else (value,):
            if not span.holds(number):
                many = "each of its numbers" if span.count is not None else "it"
                raise TrainerError(f"{prefix}{name}={value} is out of range: {many} must be {span}")


def has_numbers(kind: Any) -> bool:
    """Whether a field of this type holds a number or a list of numbers."""
    return kind in (int, float) or any(has_numbers(one) for one in get_args(kind))
