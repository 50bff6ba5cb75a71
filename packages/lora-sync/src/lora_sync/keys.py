"""The keys of a LoRA file, whichever tool wrote it: which layer, which side, and what is no plain LoRA.

Prefixes of tools and wrappers come off in any order and number; those of Wan2.2's two experts stay.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from .errors import NameMapError, PayloadError
from .experts import EXPERTS
from .layers import WRAPPER_SEGMENTS

_PREFIXES = ("base_model.model.", "model.diffusion_model.", "diffusion_model.", "module.", "pipe.", "dit.")
_SECOND = {  # the two experts of Wan2.2 under other tools' names
    "high_noise_model.": EXPERTS[0],
    "high_noise.": EXPERTS[0],
    "low_noise_model.": EXPERTS[1],
    "low_noise.": EXPERTS[1],
    "dit2.": EXPERTS[1],
    "diffusion_model_2.": EXPERTS[1],
}
_FLAT_PREFIXES = ("lora_unet_", "lora_transformer_", "lycoris_")
_TENSOR = re.compile(
    r"(?P<layer>.+?)\.(?:lora(?:_linear_layer)?[._](?P<side>[ABab]|down|up)(?:\.weight|\.(?P<adapter>[^.]+)\.weight)?|(?P<alpha>(?:lora_|network_)?alpha))"
    r"|(?P<xlabs>.+\.processor\.\w+_lora\d?)\.(?P<way>down|up)\.weight"
)
_TEXT_ENCODER = re.compile(
    r"(text_encoders?(_\d)?\.|text_model\.|cond_stage_model\.|conditioner\.|clip_[lgh]\.|t5(xxl)?\.|te\d?\.|bundle_emb\."
    r"|(qwen\w*|mllm|llm|llama\w*|gemma\w*|u?mt5\w*)\.|lora_(te\d?|prior_te|llm|llama)_|lycoris_(text_model|te\d?)_)"
)
_EXTRACT = (
    "make a plain LoRA of it first (peft.save_as_lora for PEFT's own adapters; else merge it into the base model and extract "
    "one with LyCORIS's tools/extract_locon.py or kohya's networks/*extract_lora*.py)"
)
_KINDS = (
    (r"[._]lokr_", "LoKr", _EXTRACT),
    (r"[._]hada_", "LoHa", _EXTRACT),
    (r"[._](dora_scale|lora_magnitude_vector)", "DoRA", _EXTRACT),
    (r"[._](oft|boft)_", "OFT", _EXTRACT),
    (r"\.lora_mid\b", "LoCon with a Tucker core (lora_mid)", _EXTRACT),
    (r"\.(a1|a2|b1|b2|bm1|bm2)\.weight|[._]glora_", "GLoRA", _EXTRACT),
    (r"\.(lora_E|ranknum)\b", "AdaLoRA", _EXTRACT),
    (
        r"\.lora_\w+(\.\w+)?\.(weight_scale|scale_weight|qweight|qzeros|absmax|quant_\w+)",
        "a quantised LoRA",
        "save it in 16 or 32 bits",
    ),
    (
        r"[._](hra_u|randlora_|fourierft_|delora_|road_|shira_|vblora_|c3a_|bone_|miss_|waveft_|psoft_|osf_)",
        "another kind of adapter",
        _EXTRACT,
    ),
    (r"[._]vera_", "VeRA", _EXTRACT),
    (r"[._]ia3_|\.on_input", "IA3", _EXTRACT),
    (r"\.lora_embedding_", "an embedding LoRA", "train without embeddings in target_modules"),
    (
        r"(^|\.)(modules_to_save|diff(_b)?|[wb]_norm|set_weight|reshape_weight)(\.|$)",
        "full weights or differences",
        _EXTRACT,
    ),
    (r"\.bias$|\.lora_bias\b", "a bias", "train with bias='none' and lora_bias=False"),
)
_FOREIGN = (
    (
        r"(unet[._])?(input|output|down|up)_blocks?[._]|(unet[._])?(middle|mid)_block[._]",
        "the UNet of Stable Diffusion 1, 2 or XL",
    ),
    (r"double_blocks[._]\d+[._]((img|txt)_attn_qkv|(img|txt)_mlp[._]fc\d)|.*individual_token_refiner", "HunyuanVideo"),
    (r"double_stream_modulation|.*to_qkv_mlp_proj", "FLUX.2"),
    (r"distilled_guidance_layer", "Chroma"),
    (r"(double|single)_stream_blocks", "HiDream"),
    (r"joint_transformer_blocks", "AuraFlow"),
    (r"transformer_blocks[._]\d+[._]attn1", "LTX-Video, CogVideoX, Mochi, PixArt or Sana"),
    (r"layers[._]\d+[._](attn|feed_forward[._]linear)", "Lumina"),
    (r"(model[._])?layers[._]\d+[._](self_attn|mlp)[._]", "a language model"),
    (r"(vision_model|visual)[._]", "a vision encoder"),
)


@dataclass
class Layer:
    """One layer of a file: `raw` as its keys say it, `name` without prefixes, underscores for dots where `flat`."""

    raw: str
    expert: str
    name: str
    flat: bool
    down: Tensor | None = None
    up: Tensor | None = None
    alpha: Tensor | None = None


def layers_of_file(tensors: Mapping[str, Tensor], origin: str) -> list[Layer]:
    """Every layer with its A, B and, where the file holds one, alpha tensor.

    Raises `NameMapError` for keys that are no plain LoRA's, naming their kind, and `PayloadError` for half a pair.
    """
    layers: dict[str, Layer] = {}
    adapters: set[str] = set()
    for key, tensor in tensors.items():
        match = _TENSOR.fullmatch(key)
        if match is None:
            raise NameMapError(f"{origin}: {_refusal(key)}")
        raw = match["layer"] or match["xlabs"]
        if raw not in layers:
            layers[raw] = Layer(raw, *_bare(raw))
        side = (
            "alpha"
            if match["alpha"]
            else {"a": "down", "b": "up"}.get((match["side"] or "").lower(), match["side"]) or match["way"]
        )
        if match["side"]:
            adapters.add(match["adapter"] or "")
        if getattr(layers[raw], side) is not None and len(adapters) == 1:
            raise NameMapError(
                f"{origin}: {key!r} gives {side} of {raw!r} a second time; the file names that layer twice."
            )
        setattr(layers[raw], side, tensor)
    if len(adapters) > 1:
        raise NameMapError(
            f"{origin}: holds {len(adapters)} adapters, {sorted(adapters)!r}; save the one to load alone."
        )
    for layer in layers.values():
        if layer.down is None or layer.up is None:
            present = [key for key in tensors if key.startswith(layer.raw + ".")]
            raise PayloadError(
                f"{origin}: {layer.raw!r} has only {present!r}; a LoRA layer needs A and B (down and up)."
            )
    found = list(layers.values())
    if any(layer.expert == EXPERTS[1] for layer in found):
        for layer in found:
            layer.expert = layer.expert or EXPERTS[0]
    else:
        for layer in found:
            layer.expert = ""
    return found


def text_encoder_keys(keys: Iterable[str]) -> list[str]:
    """The keys that belong to a text encoder's LoRA."""
    return [key for key in keys if _TEXT_ENCODER.match(_without_prefixes(key)[1])]


