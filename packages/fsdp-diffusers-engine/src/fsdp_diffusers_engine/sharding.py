"""Ranks, meshes, FSDP2, and whole copies.

N ranks are dp x sp: data-parallel groups of `sp` ranks that share the tokens of the same samples. Each rank holds the whole
module, and the trained part's gradient is reduced once per optimizer step; or parameters are sharded over all N (or over
`fsdp_size` of them, and replicated between such groups). Gradients are averaged over all N;
`Layout.loss_scale` makes that the mean over dp, which is what the losses count with.
"""

from __future__ import annotations

import datetime
import itertools
import os
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from .config import DiffusionModelConfig, FSDPEngineConfig, Sharding
from .errors import EngineError
from .precision import dtype_of

_SHARDING = get_args(Sharding)


@dataclass(frozen=True)
class Layout:
    """Where this process stands among the ranks."""

    rank: int = 0
    world_size: int = 1
    sp_size: int = 1
    """Ranks that share one sample."""
    sharded: bool = False
    """Whether FSDP2 shards the module; else every rank holds all of it."""
    shard_mesh: DeviceMesh | None = None
    """1-D, or (replicate, shard)."""
    sequence_mesh: DeviceMesh | None = None
    """(dp, ring, ulysses), ring being 1; None without sequence parallelism."""
    dp_group: dist.ProcessGroup | None = None
    """Ranks that hold different samples; None when this is the only one."""

    @property
    def dp_size(self) -> int:
        """Number of data-parallel groups."""
        return self.world_size // self.sp_size

    @property
    def dp_rank(self) -> int:
        """Which of them this process belongs to: it must be given that share of the batch."""
        return self.rank // self.sp_size

    @property
    def loss_scale(self) -> float:
        """Every rank of a sequence group yields a part of the gradient, and the mean divides by all ranks."""
        return float(self.sp_size)


