"""What torch's compiler makes of the blocks of these models: GELU by one exponential, and long rows reduced at once.

Left to itself it calls the exact tanh of CUDA's library, and that kernel waits for arithmetic instead of memory; and it reads a row
of more than 1,024 numbers twice. Both hold for the process; outside of compiled code nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

_ROW = 16384
_CUBIC, _TWICE = 0.044715, 1.5957691216057308
"""GELU in the tanh form is x (1 + tanh u) / 2 with u = √(2/π) (x + 0.044715 x³), and (1 + tanh u) / 2 is sigmoid(2 u)."""


def tune_compiler() -> None:
    """Before the first block of this process is compiled; again makes no difference."""
    from torch._inductor import decomposition
    from torch._inductor.choices import InductorChoices

    stock = InductorChoices.should_use_persistent_reduction
    if isinstance(stock, partial):
        return
    InductorChoices.should_use_persistent_reduction = staticmethod(partial(whole_rows, stock))  # type: ignore[method-assign]
    table: dict[Any, Callable[..., Any]] = decomposition.decompositions
    for operator, ours in ((torch.ops.aten.gelu.default, gelu), (torch.ops.aten.gelu_backward.default, gelu_gradient)):
        table[operator] = partial(ours, table[operator])
    decomposition.fast_random_decomps.cache_clear()  # a copy of the table


def gelu(stock: Callable[..., Tensor], x: Tensor, *, approximate: str = "none") -> Tensor:
    """GELU of `x` [...] in its dtype, computed in fp32 or more; `stock` does the other forms."""
    if approximate != "tanh":
        return stock(x, approximate=approximate)
    wide = _wide(x)
    return (wide * _share(wide)).to(x.dtype)


def gelu_gradient(stock: Callable[..., Tensor], grad: Tensor, x: Tensor, *, approximate: str = "none") -> Tensor:
    """Of `x`, from that of the output; see `gelu`."""
    if approximate != "tanh":
        return stock(grad, x, approximate=approximate)
    wide = _wide(x)
    share = _share(wide)
    slope = _TWICE * (1 + 3 * _CUBIC * wide * wide)
    return (_wide(grad) * share * (1 + wide * (1 - share) * slope)).to(x.dtype)


def _share(x: Tensor) -> Tensor:
    return torch.sigmoid(_TWICE * (x + _CUBIC * x * x * x))


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def whole_rows(stock: Callable[[Any, bool], bool], features: Any, cooperative_reduction: bool) -> bool:
    """Whether the compiler makes one pass of a reduction: rows of up to 16,384 numbers stay in registers (its own limit is 1,024),
    so that norms, and the rounding of a row to fp8, read their row once."""
    from torch._inductor import config

    short = features.reduction_numel.is_Integer and 1024 < int(features.reduction_numel) <= _ROW
    asked = config.triton.persistent_reductions and not cooperative_reduction
    if short and asked and all(map(along_rows, features.reduction_nodes())):
        return True
    return stock(features, cooperative_reduction)


def along_rows(node: Any) -> bool:
    """Whether a reduction's numbers lie next to each other. The compiler's own hint says so for fewer than 8,448 rows only."""
    moving = [(dep.index, dep.var_names[-1]) for dep in node.read_writes.reads if getattr(dep, "var_names", ())]
    return all(index.coeff(last) == 1 for index, last in moving if last in index.free_symbols)
