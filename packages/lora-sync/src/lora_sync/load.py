"""Read an adapter file, whichever tool wrote it: nothing is left out, and no scale is guessed, in silence."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from .codec import META_KEY, read_file, unseal
from .errors import CorruptPayloadError, NameMapError, PayloadError
from .experts import EXPERTS, join_experts
from .fuse import Piece, split
from .keys import Layer, foreign_architecture, layers_of_file, text_encoder_keys
from .maps import MAPS, get_map
from .names import NameMap, Place
from .payload import A, B, LoRAPayload
from .settings import Settings, config_settings, header_settings, number

DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"
PEFT_FILE, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIXES = {"peft": "base_model.model.", "diffusers": "transformer."}
ANY = "any"


def load_any(
    path: str | os.PathLike[str],
    *,
    architecture: str | None = None,
    alpha: float | None = None,
    strict: bool = False,
    skip_text_encoder: bool = False,
) -> tuple[LoRAPayload, str]:
    """Read an adapter in any format; returns it with the format's name: one of `FORMATS` or `"payload"`.

    Args:
        path: file or folder.
        architecture: the model that it must be for; None takes the map that knows every layer; `"any"` keeps the names of
            a model without a map.
        alpha: alpha of every layer, instead of what the file says.
        strict: refuse a file that does not say its alpha. Default: a warning, and alpha = rank (scale 1), which is what
            diffusers and ComfyUI take.
        skip_text_encoder: leave out a text encoder's LoRA. Default: an error that names it.

    Files of other tools carry no version or fingerprint: version 0, None. Raises `PayloadError` for what is no plain LoRA
    or holds a value that is not finite, and `NameMapError` for keys and layers that no rule knows.
    """
    source = Path(path)
    options: dict[str, Any] = {"alpha": alpha, "strict": strict, "skip_text_encoder": skip_text_encoder}
    if (source / EXPERTS[1] / DIFFUSERS_FILE).is_file():
        folders = {EXPERTS[0]: source, EXPERTS[1]: source / EXPERTS[1]}
        present = {name: at / DIFFUSERS_FILE for name, at in folders.items() if (at / DIFFUSERS_FILE).is_file()}
        parts = {name: load_any(file, architecture=architecture, **options)[0] for name, file in present.items()}
        return join_experts(parts), "diffusers"
    file, config = _find(source)
    tensors, metadata = read_file(file)
    note = unseal(metadata, file) if META_KEY in metadata else {}
    if note.get("kind") == "lora":
        payload, format = cast(LoRAPayload, LoRAPayload.restore(tensors, note, str(file))), "payload"
        if alpha is not None:
            payload = LoRAPayload.build(tensors, alphas=number(alpha, "alpha"), version=payload.version)
    else:
        payload, format = _foreign(file, config, tensors, metadata, note, architecture, **options)
    _check_values(payload, file)
    if alpha is None and note.get("hash", payload.hash) != payload.hash:
        raise CorruptPayloadError(
            f"{file}: content hash is {payload.hash}, the file promises {note['hash']}; export or copy it again."
        )
    return payload, format


def _find(source: Path) -> tuple[Path, Path | None]:
    """The weight file, and the adapter_config.json that belongs to it."""
    if source.name == PEFT_CONFIG:
        source = source.parent
    folder = source if source.is_dir() else source.parent
    config = folder / PEFT_CONFIG if (folder / PEFT_CONFIG).is_file() else None
    files = sorted(folder.glob("*.safetensors"))
    if source.is_file():
        return source, config if source.name == PEFT_FILE or files == [source] else None
    if not source.is_dir():
        raise PayloadError(f"{source} does not exist; give the file or folder of a LoRA on this machine.")
    for name, wanted in ((PEFT_FILE, config is not None), (DIFFUSERS_FILE, True)):
        if wanted and source / name in files:
            return source / name, config if name == PEFT_FILE or len(files) == 1 else None
    if not files:
        pickles = sorted(file.name for file in source.iterdir() if file.suffix in (".bin", ".pt", ".pth", ".ckpt"))
        hint = (
            f"{pickles[0]} is a pickle, save its tensors with safetensors"
            if pickles
            else "give the folder that holds one"
        )
        raise PayloadError(f"{source} holds 0 safetensors files; {hint}.")
    if len(files) > 1:
        raise PayloadError(
            f"{source} holds {len(files)} safetensors files {[file.name for file in files[:4]]!r}; name the one to read."
        )
    return files[0], config


def _foreign(
    file: Path,
    config: Path | None,
    tensors: dict[str, Tensor],
    metadata: Mapping[str, str],
    note: Mapping[str, Any],
    architecture: str | None,
    *,
    alpha: float | None,
    strict: bool,
    skip_text_encoder: bool,
) -> tuple[LoRAPayload, str]:
    own = note.get("kind") == "export"
    text = set(text_encoder_keys(tensors))
    layers = layers_of_file({key: tensor for key, tensor in tensors.items() if key not in text}, str(file))
    format = str(note["format"]) if own else _format_of(tensors, config)
    names: NameMap | None = None
    if own and format in PREFIXES:
        for layer in layers:  # exactly as written
            layer.expert, layer.name, layer.flat = "", layer.raw.removeprefix(PREFIXES[format]), False
    else:
        names = _map_for(layers, architecture or note.get("architecture"), str(file))
    if text and not skip_text_encoder:
        raise PayloadError(
            f"{file} holds a text encoder's LoRA too ({len(text)} of {len(tensors)} tensors, e.g. {sorted(text)[0]!r}), which is "
            "not trained here; leave it out with skip_text_encoder=True (python -m lora_sync convert … --skip-text-encoder)."
        )
    if not layers:
        raise PayloadError(
            f"{file} holds {'a text encoder alone' if text else 'no tensors'}; give the LoRA of a transformer."
        )
    settings: dict[str, Settings] = {}
    if alpha is None and config is not None:
        settings = config_settings(config)
    elif alpha is None and any(layer.alpha is None for layer in layers):
        settings = header_settings(metadata, str(file))
    neutral: dict[str, Tensor] = {}
    alphas: dict[str, float] = {}
    guessed: list[str] = []
    for layer in layers:
        piece = _piece(layer, settings, alpha, guessed, str(file))
        places = names.find(layer.name, flat=layer.flat) if names else [Place(layer.name)]
        parts = split(layer.raw, piece, places[0].part.widths) if places[0].part else {0: piece}
        for index, place in enumerate(places):
            if index not in parts:
                continue
            part, module = parts[index], f"{layer.expert}.{place.module}" if layer.expert else place.module
            if module in alphas:
                raise NameMapError(
                    f"{file}: {layer.raw!r} gives {module!r} a second time; the file names that layer twice."
                )
            up = part.up.roll(part.up.shape[0] // 2, 0) if place.swap_halves else part.up
            neutral[module + A], neutral[module + B], alphas[module] = part.down, up, part.alpha
    if guessed and not own:
        _say_guess(file, guessed, len(layers), strict)
    found = next(iter(settings.values())).target_modules if len(settings) == 1 else None
    fits = found and all(any(name == t or name.endswith("." + t) for t in found) for name in alphas)
    try:
        payload = LoRAPayload.build(
            neutral,
            alphas=alphas,
            version=note.get("version", 0),
            target_modules=found if fits else None,
            base_fingerprint=note.get("base_fingerprint"),
        )
    except PayloadError as error:
        raise PayloadError(f"{file}: {error}") from error
    return payload, format


def _format_of(tensors: Mapping[str, Tensor], config: Path | None) -> str:
    if all(".lora_A." in key or ".lora_B." in key for key in tensors):
        if config is not None or any(key.startswith(PREFIXES["peft"]) for key in tensors):
            return "peft"
        if not any(key.startswith("diffusion_model.") for key in tensors):
            return "diffusers"
    return "comfy"


def _map_for(layers: list[Layer], architecture: str | None, file: str) -> NameMap | None:
    """The map whose rules know every layer. Raises `NameMapError`, with the architecture that the layers give away."""
    if architecture == ANY:
        if flat := [layer.raw for layer in layers if layer.flat]:
            raise NameMapError(f"{file}: {flat[0]!r} has underscores for dots, which only a name map can read.")
        return None
    wanted = get_map(architecture) if architecture else None
    maps = MAPS if wanted is None or wanted in MAPS else (*MAPS, wanted)
    unknown = _unknown(layers, maps)
    if all(unknown.values()):
        for names in _shorter([layer.name for layer in layers]):
            shorter = [replace(layer, name=name) for layer, name in zip(layers, names, strict=True)]
            if not all(_unknown(shorter, maps).values()):
                layers[:], unknown = shorter, _unknown(shorter, maps)
                break
    fitting = [entry for entry in maps if not unknown[entry.name]]
    if wanted is None and fitting:
        return fitting[0]
    if wanted in fitting:
        return wanted
    theirs = fitting[0].name if fitting else foreign_architecture(layer.name for layer in layers)
    best = wanted.name if wanted else min(unknown, key=lambda name: len(unknown[name]))
    odd = f"{len(unknown[best])} of {len(layers)} layers are not in {best}, e.g. {unknown[best][0]!r}"
    remedy = (
        f"no architecture's rules know all layers; known: {', '.join(unknown)} (architecture='any' keeps the names)"
    )
    if theirs:
        remedy = f"this is a LoRA for {theirs}; give one for {wanted.name if wanted else ', '.join(unknown)}"
    raise NameMapError(f"{file}: {odd}: {remedy}.")


def _unknown(layers: list[Layer], maps: Sequence[NameMap]) -> dict[str, list[str]]:
    """Of each map, the layers that its rules do not know."""
    return {
        entry.name: [layer.raw for layer in layers if not entry.find(layer.name, flat=layer.flat)] for entry in maps
    }


def _shorter(names: list[str]) -> Iterator[list[str]]:
    """The names without the first words that all share: what a program called its model, such as `policy.` or `model.`."""
    while len({name.partition(".")[0] for name in names}) == 1 and names[0].partition(".")[0].isidentifier():
        names = [name.partition(".")[2] for name in names]
        if not all(names):
            return
        yield names


def _piece(layer: Layer, settings: Mapping[str, Settings], alpha: float | None, guessed: list[str], file: str) -> Piece:
    assert layer.down is not None
    assert layer.up is not None
    rank = int(layer.down.shape[0]) if layer.down.ndim else 0
    said = settings.get(layer.expert or EXPERTS[0]) or settings.get("")
    if alpha is not None:
        value = number(alpha, "alpha")
    elif layer.alpha is not None:
        if layer.alpha.numel() != 1:
            raise PayloadError(f"{file}: {layer.raw}.alpha has {layer.alpha.numel()} values; it must be one number.")
        value = number(layer.alpha.item(), f"{file}: {layer.raw}.alpha")
    elif said is not None:
        value = said.alpha_of((layer.raw.removeprefix(PREFIXES["peft"]), layer.name), rank)
    else:
        guessed.append(layer.raw)
        value = float(rank)
    return Piece(layer.down, layer.up, value)


def _say_guess(file: Path, guessed: list[str], count: int, strict: bool) -> None:
    text = (
        f"{file} does not say alpha for {len(guessed)} of {count} layers, e.g. {guessed[0]!r}; alpha = rank (scale 1) is a "
        "guess. Say it with load_any(alpha=…), python -m lora_sync convert … --alpha, or lora_alpha in adapter_config.json"
    )
    if strict:
        raise PayloadError(f"{text}; strict reading refuses to guess.")
    warnings.warn(f"{text}.", stacklevel=4)


def _check_values(payload: LoRAPayload, file: Path) -> None:
    for name, tensor in payload.tensors.items():
        if not tensor.is_floating_point():
            raise PayloadError(
                f"{file}: {name!r} is {tensor.dtype}, quantised or no weight; a LoRA's are floating point."
            )
    payload.check_finite(str(file))
    zero = [name for name in payload.modules if payload.alpha_of(name) == 0]
    if zero:
        warnings.warn(
            f"{file}: alpha is 0 for {len(zero)} layers, e.g. {zero[0]!r}: the LoRA does nothing there.", stacklevel=3
        )
