"""ComfyUI's layout: its own layer names, fused projections, ``lora_down``/``lora_up``/``alpha``.

Fusing n LoRAs of rank r into one layer stacks their A's to [n·r, in] and puts their B's on the block diagonal of
[Σ out, n·r]; with alpha n·alpha the scale stays alpha / r, so nothing is rounded. Splitting undoes exactly that, and
otherwise (a LoRA that was trained on the fused layer) gives every slice the whole A and its own rows of B.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .errors import ExportError, NameMapError, PayloadError
from .names import NameMap, Part, get_map
from .payload import A, B, LoRAPayload

DOWN, UP, ALPHA = ".lora_down.weight", ".lora_up.weight", ".alpha"
_PREFIXES = ("diffusion_model.", "lora_unet_")


@dataclass(frozen=True)
class _Piece:
    down: Tensor
    up: Tensor
    alpha: float


def is_comfy(tensors: Mapping[str, Tensor]) -> bool:
    """Whether every key carries one of ComfyUI's prefixes."""
    return bool(tensors) and all(key.startswith(_PREFIXES) for key in tensors)


def folded(payload: LoRAPayload, architecture: str) -> LoRAPayload:
    """The payload as a ComfyUI file can say it: alpha multiplied into B for layers whose alpha nobody reads."""
    names = get_map(architecture)
    tensors, alphas = dict(payload.tensors), {name: payload.alpha_of(name) for name in payload.modules}
    for module in payload.modules:
        if names.rule(module)[0].fold_alpha:
            tensors[module + B] = payload.tensors[module + B] * payload.scale_of(module)
            alphas[module] = float(payload.rank_of(module))
    return LoRAPayload.build(
        tensors,
        alphas=alphas,
        version=payload.version,
        target_modules=payload.target_modules,
        base_fingerprint=payload.base_fingerprint,
    )


