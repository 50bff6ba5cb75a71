"""One byte layout for disk and wire: safetensors, written and read here so that nothing is copied twice.

The public library serialises into a new bytes object and parses into new tensors. A sync of a large adapter wants
neither: `encode_plan` says where each tensor goes, `write_into` fills any writable buffer (shared memory, a mapped file,
a broadcast bucket), `decode` gives tensors that are views of the buffer. Files are ordinary safetensors (8-byte
little-endian header length, JSON header, data); a test reads them with the library and the other way round.
Format: https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor

from .errors import CorruptPayloadError, PayloadError, TruncatedPayloadError
from .foreign import what_is

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MAX_HEADER = 100 * 1024 * 1024
_HOST_PIECE = 8 << 20
META_KEY, DIGEST_KEY = "lora_sync", "lora_sync_digest"


@dataclass(frozen=True)
class Plan:
    """Header bytes (length prefix included) and, per tensor in writing order, its place in the data section."""

    header: bytes
    entries: tuple[tuple[str, int, int], ...]  # name, first byte, past-the-end byte; counted from the data section

    @property
    def data_bytes(self) -> int:
        return self.entries[-1][2] if self.entries else 0

    @property
    def total(self) -> int:
        return len(self.header) + self.data_bytes


class Entry(NamedTuple):
    """One tensor of a header: bytes [first, last) of the data section."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    first: int
    last: int


