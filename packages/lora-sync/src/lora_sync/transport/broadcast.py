"""Disaggregated trainers: ``torch.distributed`` broadcast in buckets, over NCCL or gloo.

One rank of the group sends, all others receive. The header goes first, then buckets of fixed size, then one all-reduce
in which every receiver says whether its hash is right: ``send`` raises when one is not. After a timeout the group is in
an unknown state, as with any collective that did not finish: leave it.

A serving engine owns the default process group of its process. `join_group` makes one beside it, of the trainer's rank 0
and the engines that it feeds.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..codec import as_buffer
from ..errors import CorruptPayloadError, LoRASyncError, TransportError
from ..message import BufferPool, Incoming, Message, Outgoing
from .base import DEFAULT_TIMEOUT, Deadline, Transport

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_NEVER = timedelta(days=365)
"""A group's own timeout ends the process, under NCCL; messages have deadlines that raise."""


def join_group(
    address: str, rank: int, size: int, *, device: str | torch.device = "cuda", timeout: float = DEFAULT_TIMEOUT
) -> ProcessGroup:
    """A process group of its own, whatever other groups this process is in. All ``size`` processes call it.

    Args:
        address: ``host:port`` on which rank 0 listens, as long as it holds the group. After a failure join anew at
            another port.
        rank, size: this process's number in the group, from 0, and how many there are.
        device: ``"cuda"`` (this process's current card) speaks NCCL, one card per rank; ``"cpu"`` speaks gloo.
        timeout: seconds to wait for the others. Messages later have deadlines of their own.

    Raises ``TransportError`` when they do not come.
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
    """Collective transport: all ranks of ``group`` call their half in the same order.

    Args:
        source: rank of the group that sends.
        group: process group, default the world; one of `join_group`'s, or any other.
        device: where buckets live: ``"cuda"`` for NCCL (received tensors stay there), ``"cpu"`` for gloo.
        bucket_bytes: size of one broadcast; two buckets are in memory at a time.
    """

    def __init__(
        self,
        source: int = 0,
        *,
        group: ProcessGroup | None = None,
        device: str | torch.device | None = None,
        bucket_bytes: int = 64 << 20,
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
        self._source, self._bucket = source, bucket_bytes
        if device is None:
            device = torch.device("cuda", torch.cuda.current_device()) if self._group.name() == "nccl" else "cpu"
        self.device, self._pool, self._broken = torch.device(device), BufferPool(), False

    def send(self, message: Message, *, timeout: float = DEFAULT_TIMEOUT) -> None:
        if self._group.rank() != self._source:
            raise TransportError(f"rank {self._group.rank()} receives; rank {self._source} sends.")
        deadline = Deadline(timeout, f"broadcasting version {message.version}")
        outgoing = Outgoing(message)
        sizes = torch.tensor([len(outgoing.header), outgoing.plan.data_bytes], device=self.device)
        self._broadcast(sizes, deadline)
        self._broadcast(as_buffer(bytearray(outgoing.header)).to(self.device), deadline)
        buckets = [self._new_bucket(outgoing.plan.data_bytes) for _ in range(2)]
        pending: list[Any] = [None, None]
        for number, group in enumerate(outgoing.fill(self._bucket)):
            turn = number % 2
            if pending[turn] is not None:
                self._finish(pending[turn], deadline)
            bucket, place = buckets[turn], 0
            for run in group:
                bucket[place : place + run.numel()].copy_(run)
                place += run.numel()
            pending[turn] = self._start(bucket[:place])
        for work in pending:
            if work is not None:
                self._finish(work, deadline)
        if failures := self._vote(0, deadline):
            raise TransportError(
                f"version {message.version}: {failures} receiver(s) got bytes that do not match the hash. Were the tensors "
                "changed while they were sent (extract with copy=True)? Send again."
            )

    def receive(self, *, timeout: float = DEFAULT_TIMEOUT, check: bool = True) -> Message:
        deadline = Deadline(timeout, f"receiving a broadcast from rank {self._source}")
        sizes = torch.zeros(2, dtype=torch.int64, device=self.device)
        self._broadcast(sizes, deadline)
        header_bytes, data_bytes = (int(size) for size in sizes)
        header = torch.empty(header_bytes, dtype=torch.uint8, device=self.device)
        self._broadcast(header, deadline)
        failure: Exception | None = None
        incoming: Incoming | None = None
        try:
            text = header.cpu().numpy().tobytes()
            incoming = Incoming(text, check=check, pool=self._pool, device=self.device, origin="broadcast")
            if incoming.missing != data_bytes:
                raise CorruptPayloadError(f"broadcast: header speaks of {incoming.missing} bytes, {data_bytes} follow.")
        except (LoRASyncError, MemoryError, torch.OutOfMemoryError) as error:  # take part: others count on this rank
            failure, incoming = error, None
        self._drain(incoming, data_bytes, deadline)
        message: Message | None = None
        try:
            message = incoming.finish() if incoming else None
        except LoRASyncError as error:
            failure = error
        self._vote(int(failure is not None), deadline)
        if failure is not None or message is None:
            raise failure or TransportError("broadcast: no message")
        return message

    def _drain(self, incoming: Incoming | None, data_bytes: int, deadline: Deadline) -> None:
        """Receive all buckets; while one is copied and hashed, the next is already on its way."""
        buckets = [self._new_bucket(data_bytes) for _ in range(2)]
        lengths = [min(self._bucket, data_bytes - place) for place in range(0, data_bytes, self._bucket)]
        pending = [self._start(buckets[0][: lengths[0]])] if lengths else []
        for number, length in enumerate(lengths):
            if number + 1 < len(lengths):
                pending.append(self._start(buckets[(number + 1) % 2][: lengths[number + 1]]))
            self._finish(pending.pop(0), deadline)
            if incoming is not None:
                incoming.feed(buckets[number % 2][:length])

    def _new_bucket(self, data_bytes: int) -> Tensor:
        return torch.empty(min(self._bucket, data_bytes), dtype=torch.uint8, device=self.device)

    def _vote(self, failed: int, deadline: Deadline) -> int:
        votes = torch.tensor([failed], device=self.device)
        self._finish(self._group.allreduce(votes), deadline)
        return int(votes)

    def _broadcast(self, tensor: Tensor, deadline: Deadline) -> None:
        self._finish(self._start(tensor), deadline)

    def _start(self, tensor: Tensor) -> Any:
        if self._broken:
            raise TransportError(
                "an earlier broadcast did not finish, so this group is in an unknown state; make a new one."
            )
        return self._group.broadcast(tensor, self._source)

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
