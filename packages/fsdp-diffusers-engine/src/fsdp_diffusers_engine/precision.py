"""dtypes by name, and the dtype in which adapters are kept."""

from __future__ import annotations

import torch
from torch import nn

from .errors import EngineError, nearest

DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}


def dtype_of(name: str, field: str) -> torch.dtype:
    """The torch dtype for a config's name; `field` is named in the error."""
    if name not in DTYPES:
        raise EngineError(
            f"{field}={name!r} is not a dtype known here; use one of {sorted(DTYPES)} (nearest: {nearest(name, DTYPES)[0]!r})"
        )
    return DTYPES[name]


def keep_adapters_in(module: nn.Module, dtype: torch.dtype) -> None:
    """Store every adapter matrix of a PEFT-injected `module` in `dtype`, and compute it in its input's."""
    from peft.tuners.lora import Linear, LoraLayer

    from .adapted_linear import AdaptedLinear

    for layer in module.modules():
        if isinstance(layer, LoraLayer):
            layer.lora_A.to(dtype)
            layer.lora_B.to(dtype)
        if type(layer) is Linear:
            # The instance keeps its parameters; only its forward is new.
            layer.__class__ = AdaptedLinear
