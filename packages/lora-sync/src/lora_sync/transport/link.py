"""How a sender and its receivers find each other: plain values, so that a third process can tell all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from .base import Transport
from .broadcast import BroadcastTransport, join_group
from .shared_memory import SharedMemoryTransport


@dataclass(frozen=True)
class Link:
    """One channel from one sender to some receivers.

    Args:
        kind: `shared_memory`: processes of one host; `nccl`: a broadcast between cards (over gloo where they compute on CPUs).
        place: a word of its own (shared memory), or the sender's `host:port`.
        readers: how many receivers there are.
    """

    kind: Literal["shared_memory", "nccl"]
    place: str
    readers: int

    def sender(self, device: str | torch.device) -> Transport:
        """The sender's end; `device` is where its tensors lie. A broadcast waits for the receivers."""
        if self.kind == "shared_memory":
            return SharedMemoryTransport(self.place, "sender", readers=self.readers)
        return self._broadcast(0, device)

    def receiver(self, number: int, device: str | torch.device) -> Transport:
        """The end of receiver `number`, from 0; tensors arrive on `device`."""
        if self.kind == "shared_memory":
            return SharedMemoryTransport(self.place, "receiver", device=device)
        return self._broadcast(number + 1, device)

    def _broadcast(self, rank: int, device: str | torch.device) -> Transport:
        where = torch.empty(0, device=device).device
        return BroadcastTransport(group=join_group(self.place, rank, self.readers + 1, device=where), device=where)
