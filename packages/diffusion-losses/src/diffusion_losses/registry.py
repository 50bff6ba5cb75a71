"""One entry point: `diffusion_loss` picks the loss by `config.loss_mode`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .config import DiffusionLossConfig
from .elements import Source, lookup
from .reduction import reduce_elements
from .types import LossOutput


def diffusion_loss(config: DiffusionLossConfig, model_output: Source, data: Source, dp_group: Any = None) -> LossOutput:
    """The loss of one micro-batch.

    config: names the loss and its constants. model_output: what the policy computed, with gradient. data: what the
    batch holds, all of it treated as constant. Keys and shapes are listed in the docstrings of `policy_gradient`,
    `forward_process` and `preference`; both may be dicts or TensorDicts, and keys that a loss does not read are
    ignored.

    data["global_count"] (int, optional) is the number of counted elements of the whole mini-batch, over
    micro-batches and ranks: (sample, step) elements, or pairs for dpo. dp_group: the data-parallel process group.
    `reduction.reduce_elements` says what each does to the loss.

    Returns `LossOutput(loss, metrics)`. Raises `LossError` for an unknown mode, a missing key, a shape mismatch,
    half-precision log-probs, or non-finite values among counted elements.
    """
    elements = config.spec.load()(config, model_output, data)
    count = lookup(data, "global_count")
    if isinstance(count, Tensor):
        count = count.flatten()[0]
    return reduce_elements(elements, global_count=None if count is None else int(count), dp_group=dp_group)
