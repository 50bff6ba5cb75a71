"""The product of a LoRA adapter, added in place to what a linear layer gave; torch alone."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


@torch.library.custom_op("omni_rollout::add_lora", mutates_args=("y",))
def add_lora(y: Tensor, x: Tensor, a: Tensor, b: Tensor, sizes: list[int]) -> None:
    """`y[:, part] += (x Aᵀ)[:, part] B[part]ᵀ` in place. An operator of its own, so that compiled graphs keep it in place.

    Args:
        y: [..., sum(sizes)], what the layer gave. x: [..., in], what it was given.
        a: [P · R, in], the A of the parts below each other. b: [sum(sizes), R], the B of the parts, scale included.
        sizes: rows of `b`, and columns of `y`, that each part has.
    """
    rank, start = b.shape[1], 0
    out = y.view(-1, y.shape[-1])
    low = x.reshape(-1, x.shape[-1]) @ a.t()
    for part, size in enumerate(sizes):
        columns = slice(start, start + size)
        out[:, columns].addmm_(low[:, part * rank : (part + 1) * rank], b[columns].t())
        start += size


class Factors(NamedTuple):
    """An adapter's share in one layer, as this rank holds it."""

    a: Tensor
    """[P · R, in]."""
    b: Tensor
    """[out, R]."""


class LoRAMethod:
    """A layer's own product, and the active adapter's beside it: a `quant_method` as vLLM's linear layers call it."""

    def __init__(self, own: Any, sizes: list[int]) -> None:
        self.own, self.sizes = own, sizes
        self.active: Factors | None = None

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """[..., out] for `x` [..., in]; see vLLM's `LinearMethodBase`."""
        y: Tensor = self.own.apply(layer, x, bias)
        if self.active is not None:
            add_lora(y, x, self.active.a, self.active.b, self.sizes)
        return y
