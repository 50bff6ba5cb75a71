"""What a trainer or a sampler must know about one architecture, one file each. Prompts load torch, all else imports without it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from model_specs.base import ModelSpec, Sampling
from model_specs.errors import PromptTooLongError, SpecError, UnknownArchitectureError
from model_specs.flops import training_flops
from model_specs.flux import FluxSpec
from model_specs.qwen_image import QwenImageSpec
from model_specs.registry import available, get_spec, get_spec_for
from model_specs.sd3 import SD3Spec
from model_specs.wan import WanSpec
from model_specs.z_image import ZImageSpec

if TYPE_CHECKING:
    from model_specs.embeddings import PromptEmbeds, PromptEncoder

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
