"""The agent loop: requests in, a batch of scored samples out.

Samples come back in chunks, as they are drawn; the rewards of a chunk are asked for the moment it is there, while the others are
still being drawn.

Shapes: B sample; the keys of a batch are those of `samples`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from .config import DiffusionRolloutConfig
from .loop_base import Client, DiffusionAgentLoop, Reward, Score
from .loops import get_agent_loop
from .samples import Chunk, column, in_order, pictures_of
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
        return await (await self.draw(requests)).scored()

    async def draw(self, requests: Sequence[GenerationRequest]) -> Drawn:
        """`generate_sequences` in two parts: this returns when all is drawn, `Drawn.scored` when all is scored too."""
        chunks: list[Chunk] = []
        scoring: list[Scoring] = []  # of each chunk
        try:
            async for places, samples in self.loop.run(requests):
                chunks.append((places, samples))
                if self.reward is not None:
                    asked = [requests[place] for place in places]
                    scoring.append(asyncio.ensure_future(self.reward(asked, pictures_of(samples))))
                for task in scoring:
                    if task.done():
                        task.result()  # a reward that failed ends the drawing too
        except BaseException:
            await cancel(scoring)
            raise
        batch = in_order(chunks)
        describe(batch, requests)
        return Drawn(batch, [places for places, _ in chunks], scoring)


Scoring = asyncio.Future[Sequence[Score]]


class Drawn:
    """Samples whose scores may still be on their way.

    Args:
        batch: the samples.
        places: rows of each chunk in which the scores come.
        scoring: a task for each chunk; none where the samples are scored already, or shall not be.
    """

    def __init__(self, batch: TensorDict, places: Sequence[list[int]] = (), scoring: Sequence[Scoring] = ()) -> None:
        self.batch, self._places, self._scoring = batch, places, scoring

    async def scored(self) -> TensorDict:
        """The batch with its scores, once all are there. Raises what a reward raised; the others are cancelled."""
        if self._scoring:
            try:
                scores = await asyncio.gather(*self._scoring)
            except BaseException:
                await self.cancel()
                raise
            found = {
                place: one
                for places, part in zip(self._places, scores, strict=True)
                for place, one in zip(places, part, strict=True)
            }
            _add_scores(self.batch, [found[place] for place in range(len(self.batch))])
            self._scoring = ()
        return self.batch

    async def cancel(self) -> None:
        """Nobody wants the scores any more."""
        await cancel(self._scoring)


async def cancel(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel tasks and wait until they have ended, however they end."""
    ended = list(tasks)
    for task in ended:
        task.cancel()
    await asyncio.gather(*ended, return_exceptions=True)


def describe(batch: TensorDict, requests: Sequence[GenerationRequest]) -> None:
    """Put what the requests of the rows say into a batch: seed, index, uid, prompt, metadata and settings."""
    import torch

    batch["seed"] = torch.tensor([request.seed for request in requests])
    batch["index"] = torch.tensor([request.index for request in requests])
    for name in ("uid", "prompt", "metadata", "settings"):
        batch[name] = column([getattr(request, name) for request in requests])


def _add_scores(batch: TensorDict, results: Sequence[Score]) -> None:
    import torch

    batch["rm_scores"] = torch.tensor([score for score, _, _ in results], dtype=torch.float32).unsqueeze(-1)
    batch["reward_components"] = column([components for _, components, _ in results])
    batch["reward_errors"] = column([error for _, _, error in results])
