"""Trainers and samplers on cards of their own: `torch.distributed` broadcast of every tensor, over NCCL or gloo.

One rank of the group sends, all others receive. The header goes first, and every receiver says whether it has room. The tensors
follow, and every receiver says whether its hash is right; `send` raises when one is not. After a timeout the group is in an
unknown state: leave it.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import LoRASyncError, TransportError
from ..host import as_tensor, flat_bytes
from ..message import Message, parse_header
from .base import DEFAULT_TIMEOUT, Deadline, Transport

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_NEVER = timedelta(days=365)
"""A group's own timeout ends the process, under NCCL; messages have deadlines that raise."""


def join_group(
    address: str, rank: int, size: int, *, device: str | torch.device = "cuda", timeout: float = DEFAULT_TIMEOUT
) -> ProcessGroup:
    """A process group beside others, such as an engine's own. All `size` processes call it.

    Args:
        address: `host:port` on which rank 0 listens, as long as it holds the group. After a failure join anew at
            another port.
        rank, size: this process's number in the group, from 0, and how many there are.
        device: `"cuda"` (this process's current card) speaks NCCL, one card per rank; `"cpu"` speaks gloo.
        timeout: seconds to wait for the others. Messages later have deadlines of their own.

    Raises `TransportError` when they do not come.
    """
    import torch.distributed as dist

    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise TransportError(f"address={address!r} must be host:port, where rank 0 listens.")
    if not 0 <= rank < size:
        raise TransportError(f"rank={rank!r} must be from 0 to {size - 1}, for size={size!r}.")
    deadline = Deadline(timeout, f"waiting as rank {rank} of {size} for the group at {address}")
    make: Any = dist.ProcessGroupNCCL if torch.device(device).type == "cuda" else dist.ProcessGroupGloo
    try:
        store = dist.TCPStore(host, int(port), size, is_master=rank == 0, timeout=timedelta(seconds=timeout))
        for other in range(size):  # before the group: it would wait for them by a deadline that no one set
            store.set(f"rank {rank}", "here") if other == rank else store.wait([f"rank {other}"])
        group: ProcessGroup = make(dist.PrefixStore("lora_sync", store), rank, size, _NEVER)
        hello = group.allreduce(torch.zeros(1, device=device))  # NCCL connects at its first message
        while not hello.is_completed():
            deadline.check()
            time.sleep(1e-3)
        hello.wait()
    except (RuntimeError, ValueError) as error:  # torch's DistError is a RuntimeError
        raise TransportError(f"{deadline.doing}: it could not be joined ({error}).") from error
    return group


class BroadcastTransport(Transport):
    """Collective transport: all ranks of `group` call their half in the same order.

    Args:
        source: rank of the group that sends.
        group: process group, default the world; one of `join_group`'s, or any other.
        device: where the tensors travel and arrive: `"cuda"` for NCCL, `"cpu"` for gloo.
    """

    def __init__(
        self, source: int = 0, *, group: ProcessGroup | None = None, device: str | torch.device | None = None
    ) -> None:
        import torch.distributed as dist

        if group is None and not dist.is_initialized():
            raise TransportError("torch.distributed is not initialised; call init_process_group first, or join_group.")
        world: Any = dist.group.WORLD
        self._group = world if group is None else group
        if not hasattr(self._group, "rank"):
            raise TransportError(f"group={group!r} is no process group of which this process is a member.")
        if not 0 <= source < self._group.size():
            raise TransportError(f"source={source!r} must be a rank of the group, from 0 to {self._group.size() - 1}.")
        if device is None:
            device = torch.device("cuda", torch.cuda.current_device()) if self._group.name() == "nccl" else "cpu"
        self.device, self._source, self._broken = torch.device(device), source, False

    def send(self, message: Message, *, timeout: float = DEFAULT_TIMEOUT) -> None:
        if self._group.rank() != self._source:
            raise TransportError(f"rank {self._group.rank()} receives; rank {self._source} sends.")
        deadline = Deadline(timeout, f"broadcasting version {message.version}")
        data = message.header()
        header = as_tensor(bytearray(data)).to(self.device)
        self._broadcast([torch.tensor([len(header)], device=self.device)], deadline)
        self._broadcast([header], deadline)
        if short := self._failures(None, deadline):
            raise TransportError(
                f"version {message.version}: {short} receiver(s) have no room for {message.nbytes} bytes."
            )
        self._broadcast([message.tensors[spec.name].to(self.device) for spec in parse_header(data)[1]], deadline)
        if wrong := self._failures(None, deadline):
            raise TransportError(
                f"version {message.version}: {wrong} receiver(s) got bytes that do not match the hash. Were the tensors "
                "changed while they were sent (extract with copy=True)? Send again."
            )

    def receive(self, *, timeout: float = DEFAULT_TIMEOUT, check: bool = True) -> Message:
        deadline = Deadline(timeout, f"receiving a broadcast from rank {self._source}")
        size = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._broadcast([size], deadline)
        header = torch.empty(int(size), dtype=torch.uint8, device=self.device)
        self._broadcast([header], deadline)
        meta, specs = parse_header(header.cpu().numpy().tobytes())
        failure: Exception | None = None
        try:
            tensors = {spec.name: torch.empty(spec.shape, dtype=spec.dtype, device=self.device) for spec in specs}
        except (MemoryError, RuntimeError) as error:  # torch's OutOfMemoryError is a RuntimeError
            failure = error
        short = self._failures(failure, deadline)
        if failure is not None:
            raise failure
        if short:
            raise TransportError(f"{deadline.doing}: {short} other receiver(s) have no room for it.")
        self._broadcast(list(tensors.values()), deadline)
        try:
            message = Message.restore(tensors, meta, "broadcast", check=check)
        except LoRASyncError as error:
            self._failures(error, deadline)
            raise
        self._failures(None, deadline)
        return message

    def _failures(self, mine: Exception | None, deadline: Deadline) -> int:
        """How many ranks of the group failed; all of them call it."""
        votes = torch.tensor([int(mine is not None)], device=self.device)
        self._finish(self._group.allreduce(votes), deadline)
        return int(votes)

    def _broadcast(self, tensors: list[Tensor], deadline: Deadline) -> None:
        """Send, or receive into, contiguous tensors; all are on their way before the first is waited for."""
        if self._broken:
            raise TransportError(
                "an earlier broadcast did not finish, so this group is in an unknown state; make a new one."
            )
        flat = [flat_bytes(tensor) for tensor in tensors if tensor.numel()]
        for work in [self._group.broadcast(data, self._source) for data in flat]:
            self._finish(work, deadline)

    def _finish(self, work: Any, deadline: Deadline) -> None:
        """Wait with a deadline of our own: a group's timeout would end the process."""
        try:
            while not work.is_completed():
                deadline.check()
                time.sleep(2e-5)
            work.wait()
        except TransportError:
            self._broken = True
            raise
        except RuntimeError as error:
            self._broken = True
            raise TransportError(f"{deadline.doing}: a rank is gone or the network failed ({error}).") from error
