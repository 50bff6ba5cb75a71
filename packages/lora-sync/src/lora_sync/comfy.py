"""ComfyUI's layout: its own layer names, fused projections, ``lora_down``/``lora_up``/``alpha``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .errors import NameMapError, PayloadError
from .fuse import Piece, fuse, split
from .names import NameMap, Part, get_map
from .payload import A, B, LoRAPayload

DOWN, UP, ALPHA = ".lora_down.weight", ".lora_up.weight", ".alpha"
_PREFIXES = ("diffusion_model.", "lora_unet_")


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
    fused: dict[str, tuple[Part, dict[int, Piece]]] = {}
    out: dict[str, Tensor] = {}
    for module in payload.modules:
        rule, _ = names.rule(module)
        layer, part = names.to_comfy(module)
        up = payload.tensors[module + B]
        piece = Piece(
            payload.tensors[module + A],
            up.roll(up.shape[0] // 2, 0) if rule.swap_halves else up,
            payload.alpha_of(module),
        )
        if part is None:
            _write(out, names, layer, piece, with_alpha=not rule.fold_alpha)
        else:
            fused.setdefault(layer, (part, {}))[1][part.index] = piece
    for layer, (part, pieces) in fused.items():
        _write(out, names, layer, fuse(layer, part.widths, pieces), with_alpha=True)
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
        parts = split(key, piece, targets[0][1].part.widths) if targets[0][1].part else {0: piece}
        for index, (module, rule) in enumerate(targets):
            if index not in parts:
                continue
            part = parts[index]
            if module in alphas:
                raise NameMapError(f"{key!r} gives {module!r} a second time; the file names that layer twice.")
            up = part.up.roll(part.up.shape[0] // 2, 0) if rule.swap_halves else part.up
            neutral[module + A], neutral[module + B], alphas[module] = part.down, up, part.alpha
    return LoRAPayload.build(neutral, alphas=alphas, version=version, base_fingerprint=base_fingerprint)


def _write(out: dict[str, Tensor], names: NameMap, layer: str, piece: Piece, *, with_alpha: bool) -> None:
    key = names.comfy_key(layer)
    out[key + DOWN], out[key + UP] = piece.down, piece.up
    if with_alpha:
        out[key + ALPHA] = torch.tensor(piece.alpha, dtype=torch.float32)


def _pieces(tensors: Mapping[str, Tensor]) -> dict[str, Piece]:
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
        pieces[key] = Piece(parts["down"], parts["up"], alpha)
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
