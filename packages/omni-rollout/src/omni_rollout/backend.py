"""The one protocol that every rollout backend follows, and what a health check returns.

All methods are synchronous and may block: a backend runs inside an actor or a worker thread, replicas talk to it from
the driver's event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from lora_sync import WeightBucket, WeightReceipt
from torch import Tensor

from .samples import Chunk
from .types import GenerationRequest

if TYPE_CHECKING:
    from lora_sync.transport import Link
    from tensordict import TensorDict


@dataclass(frozen=True)
class Health:
    """What a backend says about itself. Only plain values, so it crosses processes as JSON."""

    state: str
    policy_version: int
    in_flight: int
    generated: int
    """Samples finished since the start."""
    batches: dict[int, int] = field(default_factory=dict)
    """Histogram: batch size → number of transformer batches of that size."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Time spent per phase (encode, denoise, decode, sync)."""


@runtime_checkable
class RolloutBackend(Protocol):
    """A policy that can be sampled from."""

    @property
    def policy_version(self) -> int:
        """Version of the weights that sample now."""
        ...

    def generate(self, requests: Sequence[GenerationRequest]) -> TensorDict:
        """Their samples, in order; see `samples` for the keys. Raises `LifecycleError` unless the backend is ready."""
        ...

    def draw(
        self, requests: Sequence[GenerationRequest], owners: Sequence[int] = (), *latents: np.ndarray
    ) -> tuple[Any, ...]:
        """The same in parts, see `samples.parted`: a caller in another process need not fetch all of them, nor hold the latents
        that the requests begin from, see `kept.by_number`."""
        ...

    def update_lora(self, payload: Any, adapter: str = "default") -> Any:
        """Bind a `lora_sync.LoRAPayload`; returns its `LoRAReceipt`."""
        ...

    def remove_lora(self, adapter: str = "default") -> bool:
        """Forget an adapter; "default" then samples from the base. False when it was not there."""
        ...

    def update_weights(self, named: Iterable[tuple[str, Tensor]], version: int) -> WeightReceipt:
        """Replace transformer weights by name; raises `SyncError` unless every tensor was sent and bound."""
        ...

    def update_weights_bucket(self, bucket: WeightBucket) -> WeightReceipt | None:
        """The same, a message of `lora_sync.WeightStream` at a time; the receipt comes with the last."""
        ...

    def receive_weights(self, link: Link, number: int) -> WeightReceipt:
        """The same, as receiver `number` of what a trainer sends through a link."""
        ...

    def release_memory(self) -> None:
        """Give back what the last samples used on the device; weights stay."""
        ...

    def sleep(self) -> None:
        """Give the device's memory back."""
        ...

    def wake_up(self) -> None:
        """Bring the weights back."""
        ...

    def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """Cancel requests (all of them for None). Returns how many were still in flight."""
        ...

    def health(self) -> Health:
        """State and counters; never blocks on generation."""
        ...


class BackendClient:
    """A backend in this process as a client of agent loops, for programs without Ray; it draws in a thread.

    Args:
        backend: draws.
        batch_size: samples that come back together.
    """

    def __init__(self, backend: RolloutBackend, batch_size: int = 64) -> None:
        self.backend, self.batch_size = backend, batch_size

    async def stream(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Chunk]:
        """See `loop_base.Client`."""
        for start in range(0, len(requests), self.batch_size):
            places = list(range(start, min(start + self.batch_size, len(requests))))
            yield places, await asyncio.to_thread(self.backend.generate, [requests[place] for place in places])

    async def final_latents(self, samples: TensorDict) -> Sequence[Tensor]:
        """See `loop_base.Client`."""
        return list(samples["final_latents"])
