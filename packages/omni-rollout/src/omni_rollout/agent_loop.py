"""The agent loop: a batch of prompts in, a batch of scored samples out.

Each row of the batch is one asyncio task: draw the sample, ask for its reward the moment it is there, and collect.
Agent loops are registered by name; a row may name its own.

Shapes: B sample, W window step, K denoising step, S prompt token, C H W T pixels, "…" the model's latent layout.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
from torch import Tensor

from .collate import collate, column
from .config import DiffusionRolloutConfig
from .errors import RolloutConfigError, RolloutError
from .sampling import resolve_sampling
from .types import DiffusionOutput, GenerationRequest

if TYPE_CHECKING:
    from tensordict import TensorDict

#: `await reward(image uint8 [C,H,W] | [T,C,H,W], prompt, metadata, uid, index) -> (score, components, error or None)`
Reward = Callable[
    [np.ndarray, str, Mapping[str, Any], str, int], Awaitable[tuple[float, dict[str, float], "str | None"]]
]


class Client(Protocol):
    """Where samples come from: a `Router`, or one replica."""

    async def generate(self, request: GenerationRequest) -> DiffusionOutput:
        """One sample."""
        ...


@dataclass
class DiffusionAgentLoopOutput:
    """What one run of an agent loop hands back."""

    prompt_ids: list[int]
    """Token ids of the prompt; empty when the backend takes text."""
    response_diffusion_output: Tensor
    """uint8 [C, H, W] or [T, C, H, W]."""
    response_logprobs: Tensor | None = None
    """fp32 [W]."""
    reward_score: float | None = None
    num_turns: int = 1
    metrics: dict[str, float] = field(default_factory=dict)
    extra_fields: dict[str, Any] = field(default_factory=dict)
    """Trajectory fields of `DiffusionOutput`, and whatever the loop adds."""


class DiffusionAgentLoop(ABC):
    """Base of all agent loops: one instance serves all rows of a batch.

    Args:
        config: the rollout configuration.
        llm_client: where samples come from.
        reward: the reward, for loops that judge between their turns; the final reward is asked for by the worker.
        tokenizer: prompt → token ids, for backends that take tokens.
    """

    def __init__(
        self,
        config: DiffusionRolloutConfig,
        llm_client: Client,
        reward: Reward | None = None,
        tokenizer: Callable[[str], list[int]] | None = None,
    ) -> None:
        self.config, self.client, self.reward, self.tokenizer = config, llm_client, reward, tokenizer

    @abstractmethod
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> DiffusionAgentLoopOutput:
        """Draw one sample. `kwargs`: raw_prompt, raw_negative_prompt, uid, index, seed, metadata, request_id."""

    def make_request(self, sampling_params: Mapping[str, Any], **kwargs: Any) -> GenerationRequest:
        """The request of one turn."""
        prompt = kwargs["raw_prompt"]
        negative = kwargs.get("raw_negative_prompt")
        if negative is None and sampling_params["true_cfg_scale"] > 1:
            negative = self.config.pipeline.negative_prompt
        return GenerationRequest(
            request_id=kwargs["request_id"],
            uid=kwargs["uid"],
            index=kwargs["index"],
            prompt=prompt,
            negative_prompt=negative,
            seed=kwargs["seed"],
            metadata=kwargs.get("metadata") or {},
            prompt_ids=tuple(self.tokenizer(prompt)) if self.tokenizer else None,
            **sampling_params,
        )


_REGISTRY: dict[str, type[DiffusionAgentLoop]] = {}
_Loop = TypeVar("_Loop", bound=type[DiffusionAgentLoop])


def register(name: str) -> Callable[[_Loop], _Loop]:
    """Class decorator that makes an agent loop known under `name`."""

    def add(cls: _Loop) -> _Loop:
        if _REGISTRY.setdefault(name, cls) is not cls:
            raise RolloutConfigError(f"agent loop {name!r} is registered already, by {_REGISTRY[name].__qualname__}.")
        return cls

    return add


def get_agent_loop(name: str) -> type[DiffusionAgentLoop]:
    """The agent loop registered under `name`."""
    from . import edit_loop  # noqa: F401 - registers itself

    if name not in _REGISTRY:
        raise RolloutConfigError(f"agent loop {name!r} is not registered; known are {', '.join(sorted(_REGISTRY))}.")
    return _REGISTRY[name]


@register("diffusion_single_turn_agent")
class DiffusionSingleTurnAgentLoop(DiffusionAgentLoop):
    """One prompt, one sample."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> DiffusionAgentLoopOutput:
        """See `DiffusionAgentLoop.run`."""
        start = time.perf_counter()
        request = self.make_request(sampling_params, **kwargs)
        return as_loop_output(request, await self.client.generate(request), time.perf_counter() - start)


def as_loop_output(request: GenerationRequest, output: DiffusionOutput, seconds: float) -> DiffusionAgentLoopOutput:
    """Wrap a finished sample; an aborted one raises `RolloutError`, since a batch with holes cannot be trained on."""
    if output.diffusion_output is None:
        raise RolloutError(
            f"request {request.request_id!r} was {output.stop_reason or 'dropped'}: the batch is incomplete."
        )
    metrics = {
        "generate_s": seconds,
        "num_preempted": float(output.num_preempted or 0),
        "batch_size": float(output.extra_fields.get("batch_size", 1)),
    }
    return DiffusionAgentLoopOutput(
        prompt_ids=list(request.prompt_ids or ()),
        response_diffusion_output=output.diffusion_output,
        response_logprobs=output.log_probs,
        metrics=metrics,
        extra_fields=dict(output.extra_fields),
    )


