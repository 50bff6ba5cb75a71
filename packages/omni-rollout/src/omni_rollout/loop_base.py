"""What an agent loop is: requests in, chunks of finished samples out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from .config import DiffusionRolloutConfig
from .samples import Chunk
from .types import GenerationRequest, Kept

if TYPE_CHECKING:
    from tensordict import TensorDict
    from torch import Tensor

Score = tuple[float, dict[str, float], "str | None"]
"""Of a sample: score, components, and an error where it has none."""

Reward = Callable[[Sequence[GenerationRequest], Sequence[Any]], Awaitable[Sequence[Score]]]
"""`await reward(requests, pictures)` of a chunk; the pictures (or latents) are what `samples.pictures_of` gave."""


class Client(Protocol):
    """Where samples come from: a `Router` over replicas, or a trainer's own weights."""

    def stream(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Chunk]:
        """Draw all of them; chunks come as they are finished, each request in exactly one.

        A client may keep all but `samples.FACTS` and the pictures (see `samples.pictures_of`) to itself.
        """
        ...

    async def final_latents(self, samples: TensorDict) -> Sequence[Tensor | Kept]:
        """Clean latents […] of samples that it drew, or where they lie: for requests that begin from them."""
        ...


class DiffusionAgentLoop(ABC):
    """Base of all agent loops.

    Args:
        config: the rollout configuration.
        client: where samples come from.
        reward: the reward, for loops that judge between their turns; the final reward is asked for by the worker.
    """

    def __init__(self, config: DiffusionRolloutConfig, client: Client, reward: Reward | None = None) -> None:
        self.config, self.client, self.reward = config, client, reward

    @abstractmethod
    def run(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Chunk]:
        """Finished samples of the requests, in chunks; each request in exactly one. A loop may add keys of its own."""
