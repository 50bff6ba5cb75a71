"""One copy of the policy in a process of its own, seen from the driver."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from lora_sync import WeightReceipt, stream_weights
from torch import Tensor

from .backend import Health, RolloutBackend
from .errors import ReplicaDeadError, RolloutConfigError
from .kept import by_number
from .remote import Remote
from .types import GenerationRequest

if TYPE_CHECKING:
    from lora_sync.one_copy import Layout, Loan
    from lora_sync.transport import Link
    from tensordict import TensorDict

Lend = Callable[["Mapping[str, Layout]"], Awaitable["tuple[dict[str, Loan], dict[str, dict[str, Loan]]]"]]
"""A trainer's answer to how a replica lays its weights out: frozen weights, and adapters by name; see `lora_sync.one_copy`."""


class Replica(ABC):
    """What the router and the fleet need from a replica, whichever backend is behind it.

    Attributes:
        name: shown in errors and metrics.
        batch_size: requests that one call should hold.
    """

    name: str
    batch_size: int
    remote: Remote | None

    @property
    def backend(self) -> Remote:
        """The object behind this replica. Raises `ReplicaDeadError` when it is not running."""
        if self.remote is None:
            raise ReplicaDeadError(f"{self.name} is not running: it was closed, or never launched.")
        return self.remote

    async def generate(self, requests: Sequence[GenerationRequest]) -> TensorDict:
        """Samples, in order; see `samples` for the keys.

        Raises `ReplicaError` for a failure of the replica, `RolloutConfigError` for a bad request.
        """
        return await self.backend.call(RolloutBackend.generate, requests)

    async def draw(
        self, requests: Sequence[GenerationRequest], owners: Sequence[int]
    ) -> tuple[dict[str, np.ndarray], Any, dict[int, Any]]:
        """The same, of which only the facts come here: (facts, reference to what is shown, each owner's to its `Rows`)."""
        known = sorted(set(owners))
        bare, latents = by_number(requests)
        parts = await self.backend.parts(RolloutBackend.draw, bare, owners, *latents, returns=2 + len(known))
        return parts[0], parts[1], dict(zip(known, parts[2:], strict=True))

    async def update_lora(self, payload: Any, adapter: str = "default") -> Any:
        """Bind a `LoRAPayload`, or the one that a Ray reference stands for; returns its `LoRAReceipt`."""
        return await self.backend.call(RolloutBackend.update_lora, payload, adapter)

    async def update_weights(self, named: Iterable[tuple[str, Tensor]], version: int) -> WeightReceipt:
        """Replace all transformer weights by tensors of this process, bucket by bucket."""
        for bucket in stream_weights(named, version=version):
            receipt = await self.update_weights_bucket(bucket)
        assert receipt is not None  # of the last one
        return receipt

    async def update_weights_bucket(self, bucket: Any) -> WeightReceipt | None:
        """One `WeightBucket` of all transformer weights, or the one that a Ray reference stands for; a receipt after the last."""
        return await self.backend.call(RolloutBackend.update_weights_bucket, bucket)

    async def receive_weights(self, link: Link, number: int) -> WeightReceipt:
        """All transformer weights, through a link to the trainer."""
        return await self.backend.call(RolloutBackend.receive_weights, link, number)

    async def borrow_base(self, lend: Lend) -> tuple[int, int]:
        """Sample with a trainer's frozen weights in the place of a copy; (bytes shared, of all), none where a kind cannot."""
        return 0, 0

    async def release_memory(self) -> None:
        """Give back what the last samples used on the device; weights stay."""
        await self.backend.call(RolloutBackend.release_memory)

    async def sleep(self) -> None:
        """Give the device's memory back."""
        await self.backend.call(RolloutBackend.sleep)

    async def wake_up(self) -> None:
        """Bring the weights back."""
        await self.backend.call(RolloutBackend.wake_up)

    async def health(self) -> Health:
        """State and counters."""
        return await self.backend.aside(RolloutBackend.health)

    async def abort(self, request_ids: Sequence[str]) -> int:
        """Cancel requests; returns how many were in flight."""
        return await self.backend.aside(RolloutBackend.abort, list(request_ids))

    @abstractmethod
    async def close(self) -> None:
        """End the process. Nothing happens when it is gone already."""


class DiffusersReplica(Replica):
    """A `HostedDiffusersBackend` in a Ray actor. Args: its handle, the most samples of one batch, a name."""

    def __init__(self, actor: Any, batch_size: int = 64, name: str = "diffusers-0") -> None:
        if batch_size < 1:
            raise RolloutConfigError(f"batch_size={batch_size!r} must be at least 1.")
        self.remote, self.batch_size, self.name = Remote(actor, name), batch_size, name

    async def close(self) -> None:
        """End the process."""
        from .placement import import_ray

        remote, self.remote = self.remote, None
        if remote is not None:
            import_ray().kill(remote.actor)
