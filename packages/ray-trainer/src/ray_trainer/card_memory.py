"""What a model needs of a card: sums of bytes, from the headers of its files, before anything is loaded. Imports no torch."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

from fsdp_diffusers_engine.targets import adapted, resolve_targets
from model_specs import get_spec_for

from .config import RunConfig
from .errors import TrainerError
from .model_folder import linear_layers, part_shapes, parts, size_multiple
from .prompts import ROOM, load_prompt_sets

GB = 1e9
KEPT = 16
"""Vectors of the model's width that a block keeps for its backward, per token: 13 measured compiled, 20 computed for eager."""
BYTES = {"fp32": 4, "float32": 4, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2}
"""Of a number, by its dtype."""
_BLOCK = re.compile(r"(.*?\.\d+)\.")
_ATTENTION = re.compile(r".*\.(attn\d?|attention)\..*")


@dataclass(frozen=True)
class Needs:
    """Bytes on one card, if it holds all of a model."""

    base: float
    """Transformer, in the dtype that it is stored in."""
    trained: float
    """Adapters, with their states, gradient and AdamW's moments; of a full fine-tuning, gradient and moments of all weights."""
    encoders: float
    """Text encoders and VAE."""
    update: float
    """Activations of a micro-batch."""
    rollout: float
    """Activations of a batch of samples."""
    blocks: int
    """Of the transformer: units that are gathered one by one."""
    heads: int | None = None
    """Of its attention; a tensor-parallel size must divide them."""
    states: float = 0.0
    """Copies of all weights that a full fine-tuning compares with: reference, old, ema."""
    moments: float = 0.0
    """AdamW's, which are among `trained`."""
    merged: float = 0.0
    """Second copies of the adapted layers, where the trainer samples with merged weights."""
    gathered: float = 0.0
    """Of the transformer in the dtype that it computes in."""


def text_bound(config: RunConfig) -> int:
    """Most tokens of any prompt: no tokenizer makes more than the text has bytes."""
    texts = [text for prompts in load_prompt_sets(config.data) for p in prompts for text in (p.text, p.negative or "")]
    drawn = config.rollout.pipeline
    longest = max(len(text.encode()) for text in [*texts, drawn.negative_prompt]) + ROOM
    return min(longest, drawn.max_sequence_length)


def measure(folder: Path, config: RunConfig, text: int) -> Needs:
    """What a model needs under a config.

    Args:
        folder: of the pipeline.
        config: of the run.
        text: tokens of the longest prompt.

    Raises:
        TrainerError: a file of the folder is not what its name says.
    """
    model, actor, drawn = config.model, config.actor, config.rollout.pipeline
    named = parts(folder)
    trained_parts = (
        [model.transformer_subfolder] if model.transformer_subfolder else [p for p in named if "transformer" in p]
    )
    shapes = [part_shapes(folder, part) for part in trained_parts]
    count = sum(math.prod(shape) for part in shapes for shape in part.values())
    base, dtype = count * BYTES[actor.fsdp_config.model_dtype], BYTES[config.rollout.dtype]
    # One transformer after the other computes (Wan's experts), so activations are those of one.
    layers = {name: s for name, s in shapes[0].items() if len(s) == 2 and _BLOCK.match(name)}
    blocks = len({m[1] for name in layers if (m := _BLOCK.match(name))})
    spec = get_spec_for(folder, model.architecture)
    adapters, wrapped = 0, 0
    for part in shapes:
        linear = linear_layers(part)
        target = resolve_targets(list(linear), model, spec)
        names = adapted(list(linear), target, model.exclude_modules)
        adapters += sum(model.lora_rank * sum(linear[name]) for name in names)
        wrapped += sum(math.prod(linear[name]) for name in names)
    full, ema = model.lora_rank == 0, actor.fsdp_config.ema_decay > 0
    # Without an adapter to switch off, a reference is a copy too.
    policies = {*actor.model_config.policy_state_adapters, *(["ema"] if ema else [])}
    states = len(policies - ({"default"} if full else {"default", "reference"}))
    weights = base if full else adapters * BYTES[model.lora_dtype]
    trained = weights * 3 if full else weights * (4 + states)
    merged = wrapped * base / count * len(config.sampling_adapters) if config.sync_mode == "merged" else 0.0
    mixed = actor.fsdp_config.mixed_precision
    computed = count * BYTES[mixed.param_dtype] if mixed else base
    encoders = sum(
        math.prod(shape)
        for part in named
        if part.startswith("text_encoder") or part == "vae"
        for shape in part_shapes(folder, part).values()
    )
    width = min((min(shape) for name, shape in layers.items() if _ATTENTION.match(name)), default=0)
    cell = size_multiple(spec)
    frames = 1 + (drawn.num_frames - 1) // 4
    tokens = (drawn.height * drawn.width / cell**2 * frames + text) / actor.fsdp_config.ulysses_sequence_parallel_size
    row = tokens * width * BYTES["bf16" if dtype == 2 else "fp32"]
    guided = 2 if drawn.true_cfg_scale > 1 else 1  # both passes are kept until the backward
    kept = blocks if model.enable_gradient_checkpointing else blocks * KEPT
    update = actor.ppo_micro_batch_size_per_gpu * row * (guided * kept + 2 * KEPT)
    engine = config.rollout.backend == "vllm_omni"
    batch = config.rollout.vllm_omni.max_num_seqs if engine else config.rollout.max_batch_size
    heads = attention_heads(folder)
    return Needs(
        base,
        trained,
        encoders * dtype,
        update,
        batch * row * KEPT,
        blocks,
        heads,
        states=base * states if full else 0.0,
        moments=2 * weights,
        merged=merged if config.shares_weights else 0.0,
        gathered=computed,
    )


def attention_heads(folder: Path) -> int | None:
    """Of the transformer; None where its config does not say."""
    config = json.loads((folder / "transformer" / "config.json").read_text(encoding="utf-8"))
    found: int | None = config.get("num_attention_heads", config.get("n_heads"))
    return found


def check_split(config: RunConfig, folder: Path, cell: int | None) -> None:
    """Raise `TrainerError` unless GPUs that share a sample can share its attention heads, and its tokens, evenly.

    Args:
        config: of the run.
        folder: of the pipeline.
        cell: pixels of a token's side; None where it is not known.
    """
    heads, together = attention_heads(folder), config.actor.fsdp_config.ulysses_sequence_parallel_size
    sequence = "actor.fsdp_config.ulysses_sequence_parallel_size"
    for drawn in (config.rollout.pipeline, config.rollout.val_kwargs.pipeline):
        tokens = (drawn.height // cell) * (drawn.width // cell) if cell else together
        if tokens % together:
            raise TrainerError(
                f"{sequence}={together} does not divide the {tokens} tokens of {drawn.height}x{drawn.width} pixels; use another "
                "size, or fewer processes for a sample"
            )
    for key, size in (
        ("rollout.vllm_omni.tensor_model_parallel_size", config.rollout.vllm_omni.gpus),
        (sequence, together),
    ):
        if heads and heads % size:
            divisors = [n for n in range(1, heads + 1) if heads % n == 0]
            raise TrainerError(
                f"{key}={size} does not divide the {heads} attention heads of the model; use one of {divisors}"
            )
