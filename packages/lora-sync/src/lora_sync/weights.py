"""Full weights for non-LoRA training: streamed bucket by bucket, so memory stays at one bucket plus one tensor.

A stream is a row of `WeightBucket` messages that any transport carries. Each has its own content hash and its number, and the last
one says so; a receiver takes them in order, and every parameter exactly once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .checksum import content_hash, module_sum
from .errors import AdapterError, BindError, CorruptPayloadError, PayloadError, StaleVersionError
from .layers import base_name, base_parameters, check_plain_lora, copy_into, full, layers_of, reshard
from .message import Message

_PARTIAL = "_lora_sync_partial"


@dataclass(frozen=True)
class WeightBucket(Message, kind="weights"):
    """Some tensors of a stream: bucket `index`, from 0, of its version; `last` is the end."""

    index: int
    last: bool


@dataclass(frozen=True)
class WeightReceipt:
    """What a receiver of full weights did.

    Args:
        version: of the weights that are in place now.
        tensors_bound: how many were written; all of them, or there would be no receipt.
        checksum: `content_sum` of what the receiver holds, made after the last tensor: compare it with that of what was sent,
            in the receiver's dtype.
    """

    version: int
    tensors_bound: int
    checksum: str


def base_weights(module: nn.Module, adapter_name: str | None = None) -> Iterator[tuple[str, Tensor]]:
    """(base name, full tensor) of every base parameter, one at a time; with an adapter, W + (alpha / r) · B·A where it sits.

    The module is not changed. Under FSDP2 all ranks iterate to the end (a gather per tensor).
    """
    reshard(module)
    adapted: dict[str, Any] = layers_of(module, adapter_name) if adapter_name else {}
    for name, parameter in base_parameters(module).items():
        owner = name.removesuffix(".weight")
        if adapter_name and name.endswith(".weight") and owner in adapted:
            yield name, merged_weight(owner, adapted[owner], adapter_name)
        else:
            yield name, full(parameter)


def merged_weight(name: str, layer: Any, adapter_name: str) -> Tensor:
    """Full W + (alpha / r) · B·A of one layer, summed in float32 and rounded once to W's dtype. A collective when sharded."""
    check_plain_lora(name, layer, adapter_name)
    weight = full(layer.get_base_layer().weight)
    if getattr(layer, "fan_in_fan_out", False):
        raise PayloadError(f"layer {name!r} keeps its weight transposed (fan_in_fan_out), which cannot be merged.")
    if layer.merged:
        raise BindError(f"layer {name!r} has {layer.merged_adapters!r} merged by PEFT; call its unmerge first.")
    if not weight.is_floating_point():
        raise AdapterError(f"layer {name!r} is quantised; merge into the unquantised model instead.")
    down, up = (full(part[adapter_name].weight).float().flatten(1) for part in (layer.lora_A, layer.lora_B))
    delta = float(layer.scaling[adapter_name]) * (up @ down)
    return (weight.float() + delta.reshape(weight.shape)).to(weight.dtype)


def buckets(named: Iterable[tuple[str, Tensor]], limit_bytes: int) -> Iterator[tuple[list[tuple[str, Tensor]], bool]]:
    """Group a stream into buckets of at most `limit_bytes` (a larger tensor is one of its own): (bucket, is it the last)."""
    held: list[tuple[str, Tensor]] = []
    size = 0
    for name, value in named:
        if held and size + value.nbytes > limit_bytes:
            yield held, False
            held, size = [], 0
        held.append((name, value))
        size += value.nbytes
    yield held, True


def load_named(module: nn.Module, named: Iterable[tuple[str, Tensor]]) -> int:
    """Copy a complete set of full tensors into the base parameters, by `base_name`, whatever their dtype, device and sharding.

    Returns how many there were. Raises `BindError` for a name that finds nothing, another shape or one that was not sent, and
    `CorruptPayloadError` for one that was sent twice. Full weights are too large to stage: then, and meanwhile, the module holds
    a mixture and `weights_complete` is False.
    """
    reshard(module)
    targets, seen = base_parameters(module), set[str]()
    module.__dict__[_PARTIAL] = True
    for name, value in named:
        base = base_name(name)
        target = targets.get(base)
        if target is None:
            raise BindError(
                f"weight {name!r} has no parameter in this {type(module).__name__}: send to the same architecture, under the "
                "receiver's names."
            )
        if target.shape != value.shape:
            raise BindError(f"weight {name!r} has shape {tuple(value.shape)}, the module {tuple(target.shape)}.")
        if base in seen:
            raise CorruptPayloadError(f"weight {name!r} was sent twice.")
        copy_into(target, value)
        seen.add(base)
    if missing := sorted(set(targets) - seen):
        raise BindError(f"{len(missing)} of {len(targets)} parameters were not sent: {missing[:3]!r}….")
    module.__dict__[_PARTIAL] = False
    return len(seen)


def stream_weights(
    named: Iterable[tuple[str, Tensor]], *, version: int, bucket_bytes: int = 256 << 20
) -> Iterator[WeightBucket]:
    """Named tensors, such as `base_weights`, as messages of at most `bucket_bytes` (a larger tensor gets its own)."""
    for index, (held, last) in enumerate(buckets(named, bucket_bytes)):
        if not held:
            raise PayloadError("there are no weights to stream; give base_weights(model).")
        tensors = dict(held)
        yield WeightBucket(tensors, version, content_hash(tensors, {}), index, last)


def load_weights(
    module: nn.Module, stream: Iterable[WeightBucket], *, previous_version: int | None = None
) -> WeightReceipt:
    """`load_named` of a stream. Raises `StaleVersionError` too, and `CorruptPayloadError` for lost, repeated or swapped buckets."""
    version, due = -1, 0

    def in_order() -> Iterator[tuple[str, Tensor]]:
        nonlocal version, due
        for bucket in stream:
            version = bucket.version if due == 0 else version
            if previous_version is not None and bucket.version <= previous_version:
                raise StaleVersionError(f"version {bucket.version} came after {previous_version}; count versions up.")
            if bucket.version != version or bucket.index != due:
                raise CorruptPayloadError(
                    f"bucket {bucket.index} of version {bucket.version} came where bucket {due} of {version} was due."
                )
            yield from bucket.tensors.items()
            due += 1
            if bucket.last:
                return
        raise CorruptPayloadError(f"the stream ended after {due} buckets without its last one; send it again.")

    bound = load_named(module, in_order())
    return WeightReceipt(version, bound, module_sum(module))


def weights_complete(module: nn.Module) -> bool:
    """False while a stream is being loaded, or after one broke off."""
    return not module.__dict__.get(_PARTIAL, False)
