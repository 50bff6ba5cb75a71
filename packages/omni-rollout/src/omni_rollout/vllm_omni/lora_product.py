"""The product of a LoRA adapter, added in place to what a linear layer gave; torch alone."""

from __future__ import annotations

import torch
from torch import Tensor


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
