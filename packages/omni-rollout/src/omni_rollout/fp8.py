"""The frozen weights of a transformer in fp8 while it samples. Adapters, norms and modulations stay as they are.

Each row of a weight and each token of its input gets a scale of its own (float8 e4m3, largest value 448), so no calibration is
needed. On GPUs from compute capability 8.9 on, such a product takes half the time of a bf16 one. The samples are then those of a
slightly other policy than the trainer's: what it amounts to is measured at every step, as the difference of log-probs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .errors import RolloutConfigError

_LARGEST = 448.0
_OTHERS = ("lora_", "norm", "_mod", "adaLN")
"""In the names of layers that stay: small, or of one row a sample."""


class Fp8Linear(nn.Linear):
    """A linear layer that multiplies by `low`, its weight in fp8."""

    low: Tensor
    scale: Tensor

    def forward(self, input: Tensor) -> Tensor:
        """[..., out] for `input` [..., in], in its dtype."""
        low, scale = rounded(input.flatten(0, -2))
        y = torch._scaled_mm(
            low, self.low.t(), scale, self.scale.t(), bias=self.bias, out_dtype=input.dtype, use_fast_accum=True
        )
        return y.unflatten(0, input.shape[:-1])


def rounded(rows: Tensor) -> tuple[Tensor, Tensor]:
    """[N, K] → (its rows in fp8 [N, K], the scale of each [N, 1] fp32)."""
    scale = rows.abs().amax(dim=1, keepdim=True).float().clamp_min(1e-12) / _LARGEST
    return (rows.float() / scale).to(torch.float8_e4m3fn), scale


@cache
def _rounder(device: str) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """`rounded`, on a GPU as one kernel, which reads a weight once: 20 B of them then take some hundredths of a second, and need
    not be kept in fp8 while an update wants the memory."""
    return torch.compile(rounded, dynamic=False) if device == "cuda" else rounded


@contextmanager
def fp8_weights(transformer: nn.Module) -> Iterator[None]:
    """Inside, the blocks' linear layers multiply in fp8. The copies take half of the bf16 weights' memory, and go at the end.

    Raises:
        RolloutConfigError: the weights are spread over several processes.
    """
    layers: list[nn.Module] = [*_layers(transformer)]
    try:
        for layer in layers:
            weight = _own(layer)  # type: ignore[arg-type]
            with torch.no_grad():
                layer.low, layer.scale = _rounder(weight.device.type)(weight)  # type: ignore[assignment]
            layer.__class__ = Fp8Linear
        yield
    finally:
        for layer in layers:
            layer.__class__ = nn.Linear
            vars(layer).pop("low", None)
            vars(layer).pop("scale", None)


def _own(layer: nn.Linear) -> Tensor:
    """What this process holds of the weight."""
    weight: Tensor = layer.weight
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _layers(transformer: nn.Module) -> list[nn.Linear]:
    names = getattr(transformer, "_repeated_blocks", None) or ()
    blocks = [module for module in transformer.modules() if type(module).__name__ in names]
    layers = [
        layer
        for block in blocks
        for name, layer in block.named_modules()
        if type(layer) is nn.Linear
        and not any(other in name for other in _OTHERS)
        and layer.in_features % 16 == layer.out_features % 16 == 0
    ]
    if not layers:
        raise RolloutConfigError(f"rollout.fp8: {type(transformer).__name__} has no layer for it; leave it off")
    if any(_own(layer).shape != layer.weight.shape for layer in layers):
        raise RolloutConfigError(
            "rollout.fp8: the trainer's weights are spread over several processes; leave it off, or set "
            "actor.fsdp_config.fsdp_size=1"
        )
    return layers
