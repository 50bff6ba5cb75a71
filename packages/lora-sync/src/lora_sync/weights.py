"""Full weights for non-LoRA training: streamed bucket by bucket, so memory stays at one bucket plus one tensor.

A stream is a row of `WeightBucket` messages that any transport carries. Each has its own content hash; the last one says
how many tensors there were and the hash over all buckets, so that a receiver knows it has everything.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from .errors import BindError, CorruptPayloadError, PayloadError, StaleVersionError
from .fingerprint import base_parameters
from .layers import copy_into, full, layers_of, neutral_name, reshard
from .merge import lora_delta
from .payload import content_hash


@dataclass(frozen=True)
class WeightBucket:
    """Some tensors of a stream, with the bucket's number, and totals in the last one.

    Args:
        tensors: name → full tensor.
        version, index: of the stream, and this bucket's place in it from 0.
        hash: over this bucket's tensors.
        total_tensors, stream_hash: set in the last bucket only.
    """

    tensors: Mapping[str, Tensor]
    version: int
    index: int
    hash: str
    total_tensors: int | None = None
    stream_hash: str | None = None

    @property
    def last(self) -> bool:
        return self.stream_hash is not None

    def metadata(self) -> dict[str, Any]:
        """Everything but the tensors, JSON-ready."""
        return {
            "kind": "weights",
            "schema": 1,
            "version": self.version,
            "index": self.index,
            "hash": self.hash,
            "total_tensors": self.total_tensors,
            "stream_hash": self.stream_hash,
        }

    @classmethod
    def from_parts(
        cls,
        tensors: Mapping[str, Tensor],
        meta: Mapping[str, Any],
        *,
        check: bool = True,
        digests: Mapping[str, str] | None = None,
        origin: str = "bucket",
    ) -> WeightBucket:
        """Tensors and `metadata` back to a bucket; raises ``CorruptPayloadError``."""
        if meta.get("schema") != 1:
            raise CorruptPayloadError(f"{origin}: schema {meta.get('schema')!r}; this version reads schema 1.")
        if check and (found := content_hash(tensors, {}, digests)) != meta["hash"]:
            raise CorruptPayloadError(
                f"{origin}: bucket {meta['index']} hashes to {found}, {meta['hash']} was promised."
            )
        fields = ("version", "index", "hash", "total_tensors", "stream_hash")
        return cls(tensors, **{name: meta[name] for name in fields})


@dataclass(frozen=True)
class WeightReceipt:
    """What a receiver of a whole stream did; compare with the sender's summary by `hash`."""

    version: int
    hash: str
    tensors_loaded: int
    buckets: int


def stream_weights(
    module: nn.Module,
    *,
    version: int,
    bucket_bytes: int = 256 << 20,
    dtype: torch.dtype | None = None,
    merge_adapter: str | None = None,
    rename: Callable[[str], str] | None = None,
) -> Iterator[WeightBucket]:
    """All base parameters in buckets of at most ``bucket_bytes`` (a larger tensor gets its own).

    Args:
        dtype: convert floating-point tensors, e.g. for a bfloat16 sampler of a float32 trainer.
        merge_adapter: add this adapter to the layers it adapts, on the fly; the module is not changed.
        rename: neutral parameter name → the receiver's.

    Under FSDP2 all ranks iterate to the end (one gather per tensor).
    """
    reshard(module)
    index, count, hashes = 0, 0, list[str]()
    held: dict[str, Tensor] = {}
    size = 0
    for name, tensor in _tensors(module, merge_adapter):
        if dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(dtype)
        nbytes = tensor.numel() * tensor.element_size()
        if held and size + nbytes > bucket_bytes:
            hashes.append(content_hash(held, {}))
            yield WeightBucket(held, version, index, hashes[-1])
            index, held, size = index + 1, {}, 0
        held[rename(name) if rename else name] = tensor
        count, size = count + 1, size + nbytes
    if not held:
        raise PayloadError(f"this {type(module).__name__} has no parameters to stream.")
    hashes.append(content_hash(held, {}))
    yield WeightBucket(held, version, index, hashes[-1], count, _stream_hash(hashes))


def load_weights(
    module: nn.Module, buckets: Iterable[WeightBucket], *, previous_version: int | None = None
) -> WeightReceipt:
    """Copy a stream into the module's base parameters, whatever their dtype, device and sharding.

    Raises ``BindError`` for unknown or missing names, ``StaleVersionError``, ``CorruptPayloadError`` for lost, repeated or
    swapped buckets. Full weights are too large to stage: after an error the module holds a mixture, and says so by
    refusing `weights_complete`; load a whole stream again before sampling.
    """
    reshard(module)
    targets = base_parameters(module)
    module.__dict__["_lora_sync_partial"] = True
    seen: set[str] = set()
    hashes: list[str] = []
    version: int | None = None
    finished = False
    for bucket in buckets:
        version = bucket.version if version is None else version
        if previous_version is not None and bucket.version <= previous_version:
            raise StaleVersionError(f"version {bucket.version} came after {previous_version}; count versions up.")
        if finished or bucket.version != version or bucket.index != len(hashes):
            raise CorruptPayloadError(
                f"bucket {bucket.index} of version {bucket.version} came where bucket {len(hashes)} of {version} was due."
            )
        _load_bucket(targets, bucket, seen)
        hashes.append(bucket.hash)
        if bucket.last:
            finished = True
            if bucket.stream_hash != _stream_hash(hashes) or bucket.total_tensors != len(seen):
                raise CorruptPayloadError(
                    f"version {version}: {len(seen)} tensors in {len(hashes)} buckets came, the sender speaks of "
                    f"{bucket.total_tensors}; send the stream again."
                )
            break
    if not finished or version is None:
        raise CorruptPayloadError(f"the stream ended after {len(hashes)} buckets without its last one; send it again.")
    if missing := sorted(set(targets) - seen):
        raise BindError(f"{len(missing)} of {len(targets)} parameters were not sent: {missing[:3]!r}….")
    module.__dict__["_lora_sync_partial"] = False
    return WeightReceipt(version, _stream_hash(hashes), len(seen), len(hashes))


def weights_complete(module: nn.Module) -> bool:
    """False while a stream is being loaded, or after one broke off."""
    return not module.__dict__.get("_lora_sync_partial", False)


def _load_bucket(targets: Mapping[str, Tensor], bucket: WeightBucket, seen: set[str]) -> None:
    for name, tensor in bucket.tensors.items():
        target = targets.get(name)
        if target is None or tuple(target.shape) != tuple(tensor.shape):
            raise BindError(
                f"{name!r} {tuple(tensor.shape)} has no place here: "
                f"{'no such parameter' if target is None else f'shape {tuple(target.shape)}'}. Use rename= for other names."
            )
        if name in seen:
            raise CorruptPayloadError(f"{name!r} was sent twice.")
        copy_into(target, tensor)
        seen.add(name)


def _tensors(module: nn.Module, merge_adapter: str | None) -> Iterator[tuple[str, Tensor]]:
    adapted: dict[str, Any] = layers_of(module, merge_adapter) if merge_adapter else {}
    for name, parameter in base_parameters(module).items():
        tensor = full(parameter)
        owner = name.removesuffix(".weight")
        if owner in adapted and name.endswith(".weight"):
            delta = lora_delta(adapted[owner], merge_adapter or "")
            tensor = (tensor.float() + delta.reshape(tensor.shape)).to(tensor.dtype)
        yield neutral_name(name), tensor


def _stream_hash(hashes: list[str]) -> str:
    return "xxh3:" + xxhash.xxh3_128_hexdigest(json.dumps(hashes).encode())
