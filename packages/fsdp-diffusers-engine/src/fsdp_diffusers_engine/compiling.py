"""Compiling the repeated blocks of a transformer, and keeping what was compiled for the next run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

_GRAPHS = 64


def compile_blocks(blocks: Sequence[nn.Module]) -> None:
    """Compile each block in place; equal blocks share their graphs.

    With and without gradients, adapters and text mask, the first block and the others, two micro-batch sizes: more
    graphs than Dynamo's limit of 8. At the limit it goes on uncompiled, and a checkpointed block that was compiled in
    forward and is recomputed uncompiled fails. So the limit is raised, for this process.
    """
    import torch._dynamo

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _GRAPHS)
    keep_graphs()
    _rotate_without_complex_numbers()
    for block in blocks:
        block.compile()


def keep_graphs() -> None:
    """Keep what is compiled in the user's cache folder: torch's own default lies in /tmp, which a restart empties. A folder that
    was set by `TORCHINDUCTOR_CACHE_DIR` stays."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    if os.environ.get("TORCHINDUCTOR_CACHE_DIR") in (None, default_cache_dir()):
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache / "fsdp-diffusers-engine" / "inductor")


def _rotate_without_complex_numbers() -> None:
    """Let Qwen-Image's rotary embedding be compiled: the compiler has no complex numbers, so it runs diffusers' form as
    it is, in fp32, between the kernels that it makes. Outside of compiled code nothing changes."""
    from diffusers.models.transformers.transformer_qwenimage import ROPE_PER_DEVICE

    if getattr(ROPE_PER_DEVICE["cuda"], "__name__", "") != "rotate":
        complex_form: Any = ROPE_PER_DEVICE["cuda"]

        def rotate(x: Tensor, freqs: Tensor) -> Tensor:
            if torch.compiler.is_compiling():
                return rotated(x, freqs)
            return complex_form(x, freqs)  # type: ignore[no-any-return]

        ROPE_PER_DEVICE["cuda"] = rotate


def rotated(x: Tensor, freqs: Tensor) -> Tensor:
    """Pairs of neighbouring channels turned as complex numbers, by real arithmetic in fp32.

    Args:
        x: [B, S, H, D]. freqs: unit complex numbers [S, D/2].
    """
    cos, sin = torch.view_as_real(freqs).unsqueeze(1).unbind(-1)  # [S, 1, D/2]
    real, imaginary = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([real * cos - imaginary * sin, real * sin + imaginary * cos], dim=-1).flatten(-2).type_as(x)
