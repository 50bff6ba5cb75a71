"""`LoRAPayload`: one adapter at one moment, with everything needed to prove later that it is still the same.

The content hash covers what changes the function: names, dtypes, shapes, bytes and each module's alpha. It does not cover
the version, so that two versions with equal weights are seen to be equal. Tensors are hashed one by one with XXH3-128
(https://xxhash.com) and the digests are hashed in name order, so a hash can be made layer by layer and in parallel.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from .codec import Plan, as_buffer, chunks, decode, encode_plan, host_pieces, seal, unseal, write_into
from .errors import CorruptPayloadError, PayloadError
from .host import from_buffers, on_host, out_of_band

A, B = ".lora_A.weight", ".lora_B.weight"
_PARALLEL_HASH_BYTES = 32 * 1024 * 1024


@dataclass(frozen=True)
class LoRAPayload:
    """Tensors of one adapter under neutral names, plus rank, alpha, version, hash and base fingerprint.

    Args:
        tensors: ``<module>.lora_A.weight`` [r, in, …] and ``<module>.lora_B.weight`` [out, r, …], in pairs.
        rank: the most frequent rank; a module's own rank is in its tensors' shapes.
        alpha: alpha of every module that `alpha_pattern` does not name; a module adds (alpha / r) · B·A.
        target_modules: what was adapted, as suffixes where they are exact, else full names.
        version: grows by at least one for every sync; a receiver refuses to go back.
        hash: ``"xxh3:<32 hex>"`` over the content; computed by `build`, checked by `check`.
        base_fingerprint: of the frozen weights (`lora_sync.fingerprint`), or None when unknown.
        alpha_pattern: module → alpha where it differs from `alpha`.
    """

    tensors: Mapping[str, Tensor]
    rank: int
    alpha: float
    target_modules: tuple[str, ...]
    version: int
    hash: str
    base_fingerprint: str | None = None
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def build(
        cls,
        tensors: Mapping[str, Tensor],
        *,
        alphas: Mapping[str, float] | float,
        version: int,
        target_modules: tuple[str, ...] | None = None,
        base_fingerprint: str | None = None,
    ) -> LoRAPayload:
        """Check the tensors and make a payload, hash included.

        ``alphas`` is one number or module → alpha.
        Raises ``PayloadError`` when there is nothing, a half of a pair is missing, or shapes do not agree.
        """
        if not isinstance(version, int) or isinstance(version, bool) or version < 0:
            raise PayloadError(f"version is {version!r}; it must be an integer from 0 up that grows with every sync.")
        modules = modules_of(tensors)
        per_module = dict.fromkeys(modules, float(alphas)) if isinstance(alphas, (int, float)) else dict(alphas)
        if missing := [name for name in modules if name not in per_module]:
            raise PayloadError(f"no alpha for {missing[:3]!r} ({len(missing)} in all); give one for every module.")
        if odd := [name for name in modules if not math.isfinite(per_module[name])]:
            raise PayloadError(
                f"alpha of {odd[0]!r} is {per_module[odd[0]]} ({len(odd)} such); it must be a finite number."
            )
        alpha = Counter(per_module[name] for name in modules).most_common(1)[0][0]
        pattern = {name: float(per_module[name]) for name in modules if per_module[name] != alpha}
        return cls(
            tensors=dict(tensors),
            rank=Counter(int(tensors[name + A].shape[0]) for name in modules).most_common(1)[0][0],
            alpha=float(alpha),
            target_modules=tuple(target_modules) if target_modules else modules,
            version=version,
            hash=content_hash(tensors, {name: float(per_module[name]) for name in modules}),
            base_fingerprint=base_fingerprint,
            alpha_pattern=pattern,
        )

    @property
    def modules(self) -> tuple[str, ...]:
        """Full neutral names of the adapted modules, sorted."""
        return modules_of(self.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    @property
    def numel(self) -> int:
        """Elements of all tensors."""
        return sum(tensor.numel() for tensor in self.tensors.values())

    def alpha_of(self, module: str) -> float:
        return float(self.alpha_pattern.get(module, self.alpha))

    def rank_of(self, module: str) -> int:
        return int(self.tensors[module + A].shape[0])

    def scale_of(self, module: str) -> float:
        """alpha / r: the factor on B·A."""
        return self.alpha_of(module) / self.rank_of(module)

    def compute_hash(self, digests: Mapping[str, str] | None = None) -> str:
        """Hash of the tensors as they are now."""
        return content_hash(self.tensors, {name: self.alpha_of(name) for name in self.modules}, digests)

    def check(self, origin: str = "payload", digests: Mapping[str, str] | None = None) -> LoRAPayload:
        """Return self, or raise ``CorruptPayloadError`` when the tensors no longer match the hash."""
        now = self.compute_hash(digests)
        if now != self.hash:
            raise CorruptPayloadError(
                f"{origin}: content hash is {now}, {self.hash} was promised for version {self.version}. The bytes changed "
                "on the way, or the tensors share memory with weights that went on training (extract with copy=True)."
            )
        return self

    def check_finite(self, origin: str = "payload") -> None:
        """Raise ``PayloadError`` when a weight or an alpha is NaN or infinite, naming the first."""
        lost = [name for name in self.modules if not math.isfinite(self.alpha_of(name))]
        # a sum is one fast pass; only where it is not finite (an overflow would do) are the elements looked at
        sums = {name: tensor.detach().sum(dtype=torch.float32) for name, tensor in self.tensors.items()}
        where = next(iter(sums.values())).device
        whole = torch.stack([value.to(where) for value in sums.values()]).isfinite().tolist()  # one wait for a GPU
        doubtful = [name for name, fine in zip(sums, whole, strict=True) if not fine]
        lost += [name for name in doubtful if not bool(self.tensors[name].isfinite().all())]
        if lost:
            raise PayloadError(
                f"{origin}: {lost[0]!r} holds NaN or infinity ({len(lost)} such tensors); every picture would be NaN. "
                "Take an earlier checkpoint; for a file, get it again."
            )

    def to(self, device: str | torch.device | None = None, dtype: torch.dtype | None = None) -> LoRAPayload:
        """A payload on another device or in another dtype. A new dtype is new content, hence a new hash."""
        if device is not None and torch.device(device).type == "cpu":
            tensors = on_host((name, tensor.to(dtype=dtype)) for name, tensor in self.tensors.items())
        else:
            tensors = {name: tensor.to(device=device, dtype=dtype) for name, tensor in self.tensors.items()}
        moved = replace(self, tensors=tensors)
        return replace(moved, hash=moved.compute_hash()) if dtype is not None else moved

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as host tensors whose bytes travel out of band (protocol 5: Ray's), from one memory to the other.

        What arrives may be read-only memory: bind it with `apply_lora`, without ``take``. Its hash is checked on the way
        in: a payload that changed meanwhile raises ``CorruptPayloadError`` where it is unpickled.
        """
        if protocol < 5:
            return _unpickled, (bytes(self.to_bytes()),)
        return _rebuilt, (self.metadata(), out_of_band(self.tensors))

    # Bytes -------------------------------------------------------------------------------------------------------

    def metadata(self) -> dict[str, Any]:
        """Everything but the tensors, JSON-ready."""
        return {
            "kind": "lora",
            "schema": 1,
            "rank": self.rank,
            "alpha": self.alpha,
            "alpha_pattern": dict(self.alpha_pattern),
            "target_modules": list(self.target_modules),
            "version": self.version,
            "hash": self.hash,
            "base_fingerprint": self.base_fingerprint,
        }

    def plan(self) -> Plan:
        """Where every tensor goes in the encoded bytes."""
        return encode_plan(self.tensors, seal(self.metadata()))

    def to_bytes(self) -> bytearray:
        """safetensors bytes, one copy."""
        plan = self.plan()
        out = bytearray(plan.total)
        write_into(as_buffer(out), plan, self.tensors)
        return out

    @classmethod
    def from_bytes(cls, data: Any, *, check: bool = True, origin: str = "payload") -> LoRAPayload:
        """Read what `to_bytes` wrote. The tensors are views of ``data``; ``check=False`` skips the content hash.

        Raises ``TruncatedPayloadError`` or ``CorruptPayloadError``.
        """
        tensors, metadata = decode(data, origin)
        return cls.from_parts(tensors, unseal(metadata, origin), check=check, origin=origin)

    @classmethod
    def from_parts(
        cls,
        tensors: Mapping[str, Tensor],
        meta: Mapping[str, Any],
        *,
        check: bool = True,
        digests: Mapping[str, str] | None = None,
        origin: str = "payload",
    ) -> LoRAPayload:
        """Tensors and `metadata` back to a payload; ``digests`` are tensor hashes that the caller made on the way."""
        if meta.get("kind") != "lora" or meta.get("schema") != 1:
            raise CorruptPayloadError(
                f"{origin}: kind {meta.get('kind')!r}, schema {meta.get('schema')!r}; this version reads kind 'lora', "
                "schema 1."
            )
        try:
            modules_of(tensors)
        except PayloadError as error:
            raise CorruptPayloadError(f"{origin}: {error}") from error
        payload = cls(
            tensors=dict(tensors),
            rank=meta["rank"],
            alpha=meta["alpha"],
            target_modules=tuple(meta["target_modules"]),
            version=meta["version"],
            hash=meta["hash"],
            base_fingerprint=meta["base_fingerprint"],
            alpha_pattern=meta["alpha_pattern"],
        )
        return payload.check(origin, digests) if check else payload

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write one safetensors file; readers see the old file or the whole new one, never a part."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, self.plan(), self.tensors)
        return target

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, check: bool = True) -> LoRAPayload:
        """Read what `save` wrote."""
        return cls.from_bytes(bytearray(Path(path).read_bytes()), check=check, origin=str(path))


