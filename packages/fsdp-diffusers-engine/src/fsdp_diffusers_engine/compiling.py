"""Compiling the repeated blocks of a transformer, and keeping what was compiled for the next run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from model_specs.compiling import tune_compiler
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
    tune_compiler()
    for block in blocks:
        block.compile()


def keep_graphs() -> None:
    """Keep what is compiled in the user's cache folder: torch's own default lies in /tmp, which a restart empties. A folder that
    was set by `TORCHINDUCTOR_CACHE_DIR` stays."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    if os.environ.get("TORCHINDUCTOR_CACHE_DIR") in (None, default_cache_dir()):
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache / "fsdp-diffusers-engine" / "gelu")
