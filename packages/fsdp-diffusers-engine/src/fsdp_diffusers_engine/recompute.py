"""Gradient checkpointing of as many blocks as memory asks for, and no more.

Recomputing a block in backward costs a third of its training time; keeping its activations costs memory. The first forward of
a new batch shape measures what one block keeps and counts how many fit into the memory that is free at that moment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

_SHARE = 0.85
"""Of the free memory that kept activations may fill: the allocator's pieces do not fit without gaps."""
_WORKSPACE = 3
"""Blocks' worth of memory left to backward: one block that is recomputed, its gradients, and one product."""


class Recompute:
    """The function that diffusers calls in place of a block while gradients are on.

    Args:
        blocks: in the order of the forward pass.
        device: where they compute. Without CUDA nothing is measured and every block is recomputed.
        count: blocks to recompute, the first ones; None measures.
    """

    def __init__(self, blocks: Sequence[nn.Module], device: torch.device, count: int | None = None) -> None:
        self._place = {id(block): number for number, block in enumerate(blocks)}
        self._device, self.count = device, count
        self.chosen: dict[tuple[Any, ...], int] = {}
        """Shapes of a block's inputs → how many blocks are recomputed."""

    def __call__(self, block: Callable[..., Any], *args: Any) -> Any:
        """`block(*args)`, its activations kept or not."""
        place = self._place.get(id(block))
        if place is None:  # a refiner or another part outside the repeated blocks: few, and none was counted
            return checkpoint(block, *args, use_reentrant=False)
        count = self.count
        if count is None:
            shapes = tuple(tuple(arg.shape) for arg in args if isinstance(arg, Tensor))
            if shapes not in self.chosen:
                if self._device.type != "cuda":
                    self.chosen[shapes] = len(self._place)
                else:
                    return self._measure(block, args, shapes)
            count = self.chosen[shapes]
        if place >= count:
            return block(*args)
        return checkpoint(block, *args, use_reentrant=False)

    def _measure(self, block: Callable[..., Any], args: tuple[Any, ...], shapes: tuple[Any, ...]) -> Any:
        """Run one block with its activations kept, and choose for all others of this shape."""
        before = torch.cuda.memory_allocated(self._device)
        output = block(*args)
        kept = max(torch.cuda.memory_allocated(self._device) - before, 1)
        results = output if isinstance(output, (tuple, list)) else (output,)
        passed_on = sum(r.numel() * r.element_size() for r in results if isinstance(r, Tensor))
        free = torch.cuda.mem_get_info(self._device)[0]
        free += torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        self.chosen[shapes] = blocks_to_recompute(len(self._place), free, kept, passed_on)
        return output


def blocks_to_recompute(blocks: int, free: float, kept: float, passed_on: float) -> int:
    """How many of `blocks` have to be recomputed.

    Args:
        free: bytes. kept: bytes that one block's activations take, its outputs included. passed_on: bytes of the outputs, which
            a recomputed block keeps all the same.
    """
    room = _SHARE * free - _WORKSPACE * kept - blocks * passed_on
    fits = int(room // max(kept - passed_on, 1)) if room > 0 else 0
    return blocks - min(blocks, fits)
