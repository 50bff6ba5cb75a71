"""dtypes by name, and adapters that keep fp32 weights over a bf16 base.

PEFT casts a layer's input up to the adapter's dtype, which for fp32 adapters on a bf16 transformer doubles the memory of
every activation that the adapter touches and runs its products in fp32. Autocast would repair that and change the base's
norms with it, so that trainer and sampler would no longer compute the same function. Here the adapter's small weights are
cast down to the activations' dtype instead: gradients and optimizer stay fp32, the forward is the same everywhere.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
    """The torch dtype for a config's name; ``field`` is named in the error."""
    if name not in DTYPES:
        raise EngineError(
            f"{field}={name!r} is not a dtype known here; use one of {sorted(DTYPES)} (nearest: {nearest(name, DTYPES)[0]!r})"
        )
    return DTYPES[name]


class MasterLinear(nn.Linear):
    """A bias-free adapter matrix kept in its own dtype and multiplied in the dtype of its input."""

    def forward(self, input: Tensor) -> Tensor:
        """``input`` [..., in] → [..., out] in the dtype of ``input``."""
        weight = self.weight
        return F.linear(input, weight if weight.dtype == input.dtype else weight.to(input.dtype))


def keep_adapters_in(module: nn.Module, dtype: torch.dtype, compute_dtype: torch.dtype) -> None:
    """Store every adapter matrix of a PEFT-injected ``module`` in ``dtype`` and compute in ``compute_dtype``."""
    from peft.tuners.lora import LoraLayer

    for layer in module.modules():
        if not isinstance(layer, LoraLayer):
            continue
        layer.cast_input_dtype_enabled = dtype == compute_dtype
        for matrices in (layer.lora_A, layer.lora_B):
            for matrix in matrices.values():
                matrix.to(dtype)
                if dtype != compute_dtype and type(matrix) is nn.Linear:
                    # The instance keeps its parameters; only the cast in its forward is new.
                    matrix.__class__ = MasterLinear