class DiffusionAgentLoopWorker:
    """Runs agent loops over a batch.

    Args:
        config: `DiffusionRolloutConfig`.
        llm_client: router or replica.
        reward_loop: the reward callable (see `Reward`); None leaves `rm_scores` out.
        tokenizer: for backends that take tokens.
    """

    def __init__(
        self,
        config: DiffusionRolloutConfig,
        llm_client: Client,
        reward_loop: Reward | None = None,
        tokenizer: Callable[[str], list[int]] | None = None,
    ) -> None:
        self.config, self.client, self.reward = config, llm_client, reward_loop
        self._tokenizer = tokenizer
        self._loops: dict[str, DiffusionAgentLoop] = {}
        self._name, self._calls = uuid.uuid4().hex[:8], 0

    async def generate_sequences(self, batch: TensorDict) -> TensorDict:
        """Draw and score every row.

        Args:
            batch: per row `uid`, `prompt`, and optionally `negative_prompt`, `metadata`, `index` (number within the
                group, else counted per uid), `seed`, `agent_name`. On the batch: `sampling` (overrides of the
                configured sampling, or {} ), `validate` (bool), `training_step` (int).

        Returns:
            TensorDict [B]: responses uint8 [B,C,H,W] | [B,T,C,H,W]; rm_scores [B,1], `reward_components` and
            `reward_errors` with a reward; latents, next_latents [B,W,…], step_index [B,W], rollout_log_probs [B,W],
            std [B,W] with a window; sigmas [B, steps taken + 1], forwards [B] (rows of the transformer that a sample
            cost), final_latents [B,…], prompt_embeds [B,S,C] with its mask (padded at the right to the longest),
            policy_version, seed, num_turns [B]; uid, prompt, metadata, schedule_hash as lists; `metrics` (list of dicts)
            and `reward_extra_keys` on the batch.

        Raises:
            RolloutError: a sample could not be drawn; the others are cancelled, none is dropped in silence.
        """
        rows = self._rows(batch)
        tasks = [asyncio.ensure_future(self._run_agent_loop(**row)) for row in rows]
        try:
            outputs = await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        return collate(rows, outputs, with_rewards=self.reward is not None)

    def _rows(self, batch: TensorDict) -> list[dict[str, Any]]:
        size = int(batch.batch_size[0])
        self._calls += 1
        validate = bool(column(batch, "validate", False))
        sampling = resolve_sampling(
            self.config,
            column(batch, "sampling", {}),
            training_step=int(column(batch, "training_step", 0)),
            validate=validate,
        )
        base_seed = self.config.val_kwargs.seed if validate else (self.config.seed or 0)
        uids, prompts = column(batch, "uid"), column(batch, "prompt")
        negatives = column(batch, "negative_prompt", [None] * size)
        pipeline = (self.config.val_kwargs if validate else self.config).pipeline
        negative = pipeline.negative_prompt if sampling["true_cfg_scale"] > 1 else None
        metadata = column(batch, "metadata", [{}] * size)
        seeds = column(batch, "seed", [base_seed] * size)
        names = column(batch, "agent_name", [self.config.agent.default_agent_loop] * size)
        counted: Counter[str] = Counter()
        indices = column(batch, "index", None)
        rows = []
        for i in range(size):
            uid = str(uids[i])
            index = counted[uid] if indices is None else int(indices[i])
            counted[uid] += 1
            rows.append(
                {
                    "agent_name": names[i],
                    "sampling_params": sampling,
                    "request_id": f"{self._name}-{self._calls}-{i}",
                    "uid": uid,
                    "index": index,
                    "seed": int(seeds[i]),
                    "raw_prompt": prompts[i],
                    "raw_negative_prompt": negative if negatives[i] is None else negatives[i],
                    "metadata": metadata[i] or {},
                }
            )
        return rows

    async def _run_agent_loop(
        self, sampling_params: dict[str, Any], *, agent_name: str, **kwargs: Any
    ) -> DiffusionAgentLoopOutput:
        if agent_name not in self._loops:
            cls = get_agent_loop(agent_name)
            self._loops[agent_name] = cls(self.config, self.client, self.reward, self._tokenizer)
        output = await self._loops[agent_name].run(dict(sampling_params), **kwargs)
        if self.reward is not None:
            start = time.perf_counter()
            await self._compute_score(output, **kwargs)
            output.metrics["reward_s"] = time.perf_counter() - start
        return output

    async def _compute_score(self, output: DiffusionAgentLoopOutput, **kwargs: Any) -> None:
        assert self.reward is not None
        picture = output.response_diffusion_output.numpy()
        score, components, error = await self.reward(
            picture, kwargs["raw_prompt"], kwargs["metadata"], kwargs["uid"], kwargs["index"]
        )
        output.reward_score = float(score)
        output.extra_fields["reward_components"] = dict(components)
        output.extra_fields["reward_error"] = error
