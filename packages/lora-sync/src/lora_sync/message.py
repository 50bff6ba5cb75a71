"""`Message`: named tensors with metadata and a content hash, in the forms in which they travel."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from math import prod
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from .checksum import content_hash
from .errors import CorruptPayloadError, PayloadError
from .host import as_tensor, byte_view, on_host

_SCHEMA = 1


class Spec(NamedTuple):
    """One tensor of a message: name, dtype and shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def over(self, data: Any) -> Tensor:
        """The tensor over its bytes, without a copy."""
        flat = data if isinstance(data, Tensor) else as_tensor(data)
        return (
            flat.view(self.dtype).reshape(self.shape) if self.nbytes else flat.new_empty(self.shape, dtype=self.dtype)
        )


@dataclass(frozen=True)
class Message:
    """What a transport carries. Subclasses add fields; every field but `tensors` is JSON-ready metadata.

    Args:
        tensors: by name.
        version: grows by at least one for every sync.
        hash: `"xxh3:<32 hex>"` over tensors and alphas; the version is left out, so that equal weights are seen to be equal.
    """

    _kinds: ClassVar[dict[str, type[Message]]] = {}
    _kind: ClassVar[str]
    tensors: Mapping[str, Tensor]
    version: int
    hash: str

    def __init_subclass__(cls, kind: str) -> None:
        cls._kind = kind
        Message._kinds[kind] = cls

    @property
    def alphas(self) -> dict[str, float]:
        """What the hash covers beside the tensors."""
        return {}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def numel(self) -> int:
        """Elements of all tensors."""
        return sum(tensor.numel() for tensor in self.tensors.values())

    def compute_hash(self) -> str:
        """Hash of the tensors as they are now."""
        return content_hash(self.tensors, self.alphas)

    def check(self, origin: str = "payload") -> Self:
        """Return self, or raise `CorruptPayloadError` when the tensors no longer match the hash."""
        try:
            now = self.compute_hash()
        except PayloadError as error:
            raise CorruptPayloadError(f"{origin}: {error}") from error
        if now != self.hash:
            raise CorruptPayloadError(
                f"{origin}: content hash is {now}, {self.hash} was promised for version {self.version}. The bytes changed "
                "on the way, or the tensors share memory with weights that went on training (extract with copy=True)."
            )
        return self

    def metadata(self) -> dict[str, Any]:
        """Everything but the tensors, JSON-ready."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "tensors"}
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
        return {"kind": self._kind, "schema": _SCHEMA, **plain}

    @staticmethod
    def restore(tensors: Mapping[str, Tensor], meta: Mapping[str, Any], origin: str, *, check: bool = True) -> Message:
        """Tensors and `metadata` back to what was sent. Raises `CorruptPayloadError`; `check=False` skips the hash."""
        kind = Message._kinds.get(str(meta.get("kind")))
        if kind is None or meta.get("schema") != _SCHEMA:
            raise CorruptPayloadError(
                f"{origin}: kind {meta.get('kind')!r}, schema {meta.get('schema')!r}; this version reads schema {_SCHEMA} of "
                f"{', '.join(Message._kinds)}."
            )
        try:
            values = {f.name: meta[f.name] for f in fields(kind) if f.name != "tensors"}
            values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
            message = kind(dict(tensors), **values)
            return message.check(origin) if check else message
        except PayloadError:
            raise
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise CorruptPayloadError(f"{origin}: its metadata are no message's ({error!r}).") from error

    def header(self) -> bytes:
        """Metadata and tensor specs for the wire. Specs are ordered so that the tensors, back to back, are aligned."""
        names = sorted(self.tensors, key=lambda name: (-self.tensors[name].element_size(), name))
        specs = [(name, _dtype_name(self.tensors[name]), list(self.tensors[name].shape)) for name in names]
        return json.dumps([self.metadata(), specs]).encode()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as host tensors whose bytes travel out of band (protocol 5: Ray's); the hash is checked on the way in."""
        wrap = pickle.PickleBuffer if protocol >= 5 else bytes
        host = on_host(self.tensors.items())
        parts = [(name, _dtype_name(t), tuple(t.shape), wrap(byte_view(t))) for name, t in host.items()]
        return _unpickled, (self.metadata(), parts)


def parse_header(data: bytes) -> tuple[dict[str, Any], list[Spec]]:
    """Inverse of `Message.header`. Raises `CorruptPayloadError` for anything else."""
    try:
        meta, specs = json.loads(data)
        found = [Spec(name, getattr(torch, dtype), tuple(shape)) for name, dtype, shape in specs]
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptPayloadError(f"the header of a message cannot be read ({error}).") from error
    whole = all(type(size) is int and 0 <= size < 2**48 for spec in found for size in spec.shape)
    named = all(isinstance(spec.name, str) and isinstance(spec.dtype, torch.dtype) for spec in found)
    if not (isinstance(meta, dict) and whole and named):
        raise CorruptPayloadError(f"the header of a message describes no tensors: {data[:200]!r}.")
    return meta, found


def _unpickled(meta: dict[str, Any], parts: Iterable[tuple[str, str, tuple[int, ...], Any]]) -> Message:
    tensors = {
        name: Spec(name, getattr(torch, dtype), shape).over(memoryview(data)) for name, dtype, shape, data in parts
    }
    return Message.restore(tensors, meta, "pickled message")


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