def to_comfy(payload: LoRAPayload, architecture: str) -> dict[str, Tensor]:
    """Tensors under ComfyUI's keys. Raises ``NameMapError`` (no rule) and ``ExportError`` (slices that do not fuse)."""
    names, payload = get_map(architecture), folded(payload, architecture)
    fused: dict[str, tuple[Part, dict[int, _Piece]]] = {}
    out: dict[str, Tensor] = {}
    for module in payload.modules:
        rule, _ = names.rule(module)
        layer, part = names.to_comfy(module)
        up = payload.tensors[module + B]
        piece = _Piece(
            payload.tensors[module + A],
            up.roll(up.shape[0] // 2, 0) if rule.swap_halves else up,
            payload.alpha_of(module),
        )
        if part is None:
            _write(out, names, layer, piece, with_alpha=not rule.fold_alpha)
        else:
            fused.setdefault(layer, (part, {}))[1][part.index] = piece
    for layer, (part, pieces) in fused.items():
        _write(out, names, layer, _fuse(layer, part, pieces), with_alpha=True)
    return out


def from_comfy(
    tensors: Mapping[str, Tensor], architecture: str | None, *, version: int = 0, base_fingerprint: str | None = None
) -> LoRAPayload:
    """Inverse of `to_comfy`; a missing alpha means alpha = rank. ``architecture=None`` tries every map."""
    names = get_map(architecture) if architecture else _guess(tensors)
    neutral: dict[str, Tensor] = {}
    alphas: dict[str, float] = {}
    for key, piece in _pieces(tensors).items():
        targets = names.from_comfy(names.comfy_of_key(key))
        parts = _split(key, piece, targets[0][1].part) if targets[0][1].part else {0: piece}
        for index, (module, rule) in enumerate(targets):
            if index not in parts:
                continue
            part = parts[index]
            if module in alphas:
                raise NameMapError(f"{key!r} gives {module!r} a second time; the file names that layer twice.")
            up = part.up.roll(part.up.shape[0] // 2, 0) if rule.swap_halves else part.up
            neutral[module + A], neutral[module + B], alphas[module] = part.down, up, part.alpha
    return LoRAPayload.build(neutral, alphas=alphas, version=version, base_fingerprint=base_fingerprint)


def _write(out: dict[str, Tensor], names: NameMap, layer: str, piece: _Piece, *, with_alpha: bool) -> None:
    key = names.comfy_key(layer)
    out[key + DOWN], out[key + UP] = piece.down, piece.up
    if with_alpha:
        out[key + ALPHA] = torch.tensor(piece.alpha, dtype=torch.float32)


def _fuse(layer: str, part: Part, pieces: Mapping[int, _Piece]) -> _Piece:
    first = next(iter(pieces.values()))
    rank, count = first.down.shape[0], len(part.widths)
    if any(p.down.shape[0] != rank or p.alpha != first.alpha for p in pieces.values()):
        raise ExportError(
            f"ComfyUI keeps {layer!r} as one weight; its slices have ranks {[p.down.shape[0] for p in pieces.values()]} and alphas "
            f"{[p.alpha for p in pieces.values()]}. Use one rank and one alpha for them, or export another format."
        )
    index = next(iter(pieces))
    unit = pieces[index].up.shape[0] // part.widths[index]
    rows = [unit * width for width in part.widths]
    down = first.down.new_zeros(count * rank, first.down.shape[1])
    up = first.up.new_zeros(sum(rows), count * rank)
    for i, piece in pieces.items():  # a slice that was not adapted stays zero
        if piece.up.shape[0] != rows[i] or piece.down.shape[1] != down.shape[1]:
            raise ExportError(
                f"{layer!r}: slice {i} has {piece.up.shape[0]} rows, {rows[i]} expected from slice {index}."
            )
        start = sum(rows[:i])
        down[i * rank : (i + 1) * rank] = piece.down
        up[start : start + rows[i], i * rank : (i + 1) * rank] = piece.up
    return _Piece(down, up, first.alpha * count)


def _split(key: str, piece: _Piece, part: Part) -> dict[int, _Piece]:
    count, total = len(part.widths), sum(part.widths)
    if piece.up.shape[0] % total:
        raise PayloadError(f"{key!r} has {piece.up.shape[0]} rows, which do not divide as {part.widths!r}.")
    unit, rank = piece.up.shape[0] // total, piece.down.shape[0]
    blocks, start = [], 0
    for width in part.widths:
        blocks.append(piece.up[start : start + unit * width])
        start += unit * width
    if rank % count or not _block_diagonal(blocks, rank // count):
        return {i: _Piece(piece.down.clone(), block.clone(), piece.alpha) for i, block in enumerate(blocks)}
    own = rank // count
    slices = {
        i: _Piece(
            piece.down[i * own : (i + 1) * own].clone(), block[:, i * own : (i + 1) * own].clone(), piece.alpha / count
        )
        for i, block in enumerate(blocks)
    }
    return {i: s for i, s in slices.items() if s.down.any() or s.up.any()}  # all zero: filler for an unadapted slice


def _block_diagonal(blocks: list[Tensor], rank: int) -> bool:
    return all(
        not block[:, : i * rank].any() and not block[:, (i + 1) * rank :].any() for i, block in enumerate(blocks)
    )


def _pieces(tensors: Mapping[str, Tensor]) -> dict[str, _Piece]:
    found: dict[str, dict[str, Any]] = {}
    for key, tensor in tensors.items():
        for suffix, what in ((DOWN, "down"), (UP, "up"), (A, "down"), (B, "up"), (ALPHA, "alpha")):
            if key.endswith(suffix):
                found.setdefault(key.removesuffix(suffix), {})[what] = tensor
                break
        else:
            raise NameMapError(
                f"{key!r} is not a tensor of a plain LoRA (LoKr, LoHa, DoRA and diff keys are not supported)."
            )
    pieces = {}
    for key, parts in found.items():
        if "down" not in parts or "up" not in parts:
            raise PayloadError(f"{key!r} has only {sorted(parts)!r}; a LoRA layer needs lora_down and lora_up.")
        alpha = float(parts["alpha"]) if "alpha" in parts else float(parts["down"].shape[0])
        pieces[key] = _Piece(parts["down"], parts["up"], alpha)
    return pieces


def _guess(tensors: Mapping[str, Tensor]) -> NameMap:
    from .maps import MAPS

    for names in MAPS:
        try:
            for key in _pieces(tensors):
                names.from_comfy(names.comfy_of_key(key))
        except NameMapError:
            continue
        return names
    raise NameMapError("no architecture's rules know all keys of this file; name it with architecture=….")