def _rebuilt(meta: dict[str, Any], parts: list[tuple[str, str, tuple[int, ...], Any]]) -> LoRAPayload:
    return LoRAPayload.from_parts(dict(from_buffers(parts)), meta, origin="pickled payload")


def _unpickled(data: bytes) -> LoRAPayload:
    return LoRAPayload.from_bytes(bytearray(data), origin="pickled payload")


def modules_of(tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Sorted module names; raises ``PayloadError`` unless the tensors are complete A/B pairs of one rank each."""
    if not tensors:
        raise PayloadError(
            "the adapter has no tensors: it would bind nothing. Check target_modules and the adapter name."
        )
    names = sorted({key.removesuffix(A).removesuffix(B) for key in tensors})
    for name in names:
        down, up = tensors.get(name + A), tensors.get(name + B)
        if name in tensors or down is None or up is None:
            present = [key for key in tensors if key == name or key.startswith(name + ".")]
            raise PayloadError(f"{name!r} is no A/B pair: found {present!r}, need {name + A!r} and {name + B!r}.")
        if down.ndim < 2 or up.ndim < 2 or down.shape[0] != up.shape[1] or 0 in (*down.shape, *up.shape):
            raise PayloadError(
                f"{name!r}: A {tuple(down.shape)} and B {tuple(up.shape)} do not share a rank (A [r, in], B [out, r]). "
                "A 1-D or empty tensor is a shard that was never gathered."
            )
    return tuple(names)


def tensor_digest(tensor: Tensor) -> str:
    """XXH3-128 of the tensor's bytes, 32 hex digits."""
    hasher = xxhash.xxh3_128()
    for piece in host_pieces(tensor):
        hasher.update(piece)
    return hasher.hexdigest()


def content_hash(
    tensors: Mapping[str, Tensor], alphas: Mapping[str, float], digests: Mapping[str, str] | None = None
) -> str:
    """Hash of names, dtypes, shapes, bytes and alphas. Large adapters are hashed on several threads."""
    names = sorted(tensors)
    if digests is None:
        total = sum(tensors[name].numel() * tensors[name].element_size() for name in names)
        if total >= _PARALLEL_HASH_BYTES:
            with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:  # xxhash lets the interpreter lock go
                digests = dict(zip(names, pool.map(lambda name: tensor_digest(tensors[name]), names), strict=True))
        else:
            digests = {name: tensor_digest(tensors[name]) for name in names}
    rows = [[name, str(tensors[name].dtype), list(tensors[name].shape), digests[name]] for name in names]
    text = json.dumps([rows, sorted((name, float(alpha)) for name, alpha in alphas.items())], separators=(",", ":"))
    return "xxh3:" + xxhash.xxh3_128_hexdigest(text.encode())


def write_atomically(target: Path, plan: Plan, tensors: Mapping[str, Tensor]) -> None:
    """Write beside the target, flush to disk, then rename: a reader never sees a half-written file."""
    scratch = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with open(scratch, "wb") as file:
            for piece in chunks(plan, tensors):
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, target)
    finally:
        scratch.unlink(missing_ok=True)