def foreign_architecture(names: Iterable[str]) -> str | None:
    """The architecture without a map here that these layer names (without prefixes) give away."""
    names = list(names)
    for pattern, architecture in _FOREIGN:
        if any(re.match(pattern, name) for name in names):
            return architecture
    return None


def _refusal(key: str) -> str:
    for pattern, kind, remedy in _KINDS:
        if re.search(pattern, key):
            return f"{key!r} is {kind}, which is no plain LoRA and would be lost; {remedy}."
    return f"{key!r} is no LoRA tensor (lora_A/lora_B, lora_down/lora_up or alpha); is this the file of an adapter?"


def _without_prefixes(name: str) -> tuple[str, str]:
    """(expert or "", name without prefixes)."""
    name, expert = ".".join(part for part in name.split(".") if part not in WRAPPER_SEGMENTS), ""
    while True:
        for prefix in (*_PREFIXES, *_SECOND, *(f"{expert}." for expert in EXPERTS)):
            if name.startswith(prefix):
                name = name.removeprefix(prefix)
                expert = _SECOND.get(prefix, prefix[:-1] if prefix[:-1] in EXPERTS else expert)
                break
        else:
            return expert, name


def _bare(raw: str) -> tuple[str, str, bool]:
    expert, name = _without_prefixes(raw)
    for prefix in _FLAT_PREFIXES:
        if name.startswith(prefix):
            name = name.removeprefix(prefix)
            return expert, name, "." not in name
    return expert, name, False
