"""Weights into the engine (warm start) and out of it (rollout, export)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lora_sync import LoRASyncError, base_weights, export, extract_lora, load_any, stream_lora
from lora_sync.layers import adapter_names, adapter_parameters, base_name, copy_into, full
from torch import Tensor, nn

from . import adapters
from .config import DiffusionModelConfig
from .errors import EngineError
from .states import WeightStates


def per_tensor(
    module: nn.Module, states: WeightStates | None, policy: str | None, merge: bool, base_sync_done: bool
) -> tuple[Iterator[tuple[str, Tensor]], dict[str, Any] | None]:
    """Whole tensors by name, and the adapter's PEFT config when the tensors are an adapter's.

    * full fine-tuning (`states`): every weight under its stock diffusers name, of the policy state `policy`;
    * LoRA, `base_sync_done`: the adapter `policy` under PEFT-neutral names, with its config;
    * LoRA, not `base_sync_done`: the frozen base, which a rollout needs once before adapters make sense;
    * LoRA with `merge`: every weight with the adapter folded in, without a config.

    Tensors are gathered one at a time, so every rank has to take all of them.
    """
    name = policy or adapters.TRAINED
    if states is not None:
        if name == adapters.TRAINED:
            return base_weights(module), None
        return ((base_name(key), full(copy)) for key, copy in states.copy_of(name).items()), None
    if merge and name != adapters.REFERENCE:
        return base_weights(module, name), None
    if base_sync_done and name != adapters.REFERENCE:
        return stream_lora(module, name), peft_config(module, name)
    return base_weights(module), None


def peft_config(module: nn.Module, name: str) -> dict[str, Any]:
    """The adapter's PEFT config as plain JSON types."""
    raw = module.peft_config[name].to_dict()  # type: ignore[index,union-attr]
    keep = ("peft_type", "r", "lora_alpha", "target_modules", "exclude_modules", "bias", "use_rslora", "use_dora")
    return {key: sorted(raw[key]) if isinstance(raw.get(key), set) else raw.get(key) for key in keep}


def export_lora(module: nn.Module, folder: Path, architecture: str, version: int, *, write: bool) -> None:
    """Write the trained adapter as stock diffusers loads it (`pipeline.load_lora_weights(folder)`).

    A collective: all ranks gather, the one with `write` writes.
    """
    payload = extract_lora(module, adapters.TRAINED, version=version)
    if write:
        folder.mkdir(parents=True, exist_ok=True)
        export(payload, "diffusers", folder, architecture=architecture)


def export_transformer(
    module: nn.Module, lora: bool, transformer_class: str, parts: Iterable[str], folder: Path, *, write: bool
) -> None:
    """Write the whole transformer, the trained adapter folded in, as `from_pretrained` loads it. A collective, as above.

    `transformer_class` is diffusers' name; `parts` are the name prefixes of the transformers inside the module: one
    empty one, or Wan's two.
    """
    tensors = {}
    for name, value in base_weights(module, adapters.TRAINED) if lora else base_weights(module):
        if write:
            tensors[name] = value.to("cpu", copy=True).contiguous()
    for part in parts if write else ():
        mine = {name.removeprefix(part): value for name, value in tensors.items() if name.startswith(part)}
        target = folder / part.removesuffix(".") if part else folder
        target.mkdir(parents=True, exist_ok=True)
        _save_pretrained(transformer_class, module.get_submodule(part.removesuffix(".")), mine, target)


def _save_pretrained(transformer_class: str, part: Any, tensors: dict[str, Tensor], folder: Path) -> None:
    import diffusers
    from accelerate import init_empty_weights

    with init_empty_weights():
        empty = getattr(diffusers, transformer_class).from_config(part.config)
    empty.load_state_dict(tensors, assign=True, strict=False)
    left = [name for name, parameter in empty.named_parameters() if parameter.is_meta]
    if left:
        raise EngineError(f"the export of {type(part).__name__} lacks {left[0]!r} ({len(left)} tensors); report this")
    empty.save_pretrained(folder, safe_serialization=True)


def warm_start(module: nn.Module, config: DiffusionModelConfig, architecture: str) -> None:
    """Put a saved LoRA (PEFT, diffusers, ComfyUI or a payload of lora-sync) into every policy adapter.

    Ranks must agree; a different alpha is folded into B, so that the product is the one that was saved.
    """
    path = str(config.lora_adapter_path)
    if not Path(path).exists():
        raise EngineError(
            f"lora_adapter_path={path!r} does not exist; give a file or folder with a saved LoRA, or null"
        )
    try:
        payload, _ = load_any(path, architecture=architecture)
    except (LoRASyncError, OSError) as error:
        raise EngineError(f"lora_adapter_path={path!r} cannot be read: {error}") from error
    own_scale = config.lora_alpha / config.lora_rank
    for adapter in adapter_names(module):
        ours = adapter_parameters(module, adapter)
        lonely = sorted(set(ours) ^ set(payload.tensors))
        if lonely:
            where = "only in the file" if lonely[0] in payload.tensors else "only in the model"
            raise EngineError(
                f"lora_adapter_path={path!r}: {len(lonely)} tensors do not pair up, e.g. {lonely[0]!r} ({where}); "
                f"set target_modules to what the file adapts: {list(payload.target_modules)[:12]}"
            )
        for name, parameter in ours.items():
            value = payload.tensors[name]
            if tuple(value.shape) != tuple(parameter.shape):
                raise EngineError(
                    f"lora_adapter_path={path!r}: {name!r} is {list(value.shape)} in the file and "
                    f"{list(parameter.shape)} here; set lora_rank={payload.rank}"
                )
            if name.endswith(".lora_B.weight"):
                value = value.float() * (payload.scale_of(name.removesuffix(".lora_B.weight")) / own_scale)
            copy_into(parameter, value.to(parameter.dtype))
