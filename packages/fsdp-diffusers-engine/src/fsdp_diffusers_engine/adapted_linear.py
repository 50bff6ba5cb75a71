"""A linear layer with its LoRA: PEFT's layer, its product computed in the dtype of the activations.

PEFT casts a layer's input up to the adapter's dtype, which for fp32 adapters on a bf16 transformer doubles the memory of
every activation that the adapter touches and runs its products in fp32. Autocast would repair that and change the base's
norms with it, so that trainer and sampler would no longer compute the same function. Here the adapter's small weights are
cast down instead: gradients and optimizer stay fp32, the forward is the same everywhere.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from peft.tuners.lora import Linear
from torch import Tensor


class AdaptedLinear(Linear):
    """PEFT's LoRA layer with another forward; an instance of PEFT's class becomes one by its `__class__`."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """`x` [..., in] → `W x + s B A x` [..., out] in the dtype of `x`.

        The scale `s` meets `A x`, the smallest tensor on the way: on the output it would cost backward a scaled copy of
        the whole gradient.
        """
        if self.disable_adapters or self.merged:
            return super().forward(x, *args, **kwargs)  # type: ignore[no-any-return]
        y: Tensor = self.base_layer(x, *args, **kwargs)  # first: backward sums the gradients of `x` in this order
        return sum(self.added(x), start=y)

    def added(self, x: Tensor) -> list[Tensor]:
        """What each active adapter adds to `W x`, [..., out] in the dtype of `x`."""
        if self.disable_adapters or self.merged:
            return []
        return [self._product(x, name) for name in self.active_adapters if name in self.lora_A]

    def _product(self, x: Tensor, name: str) -> Tensor:
        a: Any = self.lora_A[name].weight
        b: Any = self.lora_B[name].weight
        return F.linear(F.linear(x, a.to(x.dtype)) * self.scaling[name], b.to(x.dtype))
