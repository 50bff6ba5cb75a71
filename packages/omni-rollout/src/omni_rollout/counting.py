"""How many rows a transformer is given, counted where they enter it: what a sample costs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn


class RowCount:
    """Rows seen so far; a sample of a batch of B has cost `rows / B` of them."""

    def __init__(self) -> None:
        self.rows = 0

    def __call__(self, module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """A forward pre-hook: the latents come first or by name, as one tensor [B, …] or as a list of B."""
        latents = args[0] if args else keywords["hidden_states"]
        self.rows += len(latents)


@contextmanager
def counted_rows(modules: Iterable[nn.Module | None]) -> Iterator[RowCount]:
    """Count the rows that enter any of the modules inside the block."""
    count = RowCount()
    with ExitStack() as hooks:
        for module in modules:
            if module is not None:
                hooks.callback(module.register_forward_pre_hook(count, with_kwargs=True).remove)
        yield count
