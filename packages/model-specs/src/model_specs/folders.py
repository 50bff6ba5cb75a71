"""Reading the parts of a diffusers pipeline folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import SpecError

if TYPE_CHECKING:
    import torch


def component(path: str | Path, part: str, config: str) -> Path:
    """The subfolder `part` of a pipeline folder; SpecError when the folder, its index or the part is missing."""
    folder = Path(path)
    if not folder.is_dir():
        raise SpecError(f"There is no folder {str(path)!r}: give the path of a diffusers pipeline folder.")
    if not (folder / "model_index.json").is_file():
        raise SpecError(
            f"{str(path)!r} has no model_index.json, so it is no diffusers pipeline folder: save one with "
            "`pipeline.save_pretrained(folder)` and give that folder, not one of its parts."
        )
    if not (folder / part / config).is_file():
        parts = sorted(child.name for child in folder.iterdir() if child.is_dir())
        raise SpecError(f"{str(path)!r} has no {part}/{config}; its parts are {parts}.")
    return folder / part


def read_json(file: Path) -> Mapping[str, Any]:
    """A JSON object, or SpecError naming the file."""
    try:
        content = json.loads(file.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise SpecError(f"Cannot read {str(file)!r}: {error}") from error
    if not isinstance(content, dict):
        raise SpecError(f"{str(file)!r} must hold a JSON object, not {type(content).__name__}.")
    return content


def has_part(path: str | Path, part: str) -> bool:
    """Whether model_index.json gives the part a class (optional parts are saved as [null, null])."""
    entry = read_json(Path(path) / "model_index.json").get(part)
    return isinstance(entry, list) and len(entry) == 2 and entry[1] is not None


def load_part(path: str | Path, part: str, dtype: torch.dtype | None, device: torch.device | str) -> Any:
    """A text encoder (eval mode, frozen, fp32 unless a dtype is given) or a tokenizer, of the class that model_index.json names."""
    import torch
    import transformers

    is_tokenizer = part.startswith("tokenizer")
    folder = component(path, part, "tokenizer_config.json" if is_tokenizer else "config.json")
    entry = read_json(Path(path) / "model_index.json").get(part)
    name = entry[1] if isinstance(entry, list) and len(entry) == 2 else None
    kind = getattr(transformers, str(name), None)
    if kind is None:
        raise SpecError(
            f"model_index.json of {str(path)!r} gives {part!r} the class {entry!r}, which transformers "
            f"{transformers.__version__} does not have: install the version that the folder was saved with."
        )
    if is_tokenizer:
        return kind.from_pretrained(folder, trust_remote_code=False)
    model = kind.from_pretrained(folder, dtype=dtype or torch.float32, use_safetensors=True, trust_remote_code=False)
    return model.to(device).eval().requires_grad_(False)


def load_diffusers(class_name: str, folder: Path, dtype: torch.dtype | None, device: torch.device | str) -> Any:
    """A diffusers model in eval mode; SpecError when weights are missing or have other shapes than config.json says."""
    import diffusers
    import torch

    kind = getattr(diffusers, class_name)
    try:
        model, info = kind.from_pretrained(
            folder, dtype=dtype or torch.float32, use_safetensors=True, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise SpecError(f"Cannot load {class_name} from {str(folder)!r}: {error}") from error
    if missing := sorted(info["missing_keys"]):  # diffusers goes on with whatever memory holds
        raise SpecError(
            f"{str(folder)!r} has no weights for {missing[0]!r} ({len(missing)} missing in all): config.json and weights "
            "differ, or a file was not copied."
        )
    return model.to(device).eval()


def empty_diffusers(class_name: str, source: Path | dict[str, Any], dtype: torch.dtype | None) -> Any:
    """The same without weights, from a folder or the content of its config.json: parameters on the meta device, buffers real."""
    import accelerate
    import diffusers
    import torch

    kind = getattr(diffusers, class_name)
    with accelerate.init_empty_weights(include_buffers=False):
        model = kind.from_config(source if isinstance(source, dict) else kind.load_config(source))
    kept = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not kept.intersection(name.split(".")):
            parameter.data = parameter.data.to(dtype or torch.float32)
    return model.eval()
