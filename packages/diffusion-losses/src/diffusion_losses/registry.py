"""One entry point: `diffusion_loss` picks the loss by `config.loss_mode`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from diffusion_losses import forward_process, policy_gradient, preference
from diffusion_losses.config import FORWARD_PROCESS, LOSS_MODES, POLICY_GRADIENT, DiffusionLossConfig
from diffusion_losses.elements import Source, lookup
from diffusion_losses.errors import LossError, unknown_name
from diffusion_losses.reduction import reduce_elements
from diffusion_losses.types import ElementLoss, LossOutput

LossFunction = Callable[[DiffusionLossConfig, Source, Source], ElementLoss]

_LOSSES: dict[str, LossFunction] = {
    "flow_grpo": policy_gradient.clipped_loss,
    "dance_grpo": policy_gradient.clipped_loss,
    "mix_grpo": policy_gradient.clipped_loss,
    "grpo_guard": policy_gradient.guard_loss,
    "flow_dppo": policy_gradient.divergence_loss,
    "gspo": policy_gradient.trajectory_loss,
    "diffusion_nft": forward_process.nft_loss,
    "dpo": preference.dpo_loss,
    "awm": forward_process.awm_loss,
}


def register_loss(name: str, family: str) -> Callable[[LossFunction], LossFunction]:
    """Decorator: make a function that returns an `ElementLoss` available as `loss_mode=name`.

    family: "policy_gradient" or "forward_process". Raises `LossError` when the name is taken or the family unknown.
    """
    if name in _LOSSES:
        raise LossError(f"name={name!r} is already a loss mode; choose another name")
    if family not in (POLICY_GRADIENT, FORWARD_PROCESS):
        raise unknown_name("family", family, (POLICY_GRADIENT, FORWARD_PROCESS))

    def add(function: LossFunction) -> LossFunction:
        _LOSSES[name] = function
        LOSS_MODES[name] = family
        return function

    return add


def known_losses() -> tuple[str, ...]:
    """The names that `loss_mode` accepts, sorted."""
    return tuple(sorted(_LOSSES))


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
    if config.loss_mode not in _LOSSES:
        raise unknown_name("loss_mode", config.loss_mode, _LOSSES)
    elements = _LOSSES[config.loss_mode](config, model_output, data)
    count = lookup(data, "global_count")
    if isinstance(count, Tensor):
        count = count.flatten()[0]
    return reduce_elements(elements, global_count=None if count is None else int(count), dp_group=dp_group)