def encode_plan(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Plan:
    """Lay the tensors out by falling alignment, then name (as the library does), behind a header padded to 8 bytes."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    entries, place = [], 0
    for name in sorted(tensors, key=lambda key: (-tensors[key].element_size(), key)):
        tensor = tensors[name]
        if tensor.dtype not in _NAMES:
            raise PayloadError(f"tensor {name!r} has dtype {tensor.dtype}, which safetensors cannot store; convert it.")
        end = place + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [place, end]}
        entries.append((name, place, end))
        place = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return Plan(len(text).to_bytes(8, "little") + text, tuple(entries))


def host_pieces(tensor: Tensor, size: int = _HOST_PIECE) -> Iterator[memoryview]:
    """The tensor's bytes in order, at most ``size`` at a time.

    From a GPU they come through one page-locked buffer, at the bus's speed; the next piece overwrites the last.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    if not flat.numel():
        return
    flat = flat.view(torch.uint8)
    if flat.device.type == "cpu":
        yield from (byte_view(piece) for piece in flat.split(size))
        return
    host = torch.empty(min(size, flat.numel()), dtype=torch.uint8, pin_memory=flat.device.type == "cuda")
    for piece in flat.split(size):
        yield byte_view(host[: piece.numel()].copy_(piece))


def byte_view(flat: Tensor) -> memoryview:
    """The memory of a flat uint8 CPU tensor."""
    array: Any = flat.numpy()
    return memoryview(array)


def write_into(buffer: Tensor, plan: Plan, tensors: Mapping[str, Tensor]) -> None:
    """Fill a uint8 CPU tensor of at least ``plan.total`` bytes: one copy per tensor, straight from its device."""
    start = len(plan.header)
    buffer[:start].copy_(torch.frombuffer(bytearray(plan.header), dtype=torch.uint8))
    for name, first, last in plan.entries:
        if last > first:
            buffer[start + first : start + last].copy_(
                tensors[name].detach().contiguous().reshape(-1).view(torch.uint8)
            )


def chunks(plan: Plan, tensors: Mapping[str, Tensor], size: int = _HOST_PIECE) -> Iterator[memoryview]:
    """The encoded bytes in order, in pieces of at most ``size``; use each before asking for the next."""
    yield memoryview(plan.header)
    for name, _, _ in plan.entries:
        yield from host_pieces(tensors[name], size)


def as_buffer(data: Any) -> Tensor:
    """A flat uint8 tensor over bytes, bytearray, memoryview, numpy array or mmap; no copy."""
    if isinstance(data, Tensor):
        return data.reshape(-1).view(torch.uint8)
    with warnings.catch_warnings():  # read-only buffers are fine here: payload tensors are never written to
        warnings.filterwarnings("ignore", message=".*not writable.*")
        return torch.frombuffer(data, dtype=torch.uint8) if len(data) else torch.empty(0, dtype=torch.uint8)


def decode(data: Any, origin: str = "payload") -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors (views of ``data``) and metadata. Every length and offset is checked before any tensor is made."""
    buffer = as_buffer(data)
    size = buffer.numel()
    if kind := what_is(buffer[:512].cpu().numpy().tobytes(), size):
        raise (CorruptPayloadError if size else TruncatedPayloadError)(f"{origin} is no safetensors file but {kind}.")
    if size < 8:
        raise TruncatedPayloadError(f"{origin}: {size} bytes cannot hold even a header length; send or copy it again.")
    start = 8 + int.from_bytes(buffer[:8].cpu().numpy().tobytes(), "little")
    if start > _MAX_HEADER:
        raise CorruptPayloadError(
            f"{origin}: its first bytes give a header of {start - 8} bytes, so this is no safetensors file; get it again."
        )
    if start > size:
        raise TruncatedPayloadError(
            f"{origin}: the header needs {start} bytes and there are {size}; send or copy it again."
        )
    entries, metadata = parse_header(buffer[8:start].cpu().numpy().tobytes(), origin)
    return views(buffer[start:], entries, origin), metadata


def parse_header(text: bytes, origin: str = "payload") -> tuple[list[Entry], dict[str, str]]:
    """Entries by place, and metadata, from the JSON header. Raises ``CorruptPayloadError``."""
    try:
        header = json.loads(text)
        metadata = {str(key): str(value) for key, value in header.pop("__metadata__", {}).items()}
        entries = [Entry(n, e["dtype"], tuple(e["shape"]), *e["data_offsets"]) for n, e in header.items()]
        entries.sort(key=lambda entry: (entry.first, entry.last))
        problem = _layout_problem(entries)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptPayloadError(f"{origin}: the header cannot be read ({error}); send or copy it again.") from error
    if problem:
        raise CorruptPayloadError(f"{origin}: {problem}; send or copy it again.")
    return entries, metadata


def views(data: Tensor, entries: Iterable[Entry], origin: str = "payload") -> dict[str, Tensor]:
    """Typed views of the data section."""
    entries = list(entries)
    need = max((entry.last for entry in entries), default=0)
    if data.numel() < need:
        raise TruncatedPayloadError(
            f"{origin}: {need} bytes of data expected, {data.numel()} found; send or copy it again."
        )
    if data.numel() > need:
        raise CorruptPayloadError(f"{origin}: {data.numel() - need} bytes of data too many; send or copy it again.")
    return {e.name: _view(data[e.first : e.last], _DTYPES[e.dtype], e.shape) for e in entries}


def _layout_problem(entries: Iterable[Entry]) -> str | None:
    place = 0
    for name, dtype, shape, first, last in entries:
        if dtype not in _DTYPES:
            return f"tensor {name!r} has unknown dtype {dtype!r}"
        count = 1
        for dim in shape:
            if not isinstance(dim, int) or dim < 0:
                return f"tensor {name!r} has shape {shape!r}"
            count *= dim
        if first != place or last - first != count * torch.empty(0, dtype=_DTYPES[dtype]).element_size():
            return f"tensor {name!r} does not fill its place [{first}, {last})"
        place = last
    return None


def _view(data: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    item = torch.empty(0, dtype=dtype).element_size()
    if data.numel() == 0:
        return torch.empty(shape, dtype=dtype)
    if data.data_ptr() % item:  # a header padded by someone else: views need alignment
        data = data.clone()
    return data.view(dtype).reshape(shape)


def seal(meta: Mapping[str, Any]) -> dict[str, str]:
    """File metadata that carries ``meta`` and a digest of it, so that a flipped bit in the header shows as well."""
    text = json.dumps(meta, sort_keys=True, separators=(",", ":"))
    return {"format": "pt", META_KEY: text, DIGEST_KEY: xxhash.xxh3_128_hexdigest(text.encode())}


def unseal(metadata: Mapping[str, str], origin: str = "payload") -> dict[str, Any]:
    """Inverse of `seal`; raises ``CorruptPayloadError`` when the metadata are absent or do not match their digest."""
    text = metadata.get(META_KEY)
    if text is None:
        raise CorruptPayloadError(
            f"{origin}: no {META_KEY!r} metadata, so this was not written by lora_sync. Read it with load_any()."
        )
    digest = xxhash.xxh3_128_hexdigest(text.encode())
    if digest != metadata.get(DIGEST_KEY) or metadata.get("format") != "pt":
        raise CorruptPayloadError(f"{origin}: the metadata do not match their digest; send or copy it again.")
    meta: dict[str, Any] = json.loads(text)
    return meta
