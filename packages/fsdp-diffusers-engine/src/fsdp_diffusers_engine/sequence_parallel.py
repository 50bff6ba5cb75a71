"""Ulysses sequence parallelism: several ranks share the tokens of one sample.

diffusers declares per transformer where tokens are split and gathered (its context-parallel plan); attention exchanges
heads for tokens by all-to-all, forward and backward. Everything before the split is computed on every rank, and each
rank's gradient then covers its own tokens; `sharding.Layout.loss_scale` turns FSDP2's mean over ranks back into
their sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .errors import EngineError
from .sharding import Layout


def enable_ulysses(module: nn.Module, layout: Layout, device: torch.device) -> None:
    """Split tokens over the ranks of `layout.sequence_mesh`, in place.

    Does what diffusers' `enable_parallelism` does, without its assumption that the ranks compute on the machine's
    accelerator (gloo on CPUs works here too). Raises `EngineError` without a plan, or for heads that do not divide.
    """
    from diffusers.hooks.context_parallel import apply_context_parallel
    from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig

    transformers: list[Any] = [m for m in module.modules() if getattr(m, "_cp_plan", None)]
    if not transformers:
        raise EngineError(
            f"ulysses_sequence_parallel_size={layout.sp_size}: {type(module).__name__} has no context-parallel plan in "
            f"this version of diffusers; use 1"
        )
    mesh = layout.sequence_mesh
    assert mesh is not None
    for transformer in transformers:
        heads = transformer.config.num_attention_heads
        if heads % layout.sp_size:
            raise EngineError(
                f"ulysses_sequence_parallel_size={layout.sp_size} does not divide the {heads} attention heads; "
                f"use a divisor"
            )
        tokens = ContextParallelConfig(ulysses_degree=layout.sp_size, mesh=mesh)
        config = ParallelConfig(context_parallel_config=tokens)
        config.setup(layout.rank, layout.world_size, device, mesh=mesh["ring", "ulysses"])
        transformer._parallel_config = config
        for child in transformer.modules():
            processor: Any = getattr(child, "processor", None)
            if hasattr(processor, "_parallel_config"):
                processor._parallel_config = config
        apply_context_parallel(transformer, tokens, transformer._cp_plan)
