"""Write an adapter for other tools, read it back, and compare, in one call.

- ``"diffusers"``: a folder that ``pipeline.load_lora_weights(folder)`` loads. Alpha goes into the metadata that diffusers
  itself writes and reads, so no value changes. Wan2.2's second expert gets the subfolder ``transformer_2``, for
  ``pipeline.load_lora_weights(folder / "transformer_2", load_into_transformer_2=True)``.
- ``"peft"``: a folder for ``PeftModel.from_pretrained``, vLLM and vLLM-Omni (``adapter_config.json`` beside the tensors).
- ``"comfy"``: one file in ComfyUI's names (``lora_down``/``lora_up``/``alpha``); see `lora_sync.comfy`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .codec import META_KEY, decode, encode_plan, seal, unseal
from .comfy import folded, from_comfy, is_comfy, to_comfy
from .errors import CorruptPayloadError, ExportError, NameMapError, PayloadError
from .experts import EXPERTS, join_experts, split_experts
from .payload import LoRAPayload, modules_of, write_atomically

FORMATS = ("diffusers", "peft", "comfy")
DIFFUSERS_FILE, PEFT_FILE, PEFT_CONFIG = (
    "pytorch_lora_weights.safetensors",
    "adapter_model.safetensors",
    "adapter_config.json",
)
_DIFFUSERS_META = "lora_adapter_metadata"
_PEFT_PREFIX, _DIFFUSERS_PREFIX = "base_model.model.", "transformer."


def export(
    payload: LoRAPayload,
    format: str,
    path: str | os.PathLike[str],
    *,
    architecture: str = "qwen_image",
    verify: bool = True,
) -> Path:
    """Write ``payload`` and return the weight file's path.

    Args:
        format: ``"diffusers"`` and ``"peft"`` take a folder, ``"comfy"`` a file name (``.safetensors`` is added).
        architecture: name map for ``"comfy"``; the other formats keep the neutral names.
        verify: read the file back, and compare names, shapes, dtypes, bytes and alphas.

    Raises ``ExportError`` when what was read is not what was given, ``NameMapError`` for layers without a rule.
    """
    target = Path(path)
    experts = split_experts(payload)
    if "" not in experts and format in ("diffusers", "comfy"):
        return _export_experts(experts, format, target, architecture, verify)
    note = {"kind": "export", "format": format, "architecture": architecture, "version": payload.version}
    note |= {"hash": payload.hash, "base_fingerprint": payload.base_fingerprint}
    if format == "diffusers":
        file, expected = target / DIFFUSERS_FILE, payload
        tensors = {_DIFFUSERS_PREFIX + key: tensor for key, tensor in payload.tensors.items()}
        config = {f"transformer.{key}": value for key, value in lora_config(payload).items()}
        metadata = {**seal(note), _DIFFUSERS_META: json.dumps(config, sort_keys=True)}
    elif format == "peft":
        file, expected = target / PEFT_FILE, payload
        tensors = {_PEFT_PREFIX + key: tensor for key, tensor in payload.tensors.items()}
        metadata = seal(note)
    elif format == "comfy":
        file = target if target.suffix == ".safetensors" else target.with_name(target.name + ".safetensors")
        expected, tensors = folded(payload, architecture), to_comfy(payload, architecture)
        metadata = seal({**note, "hash": expected.hash})
    else:
        raise ExportError(f"format is {format!r}; choose one of {', '.join(FORMATS)}.")
    file.parent.mkdir(parents=True, exist_ok=True)
    if format == "peft":
        (target / PEFT_CONFIG).write_text(json.dumps(_peft_config(payload), indent=2, sort_keys=True) + "\n")
    write_atomically(file, encode_plan(tensors, metadata), tensors)
    if verify:
        _compare(expected, load_any(file if format == "comfy" else target, architecture=architecture)[0], file)
    return file


def _export_experts(
    experts: Mapping[str, LoRAPayload], format: str, target: Path, architecture: str, verify: bool
) -> Path:
    """One LoRA per expert: ``transformer_2`` into a subfolder (diffusers) or a second file (ComfyUI)."""
    files = []
    for expert, part in experts.items():
        second = expert == EXPERTS[1]
        if format == "diffusers":
            place = target / EXPERTS[1] if second else target
        else:
            place = target.with_name(f"{target.name.removesuffix('.safetensors')}.{'low' if second else 'high'}_noise")
        files.append(export(part, format, place, architecture=architecture, verify=verify))
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


def load_any(path: str | os.PathLike[str], *, architecture: str | None = None) -> tuple[LoRAPayload, str]:
    """Read an adapter in any format; returns it with the format's name: one of `FORMATS` or ``"payload"``.

    Files of other tools carry no version or fingerprint: version 0, None. Raises ``PayloadError`` for a file without
    LoRA tensors and ``NameMapError`` for keys that no rule knows: nothing is left out in silence.
    """
    source = Path(path)
    if (source / EXPERTS[1] / DIFFUSERS_FILE).is_file():
        folders = {EXPERTS[0]: source, EXPERTS[1]: source / EXPERTS[1]}
        present = {
            name: folder / DIFFUSERS_FILE for name, folder in folders.items() if (folder / DIFFUSERS_FILE).is_file()
        }
        return join_experts({name: load_any(file)[0] for name, file in present.items()}), "diffusers"
    file, config = _find(source)
    tensors, metadata = decode(bytearray(file.read_bytes()), str(file))
    note = unseal(metadata, str(file)) if META_KEY in metadata else {}
    if note.get("kind") == "lora":
        return LoRAPayload.from_parts(tensors, note, origin=str(file)), "payload"
    extra = {"version": note.get("version", 0), "base_fingerprint": note.get("base_fingerprint")}
    if is_comfy(tensors):
        payload, format = from_comfy(tensors, architecture or note.get("architecture"), **extra), "comfy"
    else:
        format = "peft" if config is not None or any(key.startswith(_PEFT_PREFIX) for key in tensors) else "diffusers"
        settings = config if format == "peft" else _diffusers_settings(metadata)
        payload = _from_neutral(_strip(tensors, format), settings, **extra)
    if note.get("hash", payload.hash) != payload.hash:
        raise CorruptPayloadError(
            f"{file}: content hash is {payload.hash}, the file promises {note['hash']}; export or copy it again."
        )
    return payload, format


def _find(source: Path) -> tuple[Path, dict[str, Any] | None]:
    if source.is_file():
        config = source.with_name(PEFT_CONFIG)
        is_peft = source.name == PEFT_FILE and config.is_file()
        return source, json.loads(config.read_text()) if is_peft else None
    config = source / PEFT_CONFIG
    if config.is_file():
        return source / PEFT_FILE, json.loads(config.read_text())
    files = [source / DIFFUSERS_FILE] if (source / DIFFUSERS_FILE).is_file() else sorted(source.glob("*.safetensors"))
    if len(files) != 1:
        raise PayloadError(f"{source} holds {len(files)} safetensors files; name the one to read.")
    return files[0], None


def _strip(tensors: Mapping[str, Tensor], format: str) -> dict[str, Tensor]:
    prefix = _PEFT_PREFIX if format == "peft" else _DIFFUSERS_PREFIX
    bare = {}
    for key, tensor in tensors.items():
        if not key.endswith((".lora_A.weight", ".lora_B.weight")):
            raise NameMapError(
                f"{key!r} is no LoRA tensor of a transformer; text-encoder LoRAs and DoRA are not supported."
            )
        bare[key.removeprefix(prefix)] = tensor
    return bare


def _diffusers_settings(metadata: Mapping[str, str]) -> dict[str, Any] | None:
    text = metadata.get(_DIFFUSERS_META)
    if text is None:
        return None
    return {key.removeprefix("transformer."): value for key, value in json.loads(text).items()}


def _from_neutral(tensors: dict[str, Tensor], settings: dict[str, Any] | None, **extra: Any) -> LoRAPayload:
    """Without settings alpha equals the rank, module by module: the convention of diffusers and PEFT files."""
    modules = modules_of(tensors)
    targets = None
    alphas = {name: float(tensors[name + ".lora_A.weight"].shape[0]) for name in modules}
    if settings is not None:
        patterns = {key.removeprefix("^"): value for key, value in (settings.get("alpha_pattern") or {}).items()}
        rslora = settings.get("use_rslora", False)
        for name in modules:
            alpha = next(
                (v for k, v in patterns.items() if name == k or name.endswith("." + k)), settings["lora_alpha"]
            )
            alphas[name] = float(alpha) * (alphas[name] ** 0.5 if rslora else 1.0)
        found = settings.get("target_modules")
        targets = tuple(sorted(found)) if isinstance(found, list) else None
    return LoRAPayload.build(tensors, alphas=alphas, target_modules=targets, **extra)


def _peft_config(payload: LoRAPayload) -> dict[str, Any]:
    fixed: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": None,
        "inference_mode": True,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "use_rslora": False,
        "use_dora": False,
    }
    return fixed | lora_config(payload)


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
