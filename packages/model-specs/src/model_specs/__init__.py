"""What a trainer or a sampler must know about one architecture, one file each. Prompts load torch, all else imports without it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .base import ModelSpec, Sampling
from .errors import PromptTooLongError, SpecError, UnknownArchitectureError
from .flops import training_flops
from .flux import FluxSpec
from .qwen_image import QwenImageSpec
from .registry import available, get_spec, get_spec_for
from .sd3 import SD3Spec
from .wan import WanSpec
from .z_image import ZImageSpec

if TYPE_CHECKING:
    from .embeddings import PromptEmbeds, PromptEncoder

__all__ = [
    "FluxSpec",
    "ModelSpec",
    "PromptEmbeds",
    "PromptEncoder",
    "PromptTooLongError",
    "QwenImageSpec",
    "SD3Spec",
    "Sampling",
    "SpecError",
    "UnknownArchitectureError",
    "WanSpec",
    "ZImageSpec",
    "available",
    "get_spec",
    "get_spec_for",
    "training_flops",
]


def __getattr__(name: str) -> Any:
    if name not in ("PromptEmbeds", "PromptEncoder"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("model_specs.embeddings"), name)
