"""Where a model is placed: whole copies or shards on the trainers' cards, and replicas that sample beside them or on their own.

Replicated weights are never gathered, so they are the first choice; where they do not fit, the ranks of one machine share them.
Imports no torch.
"""

from __future__ import annotations

import math
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from fsdp_diffusers_engine.config import Sharding

from .card_memory import BYTES, GB, Needs, measure, text_bound
from .cluster import cluster_address, memory_mb
from .config import RunConfig
from .errors import TrainerError
from .models import locate

USABLE = 0.92
"""Of a card's memory; the rest is gaps between the allocator's pieces."""
_REST = 3 * GB
"""CUDA's context, NCCL's buffers, what a decoded picture takes."""


@dataclass(frozen=True)
class Machine:
    """GPUs of a machine, and training processes on it."""

    gpus: int
    ranks: int


@dataclass(frozen=True)
class Placement:
    """What lies where."""

    sharding: Sharding
    """replicate or shard."""
    fsdp_size: int
    """Ranks that share one copy; -1 for whole copies."""
    engines: int = 0
    """Replicas with weights of their own."""
    tensor_parallel: int = 1
    """GPUs of one of them."""
    beside: bool = False
    """Whether they share the trainers' GPUs."""
    state_offload: bool = False
    """Whether the copies that a full fine-tuning compares with wait on the CPU."""
    optimizer_offload: bool = False
    """Whether AdamW's moments wait there while samples are drawn."""
    lines: tuple[str, ...] = ()
    """What to tell a person."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Bytes on a GPU by what they are for; empty where the model is not on this machine."""
    usable: float = 0.0
    """Bytes of a GPU that may be filled."""


