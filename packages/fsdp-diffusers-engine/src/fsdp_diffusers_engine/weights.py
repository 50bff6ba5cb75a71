"""Weights into the engine (warm start) and out of it (rollout, export)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_sync import LoRASyncError, base_weights, export, extract_lora, load_any, stream_lora
from lora_sync.layers import adapter_names, adapter_parameters, base_name, copy_into, full
from torch import Tensor, nn

from . import adapters
from .errors import EngineError

if TYPE_CHECKING:
    from .engine import DiffusersFSDPEngine


def per_tensor(
    engine: DiffusersFSDPEngine, layered_summon: bool, base_sync_done: bool, adapter_name: str | None
) -> tuple[Iterator[tuple[str, Tensor]], dict[str, Any] | None]:
    """Whole tensors by name, and the adapter's PEFT config when the tensors are an adapter's.

    * full fine-tuning: every weight under its stock diffusers name, of the policy state ``adapter_name``;
    * LoRA, ``base_sync_done``: the adapter ``adapter_name`` under PEFT-neutral names, with its config;
    * LoRA, not ``base_sync_done``: the frozen base, which a rollout needs once before adapters make sense;
    * LoRA with ``lora.merge``: every weight with the adapter folded in, without a config.

    ``layered_summon`` gathers one tensor at a time, so every rank has to take all of them; otherwise everything is
    gathered before the first tensor is handed out.
    """
    name = adapter_name or adapters.TRAINED
    config: dict[str, Any] | None = None
    if not engine.lora:
        tensors = _full(engine, name)
    elif engine.model_config.lora.merge and name != adapters.REFERENCE:
        tensors = base_weights(engine.module, name)
    elif base_sync_done and name != adapters.REFERENCE:
        tensors = stream_lora(engine.module, name)
        config = peft_config(engine.module, name)
    else:
        tensors = base_weights(engine.module)
    if layered_summon:
        return tensors, config
    return iter(list(tensors)), config


def peft_config(module: nn.Module, name: str) -> dict[str, Any]:
    """The adapter's PEFT config as plain JSON types."""
    raw = module.peft_config[name].to_dict()  # type: ignore[index,union-attr]
    keep = ("peft_type", "r", "lora_alpha", "target_modules", "exclude_modules", "bias", "use_rslora", "use_dora")
    return {key: sorted(raw[key]) if isinstance(raw.get(key), set) else raw.get(key) for key in keep}


def _full(engine: DiffusersFSDPEngine, state: str) -> Iterator[tuple[str, Tensor]]:
    assert engine.states is not None
    if state == adapters.TRAINED:
        return base_weights(engine.module)
    return ((base_name(name), full(copy)) for name, copy in engine.states._state(state).items())


def export_lora(engine: DiffusersFSDPEngine, folder: Path, adapter: str = adapters.TRAINED) -> None:
    """Write the adapter as stock diffusers loads it (``pipeline.load_lora_weights(folder)``). A collective."""
    payload = extract_lora(engine.module, adapter, version=engine.optimizer_steps)
    if engine.layout.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        export(payload, "diffusers", folder, architecture=engine.spec.name)


def export_transformer(engine: DiffusersFSDPEngine, folder: Path, state: str = adapters.TRAINED) -> None:
    """Write the whole transformer, adapters folded in, as ``from_pretrained`` loads it. A collective."""
    source = base_weights(engine.module, state) if engine.lora else _full(engine, state)
    tensors = {}
    for name, value in source:
        if engine.layout.rank == 0:
            tensors[name] = value.to("cpu", copy=True).contiguous()
    if engine.layout.rank == 0:
        for part in _parts(engine):
            mine = {name.removeprefix(part): value for name, value in tensors.items() if name.startswith(part)}
            target = folder / part.removesuffix(".") if part else folder
            target.mkdir(parents=True, exist_ok=True)
            _save_pretrained(engine, engine.module.get_submodule(part.removesuffix(".")), mine, target)


def _parts(engine: DiffusersFSDPEngine) -> list[str]:
    """Name prefixes of the transformers inside the module: one empty one, or Wan's two."""
    if engine.model_config.transformer_config is not None or engine.model_config.transformer_subfolder is not None:
        return [""]
    return list(engine.spec.transformer_folders(engine.model_config.path))


def _save_pretrained(engine: DiffusersFSDPEngine, part: Any, tensors: dict[str, Tensor], folder: Path) -> None:
    import diffusers
    from accelerate import init_empty_weights

    with init_empty_weights():
        empty = getattr(diffusers, engine.spec.transformer_class).from_config(part.config)
    empty.load_state_dict(tensors, assign=True, strict=False)
    left = [name for name, parameter in empty.named_parameters() if parameter.is_meta]
    if left:
        raise EngineError(f"the export of {type(part).__name__} lacks {left[0]!r} ({len(left)} tensors); report this")
    empty.save_pretrained(folder, safe_serialization=True)


def warm_start(engine: DiffusersFSDPEngine, path: str) -> None:
    """Put a saved LoRA (PEFT, diffusers, ComfyUI or a payload of lora-sync) into every policy adapter.

    Ranks must agree; a different alpha is folded into B, so that the product is the one that was saved.
    """
    if not Path(path).exists():
        raise EngineError(
            f"lora_adapter_path={path!r} does not exist; give a file or folder with a saved LoRA, or null"
        )
    try:
        payload, _ = load_any(path, architecture=engine.spec.name)
    except (LoRASyncError, OSError) as error:
        raise EngineError(f"lora_adapter_path={path!r} cannot be read: {error}") from error
    own_scale = engine.model_config.lora_alpha / engine.model_config.lora_rank
    for adapter in adapter_names(engine.module):
        ours = adapter_parameters(engine.module, adapter)
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
