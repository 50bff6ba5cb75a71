"""GELU inside the product before it, where a compiled block samples: CUDA's library then applies it to the product's sums, and
neither is written and read in between. An update keeps what GELU was given, and multiplies first.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from diffusers.models import activations
from torch import Tensor, nn


def let_compile(blocks: Iterable[nn.Module]) -> None:
    """Let these blocks use it where they have GELU in the tanh form after a plain layer."""
    for module in (each for block in blocks for each in block.modules()):
        if type(module) is activations.GELU and module.approximate == "tanh":
            module.__class__ = _InsideProduct


class _InsideProduct(activations.GELU):  # type: ignore[misc]
    def forward(self, hidden_states: Tensor) -> Tensor:
        layer: Any = self.proj  # with an adapter, or in fp8, it is of another class
        compiled = torch.compiler.is_compiling() and not torch.is_grad_enabled()
        if not compiled or type(layer) is not nn.Linear or not takes_product(hidden_states, layer):
            return super().forward(hidden_states)  # type: ignore[no-any-return]
        y = torch._addmm_activation(layer.bias, hidden_states.flatten(0, -2), layer.weight.t(), use_gelu=True)
        return y.unflatten(0, hidden_states.shape[:-1])


def takes_product(x: Tensor, layer: nn.Linear) -> bool:
    """Whether there is such a product: in bf16 on a GPU, with a bias. On a CPU torch has it for the exact form of GELU."""
    return x.is_cuda and x.dtype == layer.weight.dtype == torch.bfloat16 and layer.bias is not None