def place(config: RunConfig, machines: Sequence[Machine], needs: Needs | None, card: float) -> Placement:
    """Whole copies or shards, and where replicas of the policy go.

    Args:
        machines: those of the cluster.
        needs: of the model; None while it is not on this machine.
        card: bytes of the smallest GPU, or of a process's share of memory on machines without.

    Raises:
        TrainerError: replicas or workers that find no GPU, or shards that no group of workers makes.
    """
    rollout, ranks = config.rollout, config.trainer.num_workers
    gpus = sum(machine.gpus for machine in machines)
    size = _shard_size(config, machines)
    options, lacking = list[Placement](), ""
    for split in _tensor_sizes(config, machines, needs):
        own = sum((machine.gpus - machine.ranks) // split for machine in machines) if split and gpus else 0
        room = sum(machine.ranks // split for machine in machines) if split and gpus else 0
        beside = bool(split and gpus) and own < (rollout.num_replicas or 1)
        engines = 0 if config.shares_weights else rollout.num_replicas or (room if beside else own) or 1
        if beside and engines > room:
            lacking = lacking or (
                f"rollout.num_replicas={engines} of {split} GPUs each find neither {engines * split} free GPUs beside "
                f"trainer.num_workers={ranks} nor room on theirs ({gpus} GPUs in all); ask for {max(own, room)} or fewer, or leave "
                "rollout.num_replicas and rollout.vllm_omni.tensor_model_parallel_size at null"
            )
            continue
        if rollout.sync == "nccl" and (beside or split > 1):
            raise TrainerError(
                "rollout.sync=nccl joins one card of a trainer with one of each replica, and here replicas "
                + (f"take {split} GPUs each" if split > 1 else "share the trainers' GPUs")
                + "; use rollout.sync=auto, or more GPUs"
            )
        options += [
            Placement(sharding, size if sharding == "shard" else -1, engines, split or 1, beside, *offload)
            for offload in _offloads(config, needs)
            for sharding in _kinds(config, size)
        ]
    if not options:
        raise TrainerError(lacking)
    usable = USABLE * card
    totals = [sum(_rows(config, needs, option).values()) if needs else 0.0 for option in options]
    number = next((n for n, total in enumerate(totals) if total <= usable), len(options) - 1)
    chosen = options[number]
    lines = [_describe(config, chosen), *_reward_lines(config)]
    busy = ranks + (
        0 if chosen.beside or not gpus else chosen.engines * chosen.tensor_parallel * (rollout.backend == "vllm_omni")
    )
    if gpus > busy:
        lines.append(
            f"warning: {gpus - busy} of {gpus} GPUs have no work; raise trainer.num_workers"
            + ("" if config.shares_weights else ", or rollout.num_replicas")
        )
    if needs and needs.base > GB / 2:
        shown = [o for o in options if replace(o, sharding=chosen.sharding, fsdp_size=chosen.fsdp_size) == chosen]
        lines += _table(config, needs, shown, usable, card)
        if totals[number] > usable:
            lines.append(
                f"warning: by these sums {totals[number] / GB:.1f} GB are needed on a GPU and {usable / GB:.1f} are there; lower "
                "actor.ppo_micro_batch_size_per_gpu, or share one copy among more GPUs (actor.fsdp_config.fsdp_size)"
            )
    parts = _rows(config, needs, chosen) if needs else {}
    return replace(chosen, lines=tuple(lines), parts=parts, usable=usable)


def _kinds(config: RunConfig, size: int) -> list[Sharding]:
    """What to consider, the better first."""
    fsdp, ranks = config.actor.fsdp_config, config.trainer.num_workers
    if fsdp.sharding == "shard" and size == 1 < ranks and fsdp.fsdp_size == -1:
        raise TrainerError(
            f"actor.fsdp_config.sharding=shard divides a copy among the training processes of one machine, and no machine has two "
            f"of the {ranks}; set actor.fsdp_config.fsdp_size={ranks} to share one copy across machines, or sharding=replicate"
        )
    if fsdp.sharding != "auto":
        return [fsdp.sharding]
    if fsdp.offload_policy or fsdp.fsdp_size != -1 or fsdp.mixed_precision is not None:
        return ["shard"]
    if config.model.lora_rank == 0 and size > 1:
        return ["shard"]  # whole copies would send all gradients, from a second copy of them
    return ["replicate"] if size == 1 else ["replicate", "shard"]


def _offloads(config: RunConfig, needs: Needs | None) -> list[tuple[bool, bool]]:
    """(policy states, moments) on the CPU: what to consider, the faster first. A key that says it leaves no choice."""
    fsdp = config.actor.fsdp_config
    states = [False, True] if needs and needs.states else [False]
    moments = [False, True] if config.model.lora_rank == 0 else [False]
    return [
        (state, moment)
        for moment in (moments if fsdp.optimizer_offload is None else [fsdp.optimizer_offload])
        for state in (states if fsdp.state_offload is None else [fsdp.state_offload])
    ]


NODE_GPUS = 8
"""GPUs of a machine, and 1e9 bytes of one (what cards sold with 80 GB have), of a cluster that cannot be asked."""
NODE_GPU_GB = 85.0


def foresee(config: RunConfig) -> list[str]:
    """What `place` will say, before Ray is there. Raises `TrainerError`, as it does."""
    seen = foreseen(config)
    return list(seen[0].lines) if seen else ["placement: decided when the model is on this machine"]


def foreseen(config: RunConfig) -> tuple[Placement, Needs] | None:
    """Where things will lie, and what the model needs: for the GPUs of this machine, or for those that `trainer.num_workers` needs.
    None while the model is not on this machine.

    Raises:
        TrainerError: as `place`.
    """
    ranks, ray, folder = config.trainer.num_workers, config.ray, locate(config.model.path)
    if folder is None or config.model.transformer_config:
        return None
    needs, here = measure(folder, config, text_bound(config)), [] if cluster_address(ray) else gpus_here()
    on_gpu = config.actor.fsdp_config.device != "cpu" and bool(
        here or cluster_address(ray) or ray.gpu_memory_gb or needs.base > GB
    )
    own = math.ceil(config.reward.own_gpus)
    if own and not (here or cluster_address(ray) or ray.gpu_memory_gb or on_gpu):
        raise TrainerError(
            f"reward.num_gpus asks for {own} GPUs and this machine has none; score on the CPU with reward.num_gpus=0, or set "
            "ray.address to join a cluster"
        )
    if not on_gpu:
        return place(config, [Machine(0, ranks)], needs, memory_mb() * 2**20 / ranks), needs
    if here:
        if len(here) < ranks + own:
            rewards = f", reward.num_gpus {own} more" if own else ""
            raise TrainerError(
                f"trainer.num_workers={ranks} needs {ranks} GPUs{rewards}, and this machine has {len(here)}; ask for fewer, "
                "set ray.address to join a cluster, or actor.fsdp_config.device=cpu"
            )
        card = ray.gpu_memory_gb * GB if ray.gpu_memory_gb else min(here)
        return place(config, [Machine(len(here) - own, ranks)], needs, card), needs
    full, rest = divmod(ranks, NODE_GPUS)
    guess = [Machine(NODE_GPUS, NODE_GPUS)] * full + ([Machine(rest, rest)] if rest else [])
    card = ray.gpu_memory_gb or NODE_GPU_GB
    told = f"  for {ranks + own} GPUs of {card:g} GB, at most {NODE_GPUS} on a machine; the cluster's own count when it starts"
    placed = place(config, guess, needs, card * GB)
    return replace(placed, lines=(placed.lines[0], told, *placed.lines[1:])), needs


def gpus_here() -> list[float]:
    """Bytes of each GPU of this machine."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [float(line) * 2**20 for line in said.split() if line.isdigit()]


def _shard_size(config: RunConfig, machines: Sequence[Machine]) -> int:
    """Ranks that share a copy: those of one machine, and more only where the config says so."""
    asked = config.actor.fsdp_config.fsdp_size
    return math.gcd(*(machine.ranks for machine in machines)) if asked == -1 else asked


def _tensor_sizes(config: RunConfig, machines: Sequence[Machine], needs: Needs | None) -> list[int]:
    """GPUs that one replica may take, the fewest first; 0 for one that needs none."""
    rollout = config.rollout
    if config.shares_weights or rollout.backend == "diffusers":
        return [0 if config.shares_weights or rollout.device == "cpu" else 1]
    if rollout.vllm_omni.tensor_model_parallel_size is not None:
        return [rollout.vllm_omni.tensor_model_parallel_size]
    heads, most = (needs and needs.heads) or 1, max((machine.gpus for machine in machines), default=0)
    return [n for n in (1, 2, 4, 8) if n == 1 or (n <= most and heads % n == 0)]


def _rows(config: RunConfig, needs: Needs, option: Placement) -> dict[str, float]:
    """Bytes on a trainer's card, or on an engine's own where that needs more, by what they are for."""
    share = option.fsdp_size if option.sharding == "shard" else 1
    gathered = 2 * (needs.gathered or needs.base) / max(needs.blocks, 1) if option.sharding == "shard" else 0.0
    drawn = needs.base * BYTES[config.rollout.dtype] / BYTES[config.actor.fsdp_config.model_dtype]
    engine = drawn / option.tensor_parallel + needs.encoders + needs.rollout
    trained = "adapters, gradient, optimizer" if config.model.lora_rank else "gradient, optimizer"
    rows = {"transformer": needs.base / share + gathered, trained: needs.trained / share}
    if needs.states and not option.state_offload:
        rows["copies of it (policy states)"] = needs.states / share
    if needs.merged:
        rows["merged layers to sample with"] = needs.merged / share
    if config.shares_weights:
        away = needs.moments / share if option.optimizer_offload else 0.0
        rows |= {"text encoder, VAE": needs.encoders, "activations": max(needs.update, needs.rollout - away)}
    elif option.beside:
        if sleeps(config, option):
            rows["engine, or the update while it sleeps"] = max(engine, needs.update)
        elif borrows(config, option):
            # It loads a copy of its own before it can compare the two.
            rows["engine at its start, or the update beside it"] = max(engine, needs.encoders + needs.update)
        else:
            rows["engine and update"] = engine + needs.update
    else:
        rows["activations"] = needs.update
        spare = engine - sum(rows.values())
        if option.engines and config.rollout.backend == "vllm_omni" and spare > 0:
            rows["more on an engine's own card"] = spare
    return rows | {"CUDA, NCCL, decoding": _REST}


def borrows(config: RunConfig, option: Placement) -> bool:
    """Whether an engine beside a trainer samples with the trainer's own frozen weights; see `lora_sync.one_copy`."""
    rollout, trained = config.rollout, config.actor.fsdp_config.model_dtype
    same = BYTES[rollout.dtype] == BYTES[trained] and not rollout.fp8 and config.sync_mode == "lora"
    engine = rollout.backend == "vllm_omni" and not rollout.vllm_omni.enable_sleep_mode
    return engine and same and option.beside and option.sharding == "replicate" and option.tensor_parallel == 1


def sleeps(config: RunConfig, option: Placement) -> bool:
    """Whether engines beside trainers leave the GPUs during updates."""
    rollout, asked = config.rollout, config.rollout.vllm_omni.enable_sleep_mode
    return rollout.backend == "vllm_omni" and option.beside and asked is not False and not borrows(config, option)


def _describe(config: RunConfig, chosen: Placement) -> str:
    ranks, size = config.trainer.num_workers, chosen.fsdp_size
    how = "a whole copy each" if chosen.sharding == "replicate" else f"one copy for each {size}"
    how = how if ranks > 1 else how.removesuffix(" each")
    waits = [
        ("policy states", chosen.state_offload),
        ("AdamW's moments, while samples are drawn,", chosen.optimizer_offload),
    ]
    how += "".join(f", {what} on the CPU" for what, away in waits if away)
    text = f"placement: {ranks} training process{'es' if ranks > 1 else ''}, {how} (sharding={chosen.sharding})"
    if not chosen.engines:
        return f"{text}; they sample themselves"
    where = "on the trainers' GPUs" if chosen.beside else "of their own"
    over = f" over {chosen.tensor_parallel} GPUs each" if chosen.tensor_parallel > 1 else ""
    return f"{text}; {chosen.engines} replica{'s' if chosen.engines > 1 else ''}{over} {where} sample"


def _reward_lines(config: RunConfig) -> list[str]:
    return [
        f"placement: {one.num_workers} worker{'s' if one.num_workers > 1 else ''} of the reward {name or one.name} with "
        f"{one.num_gpus:g} GPU each, {'on the trainers, asleep during updates' if one.share_trainers_gpus else 'of its own'}"
        for name, one in config.reward.each.items()
        if one.num_gpus
    ]


def _table(config: RunConfig, needs: Needs, options: Sequence[Placement], usable: float, card: float) -> list[str]:
    """The sums of each option, in aligned columns."""
    columns = [_rows(config, needs, option) for option in options]
    heads = [o.sharding + (f" over {o.fsdp_size}" if o.sharding == "shard" else "") for o in options]
    lines = [f"{'GB on a GPU':<38}" + "".join(f"{head:>15}" for head in heads)]
    for name in dict.fromkeys(name for column in columns for name in column):
        lines.append(f"  {name:<36}" + "".join(f"{column.get(name, 0.0) / GB:>15.1f}" for column in columns))
    totals = "".join(f"{sum(column.values()) / GB:>15.1f}" for column in columns)
    return [*lines, f"  {'in all':<36}{totals}   of {usable / GB:.1f} ({USABLE:.0%} of {card / GB:.1f})"]
