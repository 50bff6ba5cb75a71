"""`python -m lora_sync inspect | convert | diff`: look at adapters from the command line.

Exit codes as in `diff`: 0 fine or equal, 1 different, 2 an error (one line on stderr).
"""

from __future__ import annotations

import argparse
import io
import re
import sys
import warnings
from collections.abc import Sequence

import torch

from .errors import LoRASyncError
from .export import FORMATS, export
from .load import load_any
from .maps import guess_map
from .payload import A, B, LoRAPayload

_BLOCK = re.compile(r"(?<=\.)\d+(?=\.)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # tables have lines and signs that an ASCII log cannot show
    parser = argparse.ArgumentParser(prog="lora_sync", description="Inspect, convert and compare LoRA adapters.")
    reading = argparse.ArgumentParser(add_help=False)
    reading.add_argument(
        "--architecture", help="name map; default: the one that knows every layer; any: keep the names"
    )
    reading.add_argument("--alpha", type=float, help="alpha of every layer, instead of what the file says")
    reading.add_argument("--strict", action="store_true", help="refuse a file that does not say its alpha")
    reading.add_argument("--skip-text-encoder", action="store_true", help="leave out a text encoder's LoRA")
    commands = parser.add_subparsers(dest="command", required=True)
    look = commands.add_parser("inspect", help="what is in these files", parents=[reading])
    look.add_argument("files", nargs="+", metavar="FILE", help="file or folder, in any format")
    turn = commands.add_parser("convert", help="write another format, read it back, compare", parents=[reading])
    turn.add_argument("source", metavar="FILE")
    turn.add_argument("target", metavar="TARGET", help="folder (diffusers, peft) or file (comfy)")
    turn.add_argument("--to", required=True, choices=FORMATS)
    compare = commands.add_parser("diff", help="how two adapters differ", parents=[reading])
    compare.add_argument("first", metavar="FILE")
    compare.add_argument("second", metavar="FILE")
    options = parser.parse_args(argv)

    def read(file: str) -> tuple[LoRAPayload, str]:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            how = ("architecture", "alpha", "strict", "skip_text_encoder")
            found = load_any(file, **{name: getattr(options, name) for name in how})
        for warning in said:
            print(f"lora_sync: warning: {warning.message}", file=sys.stderr)
        return found

    try:
        if options.command == "inspect":
            for file in options.files:
                print(_inspect(file, *read(file)))
            return 0
        if options.command == "convert":
            payload, before = read(options.source)
            guess = guess_map(payload.modules).name if options.to == "comfy" else "any"
            written = export(payload, options.to, options.target, architecture=options.architecture or guess)
            said = f"{len(payload.modules)} modules, {len(payload.tensors)} tensors, read back equal"
            print(f"{before} → {options.to}: {said}: {written}")
            return 0
        return _diff(options.first, options.second, read(options.first)[0], read(options.second)[0])
    except (LoRASyncError, OSError) as error:
        print(f"lora_sync: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _inspect(file: str, payload: LoRAPayload, format: str) -> str:
    try:
        architecture = guess_map(payload.modules).name
    except LoRASyncError:
        architecture = "unknown"
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in payload.tensors.values()})
    head = [
        f"{file}",
        f"  format {format} · architecture {architecture} · version {payload.version} · {payload.hash}",
        f"  {len(payload.modules)} modules · {payload.numel:,} parameters · {payload.nbytes / 1e6:.2f} MB · {', '.join(dtypes)}"
        f" · base {payload.base_fingerprint or 'not recorded'}",
    ]
    rows: list[tuple[str, ...]] = [("layer", "count", "A", "B", "alpha", "alpha/r", "mean |BA|")]
    for pattern, names in _patterns(payload).items():
        first = names[0]
        norm = sum(max(0.0, _inner(payload, payload, name)) ** 0.5 for name in names) / len(names)
        shapes = ["×".join(map(str, payload.tensors[first + suffix].shape)) for suffix in (A, B)]
        settings = (sorted({of(name) for name in names}) for of in (payload.alpha_of, payload.scale_of))
        texts = (", ".join(f"{value:g}" for value in values) for values in settings)
        rows.append((pattern, str(len(names)), *shapes, *texts, f"{norm:.4g}"))
    return "\n".join([*head, *_table(rows)])


def _diff(first: str, second: str, one: LoRAPayload, two: LoRAPayload) -> int:
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


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    return [lines[0], "  " + "  ".join("─" * width for width in widths), *lines[1:]]
