"""One copy of weights for two processes on one device: a trainer lends its own, a sampler borrows them.

The frozen ones are used where they lie; of an adapter, which changes with every step, the sampler makes its own form from there.
A sampler may hold some layers fused (q, k and v in one tensor). What is one tensor there becomes one tensor here too, of which
the trainer's parameters are slices of rows: values and shapes stay, so neither side computes anything else than before.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .layers import adapter_parameters, base_parameters, is_sharded, layer_alpha, layers_of
from .maps import get_map
from .payload import Promise

_RECORD = "_lora_sync_lent"


class Layout(NamedTuple):
    """A tensor as the borrower holds it."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class Loan(NamedTuple):
    """What opens a lent tensor in another process of this machine, one's own: it holds functions, so it travels as a pickle."""

    rebuild: Callable[..., Tensor]
    arguments: tuple[Any, ...]

    def open(self) -> Tensor:
        """The lender's memory. Raises `RuntimeError` where this process cannot map it."""
        return self.rebuild(*self.arguments)


class LentLoRA(NamedTuple):
    """An adapter at one moment, as `lend_adapter` has lent it: what a payload says beside its tensors."""

    name: str
    promise: Promise
    """Its hash is empty: the borrower compares elements with the lender's own."""
    scales: dict[str, float]
    """Module → alpha / r."""
    rank: int
    """The largest."""


def lend(module: nn.Module, wanted: Mapping[str, Layout], names: str) -> dict[str, Loan]:
    """Lend a module's base parameters, as the borrower lays them out.

    A parameter that is lent moves into memory that other processes can map; when asked again, the same memory is lent again.

    Args:
        module: its base is frozen from here on. Sharded parameters are not lent.
        wanted: name → layout of the borrower's tensors, below its `transformer`, or also `transformer_2`.
        names: map of lora_sync that says which of the module's parameters they hold; "any": those of the same name.

    Returns:
        Those of the wanted tensors that the module has, in the same dtype and shape.
    """
    held = base_parameters(module)
    several = any(name.startswith("transformer_2.") for name in held)
    parts = (lambda name: (name,)) if names == "any" else get_map(names).from_vllm
    return _lend(module, held, wanted, lambda name: parts(name if several else name.removeprefix("transformer.")))


def lend_adapter(module: nn.Module, name: str) -> dict[str, Loan]:
    """Lend an adapter, each tensor for itself. An optimizer goes on changing its parameters in place."""
    held = {f"{name}:{key}": parameter for key, parameter in adapter_parameters(module, name).items()}
    wanted = {key: Layout(parameter.dtype, tuple(parameter.shape)) for key, parameter in held.items()}
    loans = _lend(module, held, wanted, lambda key: (key,))
    return {key.removeprefix(f"{name}:"): loan for key, loan in loans.items()}


def lent_adapter(module: nn.Module, name: str, version: int) -> LentLoRA | None:
    """An adapter that was lent and still lies there, as it is now; None for another one. The device has finished with it."""
    lent, held = module.__dict__.get(_RECORD, _Lent()).tensors, adapter_parameters(module, name)
    there = [lent.get(f"{name}:{key}") for key in held]
    if any(old is None or old.data_ptr() != new.data_ptr() for old, new in zip(there, held.values(), strict=True)):
        return None
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    layers = layers_of(module, name)
    ranks = {key: int(layer.r[name]) for key, layer in layers.items()}
    scales = {key: layer_alpha(layer, name) / ranks[key] for key, layer in layers.items()}
    promise = Promise(version, "", len(layers), len(held), sum(parameter.numel() for parameter in held.values()))
    return LentLoRA(name, promise, scales, max(ranks.values()))


def _lend(
    module: nn.Module,
    held: Mapping[str, nn.Parameter],
    wanted: Mapping[str, Layout],
    parts_of: Callable[[str], Sequence[str]],
) -> dict[str, Loan]:
    record: _Lent = module.__dict__.setdefault(_RECORD, _Lent())
    with record.mappable(next(iter(held.values())).device):
        for name, layout in wanted.items():
            parts = [held.get(part) for part in parts_of(name)]
            found = [part for part in parts if part is not None]
            if name in record.tensors or len(found) < len(parts) or not _fits(found, layout):
                continue
            whole = record.tensors[name] = torch.empty(layout.shape, dtype=layout.dtype, device=found[0].device)
            pieces = whole.split([part.shape[0] for part in found]) if len(found) > 1 else (whole,)
            for parameter, piece in zip(found, pieces, strict=True):
                parameter.data = piece.copy_(parameter.detach())
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # where the parameters lay before
    return {name: _loan(record.tensors[name]) for name in wanted if name in record.tensors}


@dataclass
class _Lent:
    """What a module has lent."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    pool: Any = None

    @contextmanager
    def mappable(self, device: torch.device) -> Iterator[None]:
        """What a GPU allocates inside can be mapped by other processes: segments of its own, and not such that grow."""
        if device.type != "cuda":
            yield
            return
        self.pool = self.pool or torch.cuda.MemPool()
        growing = any("expandable_segments:True" in os.environ.get(f"PYTORCH_{x}ALLOC_CONF", "") for x in ("CUDA_", ""))
        choose: Any = torch.cuda.memory._set_allocator_settings
        if growing:
            choose("expandable_segments:False")
        try:
            with torch.cuda.use_mem_pool(self.pool, device):
                yield
        finally:
            if growing:
                choose("expandable_segments:True")


def _fits(parts: Sequence[nn.Parameter], layout: Layout) -> bool:
    """Whether these, one below the other, are such a tensor."""
    if not parts or any(part.dtype != layout.dtype or is_sharded(part) for part in parts):
        return False
    if len(parts) == 1:
        return tuple(parts[0].shape) == tuple(layout.shape)
    rows = sum(part.shape[0] for part in parts)
    return all((rows, *part.shape[1:]) == tuple(layout.shape) for part in parts)


def _loan(tensor: Tensor) -> Loan:
    if tensor.is_cuda:
        from torch.multiprocessing.reductions import reduce_tensor

        return Loan(*reduce_tensor(tensor))
    storage: Any = tensor.untyped_storage()
    return Loan(_over_file, (*storage._share_filename_cpu_(), tensor.dtype, tuple(tensor.shape)))


def _over_file(manager: bytes, name: bytes, size: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    storage: Any = torch.UntypedStorage
    empty: Any = torch.empty(0, dtype=dtype)
    return empty.set_(storage._new_shared_filename_cpu(manager, name, size), 0, shape)  # type: ignore[no-any-return]
