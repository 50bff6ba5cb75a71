"""Which linear layers a LoRA adapts, told from their names by PEFT's rules. Imports without torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .config import DiffusionModelConfig
from .errors import EngineError, nearest

if TYPE_CHECKING:
    from model_specs import ModelSpec


def resolve_targets(names: Sequence[str], config: DiffusionModelConfig, spec: ModelSpec) -> list[str] | str:
    """What PEFT's `target_modules` should be; every entry of it matches at least one layer.

    Args:
        names: of the transformer's linear layers.

    Raises:
        EngineError: an entry that matches nothing, with the names most like it, or an `exclude_modules` that leaves nothing.
    """
    target = config.target_modules
    if isinstance(target, str) and target in ("all-linear", "attention"):
        target = list(spec.lora_targets if target == "all-linear" else spec.attention_targets)
    elif not isinstance(target, str):
        target = [str(end) for end in target]
    if not target:
        raise EngineError(f"target_modules={config.target_modules!r} names no module; give 'all-linear' or a list")
    for entry in [target] if isinstance(target, str) else target:
        if not any(_matches(name, entry if isinstance(target, str) else [entry], "target_modules") for name in names):
            ends = dict.fromkeys(".".join(name.split(".")[-depth:]) for name in names for depth in (1, 2))
            raise EngineError(
                f"target_modules={config.target_modules!r}: {entry!r} matches no linear layer of {spec.transformer_class}; "
                f"names like it: {nearest(entry, ends)}"
            )
    if not adapted(names, target, config.exclude_modules):
        raise EngineError(
            f"exclude_modules={config.exclude_modules!r} leaves nothing of target_modules={config.target_modules!r}; exclude less"
        )
    return target


def adapted(names: Sequence[str], target: Any, exclude: Any) -> list[str]:
    """The layers that get an adapter, for a `target` of `resolve_targets`."""
    return [
        name
        for name in names
        if _matches(name, target, "target_modules")
        and (exclude is None or not _matches(name, exclude, "exclude_modules"))
    ]


def _matches(name: str, pattern: Any, field: str) -> bool:
    """A string is a full-match regular expression, a list holds name ends."""
    if not isinstance(pattern, str):
        return any(name == str(end) or name.endswith(f".{end}") for end in pattern)
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error as error:
        raise EngineError(f"{field}={pattern!r} is no regular expression ({error})") from error
