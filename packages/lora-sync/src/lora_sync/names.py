"""The same layer under its many names: neutral (= diffusers, PEFT), ComfyUI, and vLLM-Omni.

Maps are data: one `NameMap` per architecture in `maps.py`. A rule's pattern uses `{i}` for a block number. ComfyUI
keeps some projections fused (`qkv`, FLUX `linear1`); a `Part` says which slice of the fused weight a layer is.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from .errors import NameMapError


@dataclass(frozen=True)
class Part:
    """Slice `index` of a fused layer whose rows divide in the proportion `widths`."""

    index: int
    widths: tuple[int, ...]


@dataclass(frozen=True)
class Rule:
    """neutral name ↔ ComfyUI name of one kind of layer.

    Args:
        neutral, comfy: patterns with `{i}` for the block number.
        part: set when `comfy` is a fused layer.
        fold_alpha: stock loaders read no alpha for this layer, so the writer multiplies it into B.
        swap_halves: the rows of B come in the other order (the final modulation: scale, shift ↔ shift, scale).
        stock: False where stock diffusers cannot read this layer back from a ComfyUI file.
        write: False for names that are understood when read and never written.
    """

    neutral: str
    comfy: str
    part: Part | None = None
    fold_alpha: bool = False
    swap_halves: bool = False
    stock: bool = True
    write: bool = True

    @cached_property
    def matcher(self) -> re.Pattern[str]:
        return _compile(self.neutral)


class Place(NamedTuple):
    """A neutral layer, and how the tensors found under another name go into it."""

    module: str
    part: Part | None = None
    swap_halves: bool = False


_Patterns = list[tuple[re.Pattern[str], str, Rule | None]]
_Sides = tuple[_Patterns, _Patterns]


@dataclass(frozen=True)
class NameMap:
    """Everything about the names of one architecture.

    Args:
        name: short name, as in `get_map("qwen_image")`.
        transformer_class: diffusers class whose module names are the neutral ones.
        rules: every Linear that can carry a LoRA; the first match counts.
        comfy_prefix: `"diffusion_model."` with dots kept, or `"lora_unet_"` with dots turned to underscores (kohya).
        vllm: (suffix, replacement) pairs for vLLM-Omni's module tree.
        vllm_packed: fused layers of vLLM-Omni: (suffix, suffixes of its slices in order).
        vllm_packs_by_name: the engine finds a fused layer's slices by name; else it wants them fused.
        vllm_frozen: patterns of layers that vLLM-Omni builds as plain Linear, where its LoRA cannot go.
        comfy_loader: whether stock diffusers reads this ComfyUI layout.
        neutral_only: patterns of layers that exist and have no ComfyUI rule.
    """

    name: str
    transformer_class: str
    rules: tuple[Rule, ...]
    comfy_prefix: str = "diffusion_model."
    vllm: tuple[tuple[str, str], ...] = ()
    vllm_packed: tuple[tuple[str, tuple[str, ...]], ...] = ()
    vllm_packs_by_name: bool = True
    vllm_frozen: tuple[str, ...] = ()
    comfy_loader: bool = True
    neutral_only: tuple[str, ...] = ()
    aliases: tuple[str, ...] = field(default=())

    def rule(self, neutral: str) -> tuple[Rule, str]:
        """The rule for a layer and its block number ("" when the name has none). Raises `NameMapError`."""
        for rule in self.rules:
            if rule.write and (found := rule.matcher.fullmatch(neutral)):
                return rule, found.groupdict().get("i", "")
        raise NameMapError(
            f"{self.name}: no rule for layer {neutral!r}. Known layers: {', '.join(r.neutral for r in self.rules)}."
        )

    def to_comfy(self, neutral: str) -> tuple[str, Part | None]:
        """ComfyUI's layer name, without prefix, and which slice of it when it is fused."""
        rule, block = self.rule(neutral)
        return rule.comfy.replace("{i}", block), rule.part

    def find(self, layer: str, *, flat: bool = False) -> list[Place]:
        """Where a layer of a file goes; several places, in slice order, when it is fused there; none without a rule.

        `layer` is a neutral or a ComfyUI name without prefix, with every dot turned to an underscore when `flat`:
        names have underscores of their own, so only the rules can turn them back.
        """
        neutral, comfy = self._matchers[flat]
        for pattern, name, _ in neutral:
            if match := pattern.fullmatch(layer):
                return [Place(_fill(name, match))]
        found = [
            Place(_fill(name, match), rule.part, rule.swap_halves)
            for pattern, name, rule in comfy
            if rule is not None and (match := pattern.fullmatch(layer))
        ]
        return sorted(found, key=lambda place: place.part.index if place.part else 0)

    @cached_property
    def _matchers(self) -> tuple[_Sides, _Sides]:
        """(neutral, ComfyUI) patterns with dots, and the same with underscores."""
        return self._sides(lambda name: name), self._sides(lambda name: name.replace(".", "_"))

    def _sides(self, form: Callable[[str], str]) -> _Sides:
        names = [*(rule.neutral for rule in self.rules), *self.neutral_only]
        neutral: _Patterns = [(_compile(form(name)), name, None) for name in names]
        comfy: _Patterns = [(_compile(form(rule.comfy)), rule.neutral, rule) for rule in self.rules]
        return neutral, comfy

    def comfy_key(self, comfy: str) -> str:
        """Layer name as it stands in a file."""
        return self.comfy_prefix + (comfy.replace(".", "_") if self.comfy_prefix == "lora_unet_" else comfy)

    def to_vllm(self, neutral: str) -> str:
        """vLLM-Omni's name for the layer; raises `NameMapError` where its LoRA cannot go. See `lora_sync.to_vllm`."""
        rule, _ = self.rule(neutral)
        if rule.neutral in self.vllm_frozen:
            raise NameMapError(
                f"{self.name}: vLLM-Omni cannot carry a LoRA on {neutral!r} and would drop it in silence. Leave it out of "
                "target_modules, or sample with the diffusers backend."
            )
        for old, new in self.vllm:
            if neutral.endswith(old):
                return neutral.removesuffix(old) + new
        return neutral

    def vllm_layer(self, neutral: str) -> tuple[str, int | None, int]:
        """(engine layer that holds it, slice, number of slices); slice None when the layer is not fused there."""
        name = self.to_vllm(neutral)
        for packed, parts in self.vllm_packed:
            for index, part in enumerate(parts):
                if name.endswith(part):
                    return name.removesuffix(part) + packed, index, len(parts)
        return name, None, 1

    def from_vllm(self, parameter: str) -> tuple[str, ...]:
        """Neutral names of what a parameter of vLLM-Omni's transformer holds, in the order of its rows; one that is
        named alike on both sides is alone."""
        layer, dot, kind = parameter.rpartition(".")
        for packed, parts in self.vllm_packed:
            if layer.endswith(packed):
                return tuple(layer.removesuffix(packed) + part + dot + kind for part in parts)
        for ours, theirs in self.vllm:
            if layer.endswith(theirs):
                return (layer.removesuffix(theirs) + ours + dot + kind,)
        return (parameter,)


def _compile(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\{i\}", r"(?P<i>\d+)"))


def _fill(pattern: str, match: re.Match[str]) -> str:
    return pattern.replace("{i}", match.groupdict().get("i", ""))
