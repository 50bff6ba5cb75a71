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

    Args:
        config: names the loss and its constants.
        model_output: what the policy computed, with gradient; a dict or a TensorDict. The docstrings of `policy_gradient`,
            `forward_process` and `preference` list keys and shapes; keys that a loss does not read are ignored.
        data: what the batch holds, all of it constant. `global_count` in it (int, optional) is the number of counted elements of
            the whole mini-batch, over micro-batches and ranks: (sample, step) elements, or pairs for dpo.
        dp_group: the data-parallel process group; `reduction.reduce_elements` says what it and `global_count` do.

    Raises:
        LossError: an unknown mode, a missing key, shapes that do not fit, half-precision log-probs, or counted values that are
            not finite.
    """
    elements = config.spec.load()(config, model_output, data)
    count = lookup(data, "global_count")
    if isinstance(count, Tensor):
        count = count.flatten()[0]
    return reduce_elements(elements, global_count=None if count is None else int(count), dp_group=dp_group)
