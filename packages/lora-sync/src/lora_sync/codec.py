"""Adapter files: ordinary safetensors, written whole or not at all, and read with an error that says what is wrong.

Format: https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor

from .errors import CorruptPayloadError, TruncatedPayloadError
from .foreign import what_is
from .host import on_host

_MAX_HEADER = 100 * 1024 * 1024
META_KEY, DIGEST_KEY = "lora_sync", "lora_sync_digest"


def write_file(target: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write beside the target, flush to disk, then rename: a reader never sees a half-written file."""
    scratch = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        save_file({name: t.contiguous() for name, t in on_host(tensors.items()).items()}, scratch, dict(metadata))
        with open(scratch, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(scratch, target)
    finally:
        scratch.unlink(missing_ok=True)


def read_file(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata. Raises `TruncatedPayloadError` or `CorruptPayloadError`, which say what was found instead."""
    data = file.read_bytes()
    size, start = len(data), 8 + int.from_bytes(data[:8], "little")
    if kind := what_is(data[:512], size):
        raise (CorruptPayloadError if size else TruncatedPayloadError)(f"{file} is no safetensors file but {kind}.")
    if size < 8:
        raise TruncatedPayloadError(f"{file}: {size} bytes cannot hold even a header length; copy it again.")
    if start > _MAX_HEADER:
        raise CorruptPayloadError(
            f"{file}: its first bytes give a header of {start - 8} bytes, so this is no safetensors file; get it again."
        )
    if start > size:
        raise TruncatedPayloadError(f"{file}: the header needs {start} bytes and there are {size}; copy it again.")
    try:
        header = json.loads(data[8:start])
        metadata = header.pop("__metadata__", {})
        end = start + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptPayloadError(f"{file}: the header cannot be read ({error}); copy it again.") from error
    if size != end:
        wrong = f"{size - start} bytes of data found, {end - start} expected"
        raise (TruncatedPayloadError if size < end else CorruptPayloadError)(f"{file}: {wrong}; copy it again.")
    try:
        tensors = load(data)
    except (SafetensorError, KeyError) as error:  # KeyError: a dtype that torch does not have
        raise CorruptPayloadError(f"{file}: {error}; copy it again.") from error
    in_order = {name: tensors[name] for name in header}  # the library's order is another every time
    return in_order, metadata


def seal(meta: Mapping[str, Any]) -> dict[str, str]:
    """File metadata that carries `meta` and a digest of it, so that a flipped bit in the header shows as well."""
    text = json.dumps(meta, sort_keys=True, separators=(",", ":"))
    return {"format": "pt", META_KEY: text, DIGEST_KEY: xxhash.xxh3_128_hexdigest(text.encode())}


def unseal(metadata: Mapping[str, str], file: Path) -> dict[str, Any]:
    """Inverse of `seal`; raises `CorruptPayloadError` when the metadata are absent or do not match their digest."""
    text = metadata.get(META_KEY)
    if text is None:
        raise CorruptPayloadError(
            f"{file}: no {META_KEY!r} metadata, so this was not written by lora_sync. Read it with load_any()."
        )
    digest = xxhash.xxh3_128_hexdigest(text.encode())
    if digest != metadata.get(DIGEST_KEY) or metadata.get("format") != "pt":
        raise CorruptPayloadError(f"{file}: the metadata do not match their digest; copy it again.")
    meta: dict[str, Any] = json.loads(text)
    return meta
