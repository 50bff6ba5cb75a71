"""What an objective is, and what both kinds share: micro-batches, steps, ranks.

A micro-batch is a slice of samples; a step is one trained step of a trajectory, or one noise level of a forward process.
Each (micro-batch, step) is one forward and one backward, unless the loss looks at a sample's steps together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from . import batch, sharding
from .errors import EngineError

if TYPE_CHECKING:
    from diffusion_losses.config import DiffusionLossConfig
    from model_specs import PromptEmbeds
    from sde_samplers.settings import SamplerSettings
    from tensordict import TensorDict

    from .config import DiffusionModelConfig

LossFunction = Callable[..., Any]
"""`f(model_output=…, data=…, dp_group=…)`; see `losses.DiffusionLoss`."""

ALL_STEPS = -1
"""`step` of a forward that covers all of a micro-batch's steps in one graph."""


class Policy(Protocol):
    """What an objective uses of an engine."""

    device: torch.device
    layout: sharding.Layout
    model_config: DiffusionModelConfig

    def velocity(
        self,
        latents: Tensor,
        sigma: Tensor,
        cond: PromptEmbeds,
        negative: PromptEmbeds | None,
        settings: SamplerSettings,
    ) -> Tensor:
        """Of the policy state that is active, [B, …] fp32."""

    def use_adapter(self, name: str) -> AbstractContextManager[None]:
        """Make the policy state `name` active."""


class Objective(ABC):
    """How a batch is prepared and scored. It holds no weights and no state, and is told whose policy it scores."""

    @abstractmethod
    def reads(self, config: DiffusionLossConfig) -> tuple[str, ...]:
        """What an update reads of a finished sample, beside its prompt and what `prepare` is given by the algorithm."""

    @abstractmethod
    def prepare(
        self, policy: Policy, data: TensorDict, config: DiffusionLossConfig | None, training: bool
    ) -> tuple[list[dict[str, Any]], int]:
        """Check a batch and cut it: (micro-batches, number of steps that each is forwarded for)."""

    @abstractmethod
    def forward(
        self,
        policy: Policy,
        micro_batch: Mapping[str, Any],
        loss_function: LossFunction | None,
        forward_only: bool,
        step: int,
    ) -> tuple[Tensor | None, dict[str, Any]]:
        """One forward and its loss: (loss to differentiate or None, metrics or scores)."""


def cut(
    layout: sharding.Layout, data: TensorDict, tensors: Mapping[str, Tensor], counted: float, unit: int = 1
) -> list[dict[str, Any]]:
    """Micro-batches of `micro_batch_size` samples (a multiple of `unit`), each with the batch's `global_count`.

    `counted` is this rank's number of counted elements; the sum over ranks is used unless the batch brings its own.
    """
    count = batch.batch_size(tensors)
    size = int(batch.plain(data, "micro_batch_size", count))
    if size < 1 or size % unit:
        raise EngineError(f"micro_batch_size={size!r} must be a positive multiple of {unit}")
    total = batch.plain(data, "global_count")
    if total is None:
        total = sharding.all_reduce_number(counted, layout.dp_group)
    return [
        {**batch.with_prompts(micro, layout.sp_size), "global_count": max(int(total), 1)}
        for micro in batch.micro_batches(tensors, size)
    ]


def apply_loss(
    layout: sharding.Layout,
    loss_function: LossFunction | None,
    outputs: list[dict[str, Any]],
    rows: list[dict[str, Any]],
    micro: Mapping[str, Any],
    step: int,
) -> tuple[Tensor, dict[str, Any]]:
    """The loss over one step [b], or over all of them [b, W]: (loss, metrics in the form that pools)."""
    assert loss_function is not None
    joint = step == ALL_STEPS
    output, row = (stack_steps(outputs), stack_steps(rows)) if joint else (outputs[0], rows[0])
    row = {**row, "global_count": micro["global_count"]}
    result = loss_function(model_output=output, data=row, dp_group=layout.dp_group)
    return result.loss, dict(getattr(result, "statistics", None) or result.metrics)


def stack_steps(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Per-step values [b, …] → [b, W, …]."""
    return {key: torch.stack([part[key] for part in parts], dim=1) for key in parts[0]}


def gather_outputs(outputs: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Join what a forward-only pass returned: each value [B, W] or [B, W, …]."""
    return {key: torch.cat([output[key] for output in outputs]) for key in outputs[0]}
