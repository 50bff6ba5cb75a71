"""Wan2.2 A14B's two experts as one module: one trains high noise, the other low noise.

The split is by time: `transformer` denoises from pure noise down to the boundary, `transformer_2` from there on. As one
`nn.Module` they can carry one LoRA (parameter names start with `transformer.` or `transformer_2.`), be sharded and be
saved together, and each gets gradients from its own steps only.

Imported lazily: this file needs diffusers.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.loaders import PeftAdapterMixin
from torch import Tensor, nn


class WanExperts(ModelMixin, ConfigMixin, PeftAdapterMixin):  # type: ignore[misc]
    """Routes every row to the expert of its timestep. Called as `WanTransformer3DModel` is.

    Args:
        transformer: the high-noise expert.
        transformer_2: the low-noise expert.
        boundary: timesteps (0..1000) at or above it go to the high-noise expert.

    Under FSDP2 every rank must route to the same experts in one call, as all ranks gather weights together: give all
    ranks the same window step (the default), or rows of both kinds to each.
    """

    config_name = "config.json"  # type: ignore[assignment]
    _supports_gradient_checkpointing = True
    _no_split_modules = ("WanTransformerBlock",)
    _repeated_blocks = ("WanTransformerBlock",)
    _keep_in_fp32_modules = ("rope", "time_embedder", "scale_shift_table", "norm1", "norm2", "norm3")

    def __init__(self, transformer: nn.Module, transformer_2: nn.Module, boundary: float) -> None:
        super().__init__()
        self.register_to_config(**dict(cast(Any, transformer).config), boundary=boundary)
        self.transformer = transformer
        self.transformer_2 = transformer_2

    def is_high(self, timestep: Tensor) -> Tensor:
        """Which rows the high-noise expert serves, [B] bool. A timestep per token counts by its first token."""
        first = timestep if timestep.ndim == 1 else timestep[:, 0]
        return first >= self.config["boundary"]

    def forward(
        self, hidden_states: Tensor, timestep: Tensor, encoder_hidden_states: Tensor, return_dict: bool = False
    ) -> tuple[Tensor]:
        """[B, C, T, H, W] at timestep [B] (0..1000), text [B, S, C'], to a tuple of one. Rows of both kinds may be mixed."""
        high, given = self.is_high(timestep), (hidden_states, timestep, encoder_hidden_states)
        count = int(high.sum())
        if count in (0, len(high)):
            return (self.transformer if count else self.transformer_2)(*given, return_dict=False)
        order = torch.cat([high.nonzero()[:, 0], (~high).nonzero()[:, 0]])
        rows = zip(*(tensor[order].split([count, len(high) - count]) for tensor in given), strict=True)
        experts = zip((self.transformer, self.transformer_2), rows, strict=True)
        outputs = [expert(*part, return_dict=False)[0] for expert, part in experts]
        return (torch.cat(outputs)[torch.argsort(order)],)
