"""The agent loop: requests in, a batch of scored samples out.

Samples come back in chunks, as they are drawn; the reward of each is asked for the moment its chunk is there, while the others
are still being drawn.

Shapes: B sample; the keys of a batch are those of `samples`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from .config import DiffusionRolloutConfig
from .loop_base import Client, DiffusionAgentLoop, Reward
from .loops import get_agent_loop
from .samples import Chunk, in_order, pictures_of
from .types import GenerationRequest

if TYPE_CHECKING:
    from tensordict import TensorDict


class DiffusionSingleTurnAgentLoop(DiffusionAgentLoop):
    """One prompt, one sample."""

    def run(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Chunk]:
        """See `DiffusionAgentLoop.run`."""
        return self.client.stream(requests)


class DiffusionAgentLoopWorker:
    """Runs an agent loop and asks for rewards.

    Args:
        config: says which loop.
        client: where samples come from.
        reward: see `Reward`; None leaves `rm_scores` out.
    """

    def __init__(self, config: DiffusionRolloutConfig, client: Client, reward: Reward | None = None) -> None:
        self.reward = reward
        self.loop = get_agent_loop(config.agent.default_agent_loop)(config, client, reward)

    async def generate_sequences(self, requests: Sequence[GenerationRequest]) -> TensorDict:
        """Draw and score every request.

        Returns:
            TensorDict [B] in the order of the requests: keys of `samples` that the client hands out; seed, index int64 [B];
            uid, prompt, metadata and settings as lists; with a reward also rm_scores fp32 [B, 1], and `reward_components` and
            `reward_errors` as lists.

        Raises:
            RolloutError: a sample could not be drawn; the others are cancelled, none is dropped in silence.
        """
        chunks: list[Chunk] = []
        scoring: dict[int, asyncio.Task[tuple[float, dict[str, float], str | None]]] = {}
        try:
            async for places, samples in self.loop.run(requests):
                chunks.append((places, samples))
                if self.reward is not None:
                    for place, picture in zip(places, pictures_of(samples), strict=True):
                        scoring[place] = asyncio.ensure_future(self._score(requests[place], picture))
                for task in scoring.values():
                    if task.done():
                        task.result()  # a reward that failed ends the drawing too
            await asyncio.gather(*scoring.values())
        except BaseException:
            for task in scoring.values():
                task.cancel()
            await asyncio.gather(*scoring.values(), return_exceptions=True)
            raise
        batch = in_order(chunks)
        _describe(batch, requests)
        if self.reward is not None:
            _add_scores(batch, [scoring[place].result() for place in range(len(requests))])
        return batch

    async def _score(self, request: GenerationRequest, picture: Any) -> tuple[float, dict[str, float], str | None]:
        assert self.reward is not None
        return await self.reward(picture, request.prompt, request.metadata, request.uid, request.index)


def _describe(batch: TensorDict, requests: Sequence[GenerationRequest]) -> None:
    import torch
    from tensordict import NonTensorStack

    batch["seed"] = torch.tensor([request.seed for request in requests])
    batch["index"] = torch.tensor([request.index for request in requests])
    batch["uid"] = NonTensorStack(*(request.uid for request in requests))
    batch["prompt"] = NonTensorStack(*(request.prompt for request in requests))
    batch["metadata"] = NonTensorStack(*(dict(request.metadata) for request in requests))
    batch["settings"] = NonTensorStack(*(request.settings for request in requests))


def _add_scores(batch: TensorDict, results: Sequence[tuple[float, dict[str, float], str | None]]) -> None:
    import torch
    from tensordict import NonTensorStack

    batch["rm_scores"] = torch.tensor([score for score, _, _ in results], dtype=torch.float32).unsqueeze(-1)
    batch["reward_components"] = NonTensorStack(*(components for _, components, _ in results))
    batch["reward_errors"] = NonTensorStack(*(error for _, _, error in results))
