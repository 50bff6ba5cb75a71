"""``python -m lora_sync inspect | convert | diff``: look at adapters from the command line.

Exit codes as in ``diff``: 0 fine or equal, 1 different, 2 an error (one line on stderr).
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence

import torch

from .errors import LoRASyncError
from .export import FORMATS, export, load_any
from .names import guess_map
from .payload import A, B, LoRAPayload

_BLOCK = re.compile(r"(?<=\.)\d+(?=\.)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="lora_sync", description="Inspect, convert and compare LoRA adapters.")
    commands = parser.add_subparsers(dest="command", required=True)
    look = commands.add_parser("inspect", help="what is in these files")
    look.add_argument("files", nargs="+", metavar="FILE", help="file or folder, in any format")
    turn = commands.add_parser("convert", help="write another format, read it back, compare")
    turn.add_argument("source", metavar="FILE")
    turn.add_argument("target", metavar="TARGET", help="folder (diffusers, peft) or file (comfy)")
    turn.add_argument("--to", required=True, choices=FORMATS)
    turn.add_argument("--architecture", help="name map; default: the one that knows every layer")
    compare = commands.add_parser("diff", help="how two adapters differ")
    compare.add_argument("first", metavar="FILE")
    compare.add_argument("second", metavar="FILE")
    options = parser.parse_args(argv)
    try:
        if options.command == "inspect":
            for file in options.files:
                print(_inspect(file))
            return 0
        if options.command == "convert":
            return _convert(options.source, options.target, options.to, options.architecture)
        return _diff(options.first, options.second)
    except (LoRASyncError, OSError) as error:
        print(f"lora_sync: {error}", file=sys.stderr)
        return 2


def _inspect(file: str) -> str:
    payload, format = load_any(file)
    try:
        architecture = guess_map(payload.modules).name
    except LoRASyncError:
        architecture = "unknown"
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in payload.tensors.values()})
    count = sum(tensor.numel() for tensor in payload.tensors.values())
    head = [
        f"{file}",
        f"  format {format} · architecture {architecture} · version {payload.version} · {payload.hash}",
        f"  {len(payload.modules)} modules · {count:,} parameters · {payload.nbytes / 1e6:.2f} MB · {', '.join(dtypes)}"
        f" · base {payload.base_fingerprint or 'not recorded'}",
    ]
    rows: list[tuple[str, ...]] = [("layer", "count", "A", "B", "alpha", "alpha/r", "mean |BA|")]
    for pattern, names in _patterns(payload).items():
        first = names[0]
        norm = sum(_norm(payload, name) for name in names) / len(names)
        shapes = ["×".join(map(str, payload.tensors[first + suffix].shape)) for suffix in (A, B)]
        alphas = sorted({payload.alpha_of(name) for name in names})
        scales = sorted({payload.scale_of(name) for name in names})
        rows.append((pattern, str(len(names)), *shapes, _list(alphas), _list(scales), f"{norm:.4g}"))
    return "\n".join([*head, *_table(rows)])


def _convert(source: str, target: str, format: str, architecture: str | None) -> int:
    payload, before = load_any(source, architecture=architecture)
    name = architecture or (guess_map(payload.modules).name if format == "comfy" else "any")
    file = export(payload, format, target, architecture=name)
    print(
        f"{before} → {format}: {len(payload.modules)} modules, {len(payload.tensors)} tensors, read back equal: {file}"
    )
    return 0


def _diff(first: str, second: str) -> int:
    one, two = load_any(first)[0], load_any(second)[0]
    if one.hash == two.hash:
        print(f"equal: {one.hash} (versions {one.version} and {two.version})")
        return 0
    rows: list[tuple[str, ...]] = [("layer", "count", "max |ΔA|", "max |ΔB|", "|Δ(BA)| / |BA|", "cosine")]
    for pattern, names in _patterns(one).items():
        shared = [name for name in names if name + A in two.tensors]
        if not shared:
            rows.append((pattern, str(len(names)), "only in the first", "", "", ""))
            continue
        gaps = [_gap(one, two, name) for name in shared]
        change, cosine = max(gap[2] for gap in gaps), min(gap[3] for gap in gaps)
        parts = [max(gap[i] for gap in gaps) for i in (0, 1)]
        rows.append(
            (pattern, f"{len(shared)}/{len(names)}", *(f"{p:.3g}" for p in parts), f"{change:.3g}", f"{cosine:.6f}")
        )
    for pattern, names in _patterns(two).items():
        if not any(name + A in one.tensors for name in names):
            rows.append((pattern, str(len(names)), "only in the second", "", "", ""))
    print("\n".join([f"{first}  {one.hash}", f"{second}  {two.hash}", *_table(rows)]))
    return 1


def _patterns(payload: LoRAPayload) -> dict[str, list[str]]:
    """Module names grouped by what remains when block numbers are blanked."""
    groups: dict[str, list[str]] = {}
    for name in payload.modules:
        groups.setdefault(_BLOCK.sub("*", name, count=1), []).append(name)
    return groups


def _inner(one: LoRAPayload, two: LoRAPayload, name: str) -> float:
    """⟨s₁B₁A₁, s₂B₂A₂⟩ = s₁s₂ tr((B₁ᵀB₂)(A₂A₁ᵀ)): never builds the product."""
    a1, b1 = (one.tensors[name + suffix].double().flatten(1) for suffix in (A, B))
    a2, b2 = (two.tensors[name + suffix].double().flatten(1) for suffix in (A, B))
    return float(one.scale_of(name) * two.scale_of(name) * torch.sum((b1.T @ b2) * (a1 @ a2.T)))


def _norm(payload: LoRAPayload, name: str) -> float:
    return max(0.0, _inner(payload, payload, name)) ** 0.5


def _gap(one: LoRAPayload, two: LoRAPayload, name: str) -> tuple[float, float, float, float]:
    parts = []
    for suffix in (A, B):
        x, y = one.tensors[name + suffix].double(), two.tensors[name + suffix].double()
        parts.append(float((x - y).abs().max()) if x.shape == y.shape else float("inf"))
    if one.tensors[name + A].shape[1:] != two.tensors[name + A].shape[1:]:
        return parts[0], parts[1], float("inf"), 0.0
    own, other, both = _inner(one, one, name), _inner(two, two, name), _inner(one, two, name)
    change = max(0.0, own + other - 2 * both) ** 0.5
    norm = max(own, 0.0) ** 0.5
    length = (max(own, 0.0) * max(other, 0.0)) ** 0.5
    return parts[0], parts[1], change / norm if norm else float(change > 0), both / length if length else 1.0


def _list(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    return [lines[0], "  " + "  ".join("─" * width for width in widths), *lines[1:]]