def pick_device(config: FSDPEngineConfig) -> torch.device:
    """The configured device, or CUDA card `LOCAL_RANK`, or the CPU."""
    device = torch.device(config.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise EngineError(f"device={config.device!r} but torch sees no CUDA device; set device to 'cpu' or null")
    if device.index is None:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    return device


def make_layout(config: FSDPEngineConfig, device: torch.device) -> Layout:
    """The layout that `config` asks for among the ranks of the default process group.

    Raises `EngineError` for sizes that do not divide the world size.
    """
    if config.sharding not in _SHARDING:
        raise EngineError(f"sharding={config.sharding!r} is unknown; use one of {_SHARDING}")
    started = dist.is_available() and dist.is_initialized()
    world = dist.get_world_size() if started else 1
    sp = config.ulysses_sequence_parallel_size
    if sp < 1 or world % sp:
        raise EngineError(
            f"ulysses_sequence_parallel_size={sp} does not divide the world size {world}; "
            f"use one of {[n for n in range(1, world + 1) if world % n == 0]}"
        )
    size = world if config.fsdp_size in (-1, 0) else config.fsdp_size
    if size < 1 or world % size:
        raise EngineError(
            f"fsdp_size={config.fsdp_size} does not divide the world size {world}; use -1 or one of "
            f"{[n for n in range(1, world + 1) if world % n == 0]}"
        )
    sharded = config.sharding == "shard" or (config.sharding == "auto" and world > 1)
    if config.offload_policy and not sharded:
        raise EngineError("offload_policy=True needs sharding='shard' (or several ranks); param_offload does not")
    if not sharded and world == 1:
        return Layout()
    if not started:
        _start_group_of_one(config, device)
    shard_mesh = None
    if sharded and size == world:
        shard_mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("shard",))
    elif sharded:
        shard_mesh = init_device_mesh(device.type, (world // size, size), mesh_dim_names=("replicate", "shard"))
    sequence_mesh, dp_group = None, dist.group.WORLD
    if sp > 1:
        sequence_mesh = init_device_mesh(device.type, (world // sp, 1, sp), mesh_dim_names=("dp", "ring", "ulysses"))
        dp_group = sequence_mesh["dp"].get_group()
    return Layout(dist.get_rank(), world, sp, sharded, shard_mesh, sequence_mesh, dp_group if world > sp else None)


def _start_group_of_one(config: FSDPEngineConfig, device: torch.device) -> None:
    dist.init_process_group(
        # Offloaded shards are reduced on the CPU.
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=dist.HashStore(),
        rank=0,
        world_size=1,
        timeout=datetime.timedelta(seconds=config.timeout_s),
    )


def blocks_of(module: nn.Module, config: DiffusionModelConfig) -> list[nn.Module]:
    """The repeated blocks, each of which becomes one unit of sharding (and of compilation)."""
    if config.fsdp_layer_prefixes:
        found: list[nn.Module] = []
        for prefix in config.fsdp_layer_prefixes:
            try:
                holder = module.get_submodule(prefix)
            except AttributeError as error:
                lists = [name for name, child in module.named_modules() if isinstance(child, nn.ModuleList)]
                raise EngineError(
                    f"fsdp_layer_prefixes has {prefix!r}, which {type(module).__name__} does not; "
                    f"its module lists are {lists[:8]}"
                ) from error
            found += list(holder) if isinstance(holder, nn.ModuleList) else [holder]
        return found
    names: Sequence[str] = getattr(module, "_repeated_blocks", None) or getattr(module, "_no_split_modules", None) or ()
    return [child for child in module.modules() if type(child).__name__ in names]


def shard(module: nn.Module, blocks: Sequence[nn.Module], layout: Layout, config: FSDPEngineConfig) -> None:
    """Apply `fully_shard` to every block and then to the rest of `module`, in place."""
    options: dict[str, Any] = {
        "mesh": layout.shard_mesh,
        "reshard_after_forward": config.reshard_after_forward,
        "mp_policy": _mp_policy(config),
        "offload_policy": CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
        if config.offload_policy
        else OffloadPolicy(),
    }
    # Transformers return a view of their last activation; nothing here writes into it, so torch's warning is moot.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")
    for block in blocks:
        fully_shard(block, **options)
    # The root's own parameters (embeddings, last projection) are needed again at once in backward: never freed between.
    fully_shard(module, **{**options, "reshard_after_forward": False})
    if config.forward_prefetch:
        for block, following in itertools.pairwise(blocks):
            block.set_modules_to_forward_prefetch([following])  # type: ignore[operator]


def _mp_policy(config: FSDPEngineConfig) -> MixedPrecisionPolicy:
    mixed = config.mixed_precision
    if mixed is None:
        return MixedPrecisionPolicy()
    dtype = dtype_of(mixed.param_dtype, "mixed_precision.param_dtype")
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)


def set_gradient_sync(module: nn.Module, sync: bool) -> None:
    """Reduce gradients in the coming backward, or keep them on each rank until a later one."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(sync)


def average_gradients(parameters: Iterable[nn.Parameter], layout: Layout) -> None:
    """The mean over all ranks of gradients that each rank has whole, in place: one all-reduce per dtype.

    A parameter that only some ranks used counts as zero on the others; one that none used keeps no gradient.
    """
    if layout.sharded or layout.world_size == 1:
        return
    kinds: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        kinds.setdefault(parameter.dtype, []).append(parameter)
    for dtype, group in kinds.items():
        used = torch.tensor([float(p.grad is not None) for p in group], dtype=dtype, device=group[0].device)
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in group]
        flat = torch.cat([*(part.flatten() for part in parts), used])
        dist.all_reduce(flat)
        flat /= layout.world_size
        ends = flat.split([*(part.numel() for part in parts), len(group)])
        for parameter, mean, some in zip(group, ends, (ends[-1] > 0).tolist(), strict=False):
            parameter.grad = mean.view_as(parameter) if some else None


def first_row(count: int, group: dist.ProcessGroup | None) -> int:
    """Position of this rank's first row in the batch over all ranks, of which it holds `count` rows."""
    if group is None:
        return 0
    device = "cuda" if "nccl" in dist.get_backend(group) else "cpu"
    counts = torch.zeros(dist.get_world_size(group), dtype=torch.int64, device=device)
    counts[dist.get_rank(group)] = count
    dist.all_reduce(counts, group=group)
    return int(counts[: dist.get_rank(group)].sum())


def all_reduce_number(value: float, group: dist.ProcessGroup | None, op: Any = dist.ReduceOp.SUM) -> float:
    """A number reduced over `group`; itself when there is no group."""
    if group is None:
        return value
    device = "cuda" if "nccl" in dist.get_backend(group) else "cpu"
    number = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(number, op=op, group=group)
    return float(number)
