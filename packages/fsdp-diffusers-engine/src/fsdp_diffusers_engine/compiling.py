"""Compiling the repeated blocks of a transformer, and keeping what was compiled for the next run."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from . import rotary

_GRAPHS = 64


def compile_blocks(blocks: Sequence[nn.Module]) -> None:
    """Compile each block in place; equal blocks share their graphs.

    With and without gradients, adapters and text mask, the first block and the others, two micro-batch sizes: more
    graphs than Dynamo's limit of 8. At the limit it goes on uncompiled, and a checkpointed block that was compiled in
    forward and is recomputed uncompiled fails. So the limit is raised, for this process.
    """
    import torch._dynamo

    from . import gelu

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _GRAPHS)
    keep_graphs()
    rotary.let_compile()
    gelu.let_compile(blocks)
    _reduce_rows_at_once()
    for block in blocks:
        block.compile()


_ROW = 16384


def whole_rows(stock: Callable[[Any, bool], bool], features: Any, cooperative_reduction: bool) -> bool:
    """Whether the compiler makes one pass of a reduction: rows of up to 16,384 numbers stay in registers (its own limit is 1,024),
    so that norms, and the rounding of a row to fp8, read their row once."""
    from torch._inductor.runtime.hints import ReductionHint

    short = features.reduction_numel.is_Integer and 1024 < int(features.reduction_numel) <= _ROW
    inner = features.get_reduction_hint() == ReductionHint.INNER
    return (short and inner and not cooperative_reduction) or stock(features, cooperative_reduction)


def _reduce_rows_at_once() -> None:
    from torch._inductor.choices import InductorChoices

    stock = InductorChoices.should_use_persistent_reduction
    if not isinstance(stock, partial):
        InductorChoices.should_use_persistent_reduction = staticmethod(partial(whole_rows, stock))  # type: ignore[method-assign]


def keep_graphs() -> None:
    """Keep what is compiled in the user's cache folder: torch's own default lies in /tmp, which a restart empties. A folder that
    was set by `TORCHINDUCTOR_CACHE_DIR` stays."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    if os.environ.get("TORCHINDUCTOR_CACHE_DIR") in (None, default_cache_dir()):
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache / "fsdp-diffusers-engine" / "rows")
