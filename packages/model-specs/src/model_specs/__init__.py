"""What a trainer or a sampler must know about one diffusers architecture, one file each."""

from model_specs.base import ModelSpec
from model_specs.embeddings import PromptEmbeds, PromptEncoder
from model_specs.errors import PromptTooLongError, SpecError, UnknownArchitectureError
from model_specs.qwen_image import QwenImageSpec
from model_specs.registry import available, get_spec, get_spec_for, register

__all__ = [
    "ModelSpec",
    "PromptEmbeds",
    "PromptEncoder",
    "PromptTooLongError",
    "QwenImageSpec",
    "SpecError",
    "UnknownArchitectureError",
    "available",
    "get_spec",
    "get_spec_for",
    "register",
]
