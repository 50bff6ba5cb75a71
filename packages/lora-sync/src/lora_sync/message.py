"""Messages as a stream of pieces: what the transports move, hashed while it moves.

A message is tensors plus metadata. On the way out, `Outgoing` walks the encoded bytes without building them; on the way
in, `Incoming` fills one staging buffer and hashes each piece while it is still in the cache. Staging buffers come from a
pool and return to it when the last tensor made from them dies: fresh memory costs more to touch than to copy into.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch
import xxhash
from torch import Tensor

from .codec import Plan, as_buffer, encode_plan, host_pieces, parse_header, seal, unseal, views
from .errors import CorruptPayloadError, TruncatedPayloadError
from .payload import LoRAPayload


class Message(Protocol):
    """Tensors and JSON-ready metadata whose ``kind`` says how to put them together again."""

    @property
    def tensors(self) -> Mapping[str, Tensor]: ...

    @property
    def version(self) -> int: ...

    def metadata(self) -> dict[str, Any]: ...


def restore(
    tensors: Mapping[str, Tensor],
    meta: Mapping[str, Any],
    *,
    check: bool,
    digests: Mapping[str, str] | None = None,
    origin: str = "message",
) -> Message:
    """Metadata and tensors back to the object that was sent."""
    if meta.get("kind") == "weights":
        from .weights import WeightBucket

        return WeightBucket.from_parts(tensors, meta, check=check, digests=digests, origin=origin)
    return LoRAPayload.from_parts(tensors, meta, check=check, digests=digests, origin=origin)


def encode(message: Message) -> Plan:
    """Where every byte of the message goes."""
    return encode_plan(message.tensors, seal(message.metadata()))


class BufferPool:
    """Keeps a few large host buffers and hands each out again once nobody looks at it."""

    def __init__(self, keep: int = 2) -> None:
        self._keep, self._free, self._lock = keep, list[np.ndarray[Any, np.dtype[np.uint8]]](), threading.Lock()

    def take(self, size: int) -> Tensor:
        """A uint8 tensor of ``size`` bytes with undefined content."""
        with self._lock:
            fits = [i for i, array in enumerate(self._free) if size <= array.size <= 2 * size + 4096]
            array = self._free.pop(fits[0]) if fits else np.empty(max(size, 1), dtype=np.uint8)
        window = array[:size] if size else array[:0]
        if size:  # torch keeps `window` alive exactly as long as any tensor that views it
            weakref.finalize(window, self._give_back, array).atexit = False
        return as_buffer(window)

    def _give_back(self, array: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        with self._lock:
            if len(self._free) < self._keep:
                self._free.append(array)


class Outgoing:
    """The data section of a message as pieces of at most ``size`` bytes, each a flat uint8 tensor on its own device."""

    def __init__(self, message: Message) -> None:
        self.plan = encode(message)
        self._tensors = message.tensors

    @property
    def header(self) -> bytes:
        """JSON header without its length prefix."""
        return self.plan.header[8:]

    def pieces(self, size: int) -> Iterator[Tensor]:
        """Runs of bytes in order; one never crosses from one tensor to the next."""
        for name, first, last in self.plan.entries:
            if last > first:
                flat = self._tensors[name].detach().contiguous().reshape(-1).view(torch.uint8)
                yield from flat.split(size)

    def fill(self, size: int) -> Iterator[list[Tensor]]:
        """Groups of runs that together fill ``size`` bytes (the last may be shorter)."""
        group: list[Tensor] = []
        room = size
        for name, first, last in self.plan.entries:
            if last == first:
                continue
            flat = self._tensors[name].detach().contiguous().reshape(-1).view(torch.uint8)
            while flat.numel():
                group.append(flat[:room])
                flat, room = flat[room:], room - group[-1].numel()
                if room == 0:
                    yield group
                    group, room = [], size
        if group:
            yield group


class Incoming:
    """Collects a message: `feed` the data section in order, then `finish`."""

    def __init__(
        self,
        header: bytes,
        *,
        check: bool,
        pool: BufferPool | None = None,
        device: str | torch.device = "cpu",
        origin: str = "message",
    ) -> None:
        self._entries, metadata = parse_header(header, origin)
        self._meta = unseal(metadata, origin)
        self._origin, self._check = origin, check
        size = self._entries[-1].last if self._entries else 0
        self.device = torch.device(device)
        on_host = self.device.type == "cpu"
        self.staging = (
            (pool or BufferPool(0)).take(size) if on_host else torch.empty(size, dtype=torch.uint8, device=self.device)
        )
        self._place, self._hashed, self._entry = 0, 0, 0
        self._hasher = xxhash.xxh3_128()
        self._digests: dict[str, str] = {}

    @property
    def missing(self) -> int:
        """Bytes still to come."""
        return self.staging.numel() - self._place

    def feed(self, piece: Tensor) -> None:
        """Take the next bytes (flat uint8, any device)."""
        size = piece.numel()
        if size > self.missing:
            raise CorruptPayloadError(f"{self._origin}: {size - self.missing} bytes too many; send it again.")
        target = self.staging[self._place : self._place + size]
        target.copy_(piece)
        # What was kept, unless that is on a GPU and would have to come back to be hashed.
        here = piece if self.device.type != "cpu" and piece.device.type == "cpu" else target
        for data in host_pieces(here) if self._check else ():
            self._hash(data)
        self._place += size

    def finish(self) -> Message:
        """The checked message; raises ``TruncatedPayloadError`` or ``CorruptPayloadError``."""
        if self.missing:
            raise TruncatedPayloadError(f"{self._origin}: {self.missing} bytes did not arrive; send it again.")
        if self._check:
            self._close_entries()
        tensors = views(self.staging, self._entries, self._origin)
        return restore(
            tensors, self._meta, check=self._check, digests=self._digests if self._check else None, origin=self._origin
        )

    def _hash(self, data: memoryview) -> None:
        """Hash per tensor while the bytes are in the cache; tensors lie back to back in entry order."""
        place, done = self._hashed, 0
        while done < len(data):
            entry = self._entries[self._entry]
            take = min(entry.last - place, len(data) - done)
            if take:
                self._hasher.update(data[done : done + take])
            done, place = done + take, place + take
            if place == entry.last:
                self._next_entry()
        self._hashed = place

    def _next_entry(self) -> None:
        self._digests[self._entries[self._entry].name] = self._hasher.hexdigest()
        self._hasher.reset()
        self._entry += 1

    def _close_entries(self) -> None:
        while self._entry < len(self._entries):  # empty tensors at the end
            self._next_entry()
