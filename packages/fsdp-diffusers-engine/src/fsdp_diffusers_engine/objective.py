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

from . import batch, losses, sharding
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

    steps_of: tuple[str, ...]
    """Keys of a micro-batch [b, W, …] of which a step's loss is given its own part, where they are there."""

    @abstractmethod
    def reads(self, config: DiffusionLossConfig) -> tuple[str, ...]:
        """What an update reads of a finished sample, beside its prompt and what `prepare` is given by the algorithm."""

    @abstractmethod
    def prepare(
        self, policy: Policy, data: TensorDict, config: DiffusionLossConfig | None, training: bool
    ) -> tuple[list[dict[str, Any]], int]:
        """Check a batch and cut it: (micro-batches, number of steps W that each is forwarded for)."""

    @abstractmethod
    def inputs(self, policy: Policy, micro_batch: Mapping[str, Any], step: int) -> dict[str, Any]:
        """Of one step: `latents` [b, …], `sigma` [b], and what `score` and `row` read beside them."""

    @abstractmethod
    def others(
        self, policy: Policy, micro_batch: Mapping[str, Any], step: int, config: DiffusionLossConfig
    ) -> dict[str, Tensor]:
        """What the loss reads of other policies at one step, without gradient."""

    @abstractmethod
    def score(self, inputs: Mapping[str, Any], velocity: Tensor, settings: SamplerSettings) -> dict[str, Tensor]:
        """What the loss reads of the policy at one step, `velocity` among it."""

    @abstractmethod
    def scores(self, inputs: Mapping[str, Any], output: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What a forward-only pass returns of one step, each [b] or [b, …]."""

    @abstractmethod
    def row(
        self, inputs: Mapping[str, Any], output: Mapping[str, Tensor], config: DiffusionLossConfig | None
    ) -> dict[str, Tensor]:
        """What the loss reads beside `others` and the micro-batch's own tensors."""

    def velocity(self, policy: Policy, micro_batch: Mapping[str, Any], inputs: Mapping[str, Any]) -> Tensor:
        """Of the policy state that is active."""
        prompts = micro_batch["cond"], micro_batch["negative"]
        return policy.velocity(inputs["latents"], inputs["sigma"], *prompts, micro_batch["settings"])

    def forward(
        self, policy: Policy, micro_batch: Mapping[str, Any], loss_function: LossFunction | None, step: int, steps: int
    ) -> tuple[Tensor | None, dict[str, Any]]:
        """One step of a micro-batch, or with `ALL_STEPS` all of its `steps` in one graph.

        Returns:
            (loss to differentiate, its metrics in the form that pools); without a loss function (None, scores of the step).
        """
        config = losses.config_of(loss_function)
        indices = range(steps) if step == ALL_STEPS else (step,)
        # Other policies go first: a full fine-tuning swaps weights for them, which no graph may be waiting for.
        rows = [{} if config is None else self.others(policy, micro_batch, index, config) for index in indices]
        outputs: list[dict[str, Any]] = []
        for index, row in zip(indices, rows, strict=True):
            inputs = self.inputs(policy, micro_batch, index)
            output = self.score(inputs, self.velocity(policy, micro_batch, inputs), micro_batch["settings"])
            if loss_function is None:
                return None, self.scores(inputs, output)
            wanted = (*self.steps_of, *losses.own_tensors(config))
            given = {key: micro_batch[key][:, index] for key in wanted if key in micro_batch}
            row |= {**given, **self.row(inputs, output, config), **row}
            outputs.append(output)
        assert loss_function is not None
        joined, row = (stack_steps(outputs), stack_steps(rows)) if step == ALL_STEPS else (outputs[0], rows[0])
        row = {**row, "global_count": micro_batch["global_count"]}
        result = loss_function(model_output=joined, data=row, dp_group=policy.layout.dp_group)
        return result.loss, dict(getattr(result, "statistics", None) or result.metrics)


def cut(
    layout: sharding.Layout,
    data: TensorDict,
    tensors: Mapping[str, Tensor],
    settings: SamplerSettings,
    counted: float,
    unit: int = 1,
) -> list[dict[str, Any]]:
    """Micro-batches of `micro_batch_size` samples (a multiple of `unit`), each with its prompts, the `settings` that drew it and
    the batch's `global_count`.

    `counted` is this rank's number of counted elements; the sum over ranks is used unless the batch brings its own.
    """
    count = batch.batch_size(tensors)
    size = int(batch.plain(data, "micro_batch_size", count))
    if size < 1 or size % unit:
        raise EngineError(f"micro_batch_size={size!r} must be a positive multiple of {unit}")
    total = batch.plain(data, "global_count")
    if total is None:
        total = sharding.all_reduce_number(counted, layout.dp_group)
    shared = {"global_count": max(int(total), 1), "settings": settings}
    return [
        {
            **micro,
            "cond": batch.prompts(micro, "", layout.sp_size),
            "negative": batch.prompts(micro, "negative_", layout.sp_size),
            **shared,
        }
        for micro in batch.micro_batches(tensors, size)
    ]


def stack_steps(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Per-step values [b, …] → [b, W, …]."""
    return {key: torch.stack([part[key] for part in parts], dim=1) for key in parts[0]}


def gather_outputs(outputs: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Join what a forward-only pass returned: each value [B, W] or [B, W, …]."""
    return {key: torch.cat([output[key] for output in outputs]) for key in outputs[0]}
