"""Full weights for non-LoRA training: streamed bucket by bucket, so memory stays at one bucket plus one tensor.

A stream is a row of `WeightBucket` messages that any transport carries. Each has its own content hash and its number, and the last
one says so; a receiver takes them in order, and every parameter exactly once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .checksum import added_sums, content_hash, module_sum, value_sum
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
        checksum: `checksum.value_sum` of what the receiver holds, made after the last tensor. Where it rounded nothing, its dtype
            being as wide as that of the tensors that came, it is that of what was sent.
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


class WeightLoader:
    """Copies a complete set of full tensors into a module's base parameters, by `base_name`.

    Dtype, device and sharding of the parameters stay. Full weights are too large to stage: until `finish`, and after an error,
    the module holds a mixture and `weights_complete` is False.

    Args:
        module: the receiver.
        previous_version: that it holds, if older messages shall be refused.
    """

    def __init__(self, module: nn.Module, *, previous_version: int | None = None) -> None:
        reshard(module)
        self.module, self.previous_version = module, previous_version
        self._targets, self._seen = base_parameters(module), set[str]()
        self._version, self._due = -1, 0
        module.__dict__[_PARTIAL] = True

    def copy(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Write some tensors. Raises `BindError` for a name that finds nothing and another shape, `CorruptPayloadError` for one
        that came before."""
        for name, value in named:
            base = base_name(name)
            target = self._targets.get(base)
            if target is None:
                raise BindError(
                    f"weight {name!r} has no parameter in this {type(self.module).__name__}: send to the same architecture, under "
                    "the receiver's names."
                )
            if target.shape != value.shape:
                raise BindError(f"weight {name!r} has shape {tuple(value.shape)}, the module {tuple(target.shape)}.")
            if base in self._seen:
                raise CorruptPayloadError(f"weight {name!r} was sent twice.")
            copy_into(target, value)
            self._seen.add(base)

    def finish(self) -> int:
        """How many tensors were written: all of them, or `BindError`."""
        if missing := sorted(set(self._targets) - self._seen):
            raise BindError(f"{len(missing)} of {len(self._targets)} parameters were not sent: {missing[:3]!r}….")
        self.module.__dict__[_PARTIAL] = False
        return len(self._seen)

    def take(self, bucket: WeightBucket) -> WeightReceipt | None:
        """The next message of a stream; a receipt after the last one. Raises `StaleVersionError` too, and `CorruptPayloadError` for
        lost, repeated or swapped messages."""
        self._version = bucket.version if self._due == 0 else self._version
        if self.previous_version is not None and bucket.version <= self.previous_version:
            raise StaleVersionError(f"version {bucket.version} came after {self.previous_version}; count versions up.")
        if bucket.version != self._version or bucket.index != self._due:
            raise CorruptPayloadError(
                f"bucket {bucket.index} of version {bucket.version} came where bucket {self._due} of {self._version} was due."
            )
        self.copy(bucket.tensors.items())
        self._due += 1
        return WeightReceipt(self._version, self.finish(), module_sum(self.module)) if bucket.last else None


def load_named(module: nn.Module, named: Iterable[tuple[str, Tensor]]) -> int:
    """A complete set of tensors into a module; see `WeightLoader`. Returns how many there were."""
    loader = WeightLoader(module)
    loader.copy(named)
    return loader.finish()


class WeightStream:
    """Named tensors, such as `base_weights`, as messages; counted and summed on their way.

    Args:
        named: complete, one tensor at a time.
        version: larger than at the last sync.
        dtype: in which they travel; None: as they are.
        bucket_bytes: most of a message (a larger tensor gets its own).
    """

    def __init__(
        self,
        named: Iterable[tuple[str, Tensor]],
        *,
        version: int,
        dtype: torch.dtype | None = None,
        bucket_bytes: int = 64 << 20,
    ) -> None:
        self.named, self.version, self.dtype, self.bucket_bytes = named, version, dtype, bucket_bytes
        self._sums: list[str] = []
        self._count = 0

    def __iter__(self) -> Iterator[WeightBucket]:
        for index, (held, last) in enumerate(buckets(self._sent(), self.bucket_bytes)):
            if not held:
                raise PayloadError("there are no weights to stream; give base_weights(model).")
            tensors = dict(held)
            self._count += len(tensors)
            self._sums.append(value_sum(tensors.values()))
            yield WeightBucket(tensors, self.version, content_hash(tensors, {}), index, last)

    def _sent(self) -> Iterator[tuple[str, Tensor]]:
        for name, value in self.named:
            yield name, value.detach() if self.dtype is None else value.detach().to(self.dtype)

    @property
    def receipt(self) -> WeightReceipt:
        """What a receiver of all that was sent so far must answer."""
        return WeightReceipt(self.version, self._count, added_sums(self._sums))


def stream_weights(
    named: Iterable[tuple[str, Tensor]], *, version: int, bucket_bytes: int = 64 << 20
) -> Iterator[WeightBucket]:
    """The messages of a `WeightStream`."""
    return iter(WeightStream(named, version=version, bucket_bytes=bucket_bytes))


def load_weights(
    module: nn.Module, stream: Iterable[WeightBucket], *, previous_version: int | None = None
) -> WeightReceipt:
    """A whole stream into a module; see `WeightLoader`. Raises `CorruptPayloadError` for one that ends early."""
    loader, count = WeightLoader(module, previous_version=previous_version), 0
    for count, bucket in enumerate(stream, 1):  # noqa: B007 - the count is for the error
        if receipt := loader.take(bucket):
            return receipt
    raise CorruptPayloadError(f"the stream ended after {count} buckets without its last one; send it again.")


def verify_weights(sent: WeightReceipt, receipt: WeightReceipt) -> WeightReceipt:
    """Return the receiver's receipt, or raise a `LoRASyncError` unless it is of the version, the number and the values sent."""
    if receipt.version != sent.version:
        raise StaleVersionError(f"version {sent.version} was sent and the receiver holds {receipt.version}.")
    if receipt != sent:
        raise CorruptPayloadError(
            f"full weights, version {sent.version}: {sent.tensors_bound} tensors of sum {sent.checksum} were sent, the receiver "
            f"holds {receipt.tensors_bound} of sum {receipt.checksum}."
        )
    return receipt


def weights_complete(module: nn.Module) -> bool:
    """False while a stream is being loaded, or after one broke off."""
    return not module.__dict__.get(_PARTIAL, False)
