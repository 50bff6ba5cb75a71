"""Write an adapter for other tools, read it back (`lora_sync.load`), and compare, in one call.

- `"diffusers"`: a folder that `pipeline.load_lora_weights(folder)` loads, alpha in the metadata that diffusers reads. Wan2.2's
  second expert gets the subfolder `transformer_2`, to be loaded with `load_into_transformer_2=True`.
- `"peft"`: a folder for `PeftModel.from_pretrained`, vLLM and vLLM-Omni (`adapter_config.json` beside the tensors).
- `"comfy"`: one file in ComfyUI's names (`lora_down`/`lora_up`/`alpha`); see `lora_sync.comfy`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .codec import seal, write_file
from .comfy import folded, to_comfy
from .errors import ExportError
from .experts import EXPERTS, split_experts
from .load import DIFFUSERS_FILE, PEFT_CONFIG, PEFT_FILE, PREFIXES, load_any
from .payload import LoRAPayload

FORMATS = ("diffusers", "peft", "comfy")
_DIFFUSERS_META = "lora_adapter_metadata"
_PEFT: dict[str, Any] = {"peft_type": "LORA", "inference_mode": True, "bias": "none", "lora_dropout": 0.0}
_PEFT |= {"init_lora_weights": True, "fan_in_fan_out": False, "use_rslora": False, "use_dora": False}
_PEFT |= dict.fromkeys(("task_type", "base_model_name_or_path", "modules_to_save"))
"""What `adapter_config.json` says of a plain LoRA, beside `lora_config`."""


def export(
    payload: LoRAPayload,
    format: str,
    path: str | os.PathLike[str],
    *,
    architecture: str = "qwen_image",
) -> Path:
    """Write `payload`, read it back, compare, and return the weight file's path.

    Args:
        format: `"diffusers"` and `"peft"` take a folder, `"comfy"` a file name (`.safetensors` is added).
        architecture: name map for `"comfy"`; the other formats keep the neutral names.

    Raises `ExportError` when what was read is not what was given, `NameMapError` for layers without a rule.
    """
    target = Path(path)
    experts = split_experts(payload)
    if "" not in experts and format in ("diffusers", "comfy"):
        return _export_experts(experts, format, target, architecture)
    note = {"kind": "export", "format": format, "architecture": architecture, "version": payload.version}
    note |= {"hash": payload.hash, "base_fingerprint": payload.base_fingerprint}
    if format in PREFIXES:
        file, expected = target / (DIFFUSERS_FILE if format == "diffusers" else PEFT_FILE), payload
        tensors = {PREFIXES[format] + key: tensor for key, tensor in payload.tensors.items()}
        prefix = "transformer." if format == "diffusers" else ""
        config = {prefix + key: value for key, value in lora_config(payload).items()}
        metadata = {**seal(note), _DIFFUSERS_META: json.dumps(config, sort_keys=True)}
    elif format == "comfy":
        file = target if target.suffix == ".safetensors" else target.with_name(target.name + ".safetensors")
        expected, tensors = folded(payload, architecture), to_comfy(payload, architecture)
        metadata = seal({**note, "hash": expected.hash})
    else:
        raise ExportError(f"format is {format!r}; choose one of {', '.join(FORMATS)}.")
    file.parent.mkdir(parents=True, exist_ok=True)
    if format == "peft":
        config = {**_PEFT, **lora_config(payload)}
        (target / PEFT_CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    write_file(file, tensors, metadata)
    # Of diffusers the file alone: the folder may still hold the other expert of an earlier export.
    _compare(expected, load_any(target if format == "peft" else file, architecture=architecture)[0], file)
    return file


def _export_experts(experts: Mapping[str, LoRAPayload], format: str, target: Path, architecture: str) -> Path:
    """One LoRA per expert: `transformer_2` into a subfolder (diffusers) or a second file (ComfyUI)."""
    name = target.name.removesuffix(".safetensors")
    places = {"diffusers": (target, target / EXPERTS[1])}.get(
        format, tuple(target.with_name(f"{name}.{noise}_noise") for noise in ("high", "low"))
    )
    files = [
        export(part, format, places[EXPERTS.index(expert)], architecture=architecture)
        for expert, part in experts.items()
    ]
    return files[0]


def lora_config(payload: LoRAPayload) -> dict[str, Any]:
    """r, alpha, targets and per-module exceptions in PEFT's terms."""
    ranks = {name: payload.rank_of(name) for name in payload.modules}
    return {
        "r": payload.rank,
        "lora_alpha": _number(payload.alpha),
        "target_modules": list(payload.target_modules),
        "rank_pattern": {f"^{name}": rank for name, rank in ranks.items() if rank != payload.rank},
        "alpha_pattern": {f"^{name}": _number(alpha) for name, alpha in payload.alpha_pattern.items()},
    }


def _number(value: float) -> int | float:
    """PEFT and vLLM expect whole alphas as JSON integers."""
    return int(value) if float(value).is_integer() else value


def _compare(expected: LoRAPayload, found: LoRAPayload, file: Path) -> None:
    lost, gained = set(expected.tensors) - set(found.tensors), set(found.tensors) - set(expected.tensors)
    if lost or gained:
        raise ExportError(
            f"{file}: lost {sorted(lost)[:3]!r} and gained {sorted(gained)[:3]!r} on the way through the file."
        )
    for name, tensor in expected.tensors.items():
        read = found.tensors[name]
        if read.dtype != tensor.dtype or not torch.equal(read, tensor.detach().cpu()):
            raise ExportError(f"{file}: {name!r} reads back different from what was written.")
    for name in expected.modules:
        if expected.alpha_of(name) != found.alpha_of(name):
            raise ExportError(
                f"{file}: alpha of {name!r} reads back as {found.alpha_of(name)}, {expected.alpha_of(name)} was written."
            )
