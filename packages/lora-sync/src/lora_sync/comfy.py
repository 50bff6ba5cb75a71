"""Write ComfyUI's layout: its own layer names, fused projections, `lora_down`/`lora_up`/`alpha`."""

from __future__ import annotations

import torch
from torch import Tensor

from .fuse import Piece, fuse
from .maps import get_map
from .names import NameMap, Part
from .payload import A, B, LoRAPayload

DOWN, UP, ALPHA = ".lora_down.weight", ".lora_up.weight", ".alpha"


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
    """Tensors under ComfyUI's keys. Raises `NameMapError` (no rule) and `ExportError` (slices that do not fuse)."""
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


def _write(out: dict[str, Tensor], names: NameMap, layer: str, piece: Piece, *, with_alpha: bool) -> None:
    key = names.comfy_key(layer)
    out[key + DOWN], out[key + UP] = piece.down, piece.up
    if with_alpha:
        out[key + ALPHA] = torch.tensor(piece.alpha, dtype=torch.float32)
