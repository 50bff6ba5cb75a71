"""How many rows went through the transformer: what an algorithm costs, counted and not computed from its config.

A row is one sample at one noise level under one prompt, so guidance with a negative prompt counts two. The count is
taken by a hook on the whole module: a block that is recomputed in backward is not seen by it, and Wan's two experts lie
behind one module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .errors import EngineError


class Rows(NamedTuple):
    """Rows that were forwarded."""

    with_grad: int = 0
    """While gradients were recorded: the trained policy in an update."""
    without_grad: int = 0
    """Without: scores, the reference, the old policy."""

    def per_sample(self, samples: int) -> tuple[float, float]:
        """The same for each of `samples`."""
        return self.with_grad / samples, self.without_grad / samples


class ForwardCounter:
    """Counts the rows of every forward of a module, whoever calls it (a rollout that shares the weights too)."""

    def __init__(self) -> None:
        self.rows = Rows()
        """Rows since the last `take`."""
        self._hook: RemovableHandle | None = None

    def watch(self, module: nn.Module) -> None:
        """Count this module's forwards from now on, and those of no other; starts at zero."""
        if self._hook is not None:
            self._hook.remove()
        self.rows = Rows()
        self._hook = module.register_forward_pre_hook(self._count, with_kwargs=True)

    def take(self) -> Rows:
        """Read and reset."""
        rows, self.rows = self.rows, Rows()
        return rows

    def _count(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        latents = args[0] if args else kwargs.get("hidden_states")
        if not isinstance(latents, Tensor | list | tuple):
            raise EngineError(
                f"cannot count the rows of {type(module).__name__}: its first argument is {type(latents).__name__}; call "
                f"it with the latents [B, …] (or a list of B) first, or as hidden_states"
            )
        grad, none = self.rows
        self.rows = Rows(grad + len(latents), none) if torch.is_grad_enabled() else Rows(grad, none + len(latents))
