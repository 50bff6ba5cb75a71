"""GELU in compiled blocks, by one exponential: the compiler would call the exact tanh of CUDA's library, and its kernel would wait
for arithmetic instead of memory. Outside of compiled code nothing changes.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from diffusers.models import activations
from torch import Tensor, nn


def gelu_by_exponential(x: Tensor) -> Tensor:
    """The tanh form of GELU, [...] in the dtype of `x`, computed in fp32: 0.5 (1 + tanh u) is sigmoid(2 u)."""
    wide = x.float()
    return (wide * torch.sigmoid(1.5957691216057308 * (wide + 0.044715 * wide**3))).to(x.dtype)


def let_compile(blocks: Iterable[nn.Module]) -> None:
    """Let blocks that are compiled use it where they have GELU in the tanh form."""
    for module in (each for block in blocks for each in block.modules()):
        if getattr(module, "approximate", None) == "tanh":
            kind = _KINDS.get(type(module))
            if kind is not None:
                module.__class__ = kind


class _GELU(nn.GELU):
    def forward(self, input: Tensor) -> Tensor:
        return gelu_by_exponential(input) if torch.compiler.is_compiling() else super().forward(input)


class _ProjectedGELU(activations.GELU):  # type: ignore[misc]
    def gelu(self, gate: Tensor) -> Tensor:
        return gelu_by_exponential(gate) if torch.compiler.is_compiling() else super().gelu(gate)


_KINDS: dict[type[nn.Module], type[nn.Module]] = {nn.GELU: _GELU, activations.GELU: _ProjectedGELU}
