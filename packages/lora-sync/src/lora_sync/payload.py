"""`LoRAPayload`: one adapter at one moment, with everything needed to prove later that it is still the same."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import Tensor

from .checksum import content_hash
from .codec import read_file, seal, unseal, write_file
from .errors import PayloadError
from .message import Message

A, B = ".lora_A.weight", ".lora_B.weight"


class Promise(NamedTuple):
    """What a receipt is compared with: a payload without its tensors."""

    version: int
    hash: str
    modules: int
    tensors: int
    numel: int


@dataclass(frozen=True)
class LoRAPayload(Message, kind="lora"):
    """Tensors of one adapter under neutral names, plus rank, alpha, version, hash and base fingerprint.

    Args:
        tensors: `<module>.lora_A.weight` [r, in, …] and `<module>.lora_B.weight` [out, r, …], in pairs.
        version, hash: as in `Message`; `build` computes the hash, `check` compares it.
        rank: the most frequent rank; a module's own rank is in its tensors' shapes.
        alpha: alpha of every module that `alpha_pattern` does not name; a module adds (alpha / r) · B·A.
        target_modules: what was adapted, as suffixes where they are exact, else full names.
        base_fingerprint: of the frozen weights (`lora_sync.fingerprint`), or None when unknown.
        alpha_pattern: module → alpha where it differs from `alpha`.
    """

    rank: int
    alpha: float
    target_modules: tuple[str, ...]
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
        """Check the tensors and make a payload, hash included. `alphas` is one number or module → alpha.

        Raises `PayloadError` when there is nothing, a half of a pair is missing, or shapes do not agree.
        """
        if not isinstance(version, int) or isinstance(version, bool) or version < 0:
            raise PayloadError(f"version is {version!r}; it must be an integer from 0 up that grows with every sync.")
        modules = modules_of(tensors)
        given = dict.fromkeys(modules, alphas) if isinstance(alphas, (int, float)) else alphas
        if missing := [name for name in modules if name not in given]:
            raise PayloadError(f"no alpha for {missing[:3]!r} ({len(missing)} in all); give one for every module.")
        per_module = {name: float(given[name]) for name in modules}
        if odd := [name for name in modules if not math.isfinite(per_module[name])]:
            raise PayloadError(
                f"alpha of {odd[0]!r} is {per_module[odd[0]]} ({len(odd)} such); it must be a finite number."
            )
        alpha = Counter(per_module.values()).most_common(1)[0][0]
        return cls(
            tensors=dict(tensors),
            version=version,
            hash=content_hash(tensors, per_module),
            rank=Counter(int(tensors[name + A].shape[0]) for name in modules).most_common(1)[0][0],
            alpha=alpha,
            target_modules=tuple(target_modules) if target_modules else modules,
            base_fingerprint=base_fingerprint,
            alpha_pattern={name: value for name, value in per_module.items() if value != alpha},
        )

    @property
    def modules(self) -> tuple[str, ...]:
        """Full neutral names of the adapted modules, sorted."""
        return modules_of(self.tensors)

    @property
    def alphas(self) -> dict[str, float]:
        """Module → alpha."""
        return {name: self.alpha_of(name) for name in self.modules}

    @property
    def promise(self) -> Promise:
        """For `verify` in a process that has no need of the tensors."""
        return Promise(self.version, self.hash, len(self.modules), len(self.tensors), self.numel)

    def alpha_of(self, module: str) -> float:
        return float(self.alpha_pattern.get(module, self.alpha))

    def rank_of(self, module: str) -> int:
        return int(self.tensors[module + A].shape[0])

    def scale_of(self, module: str) -> float:
        """alpha / r: the factor on B·A."""
        return self.alpha_of(module) / self.rank_of(module)

    def check_finite(self, origin: str = "payload") -> None:
        """Raise `PayloadError` when a weight or an alpha is NaN or infinite, naming the first."""
        lost = [name for name, alpha in self.alphas.items() if not math.isfinite(alpha)]
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

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write one safetensors file; readers see the old file or the whole new one, never a part."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        write_file(target, self.tensors, seal(self.metadata()))
        return target

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LoRAPayload:
        """Read what `save` wrote. Raises `TruncatedPayloadError` or `CorruptPayloadError`."""
        tensors, metadata = read_file(Path(path))
        return cast(LoRAPayload, cls.restore(tensors, unseal(metadata, Path(path)), str(path)))


def modules_of(tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Sorted module names; raises `PayloadError` unless the tensors are complete A/B pairs of one rank each."""
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
