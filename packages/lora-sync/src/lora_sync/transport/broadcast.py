"""Disaggregated trainers: ``torch.distributed`` broadcast in buckets, over NCCL or gloo.

One rank of the group sends, all others receive. The header goes first, then buckets of fixed size, then one all-reduce
in which every receiver says whether its hash is right: ``send`` raises when one is not. After a timeout the group is in
an unknown state, as with any collective that did not finish: leave it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..codec import as_buffer
from ..errors import CorruptPayloadError, LoRASyncError, TransportError
from ..message import BufferPool, Incoming, Message, Outgoing
from .base import DEFAULT_TIMEOUT, Deadline, Transport

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class BroadcastTransport(Transport):
    """Collective transport: all ranks of ``group`` call their half in the same order.

    Args:
        source: global rank that sends.
        group: process group, default the world.
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

        if not dist.is_initialized():
            raise TransportError("torch.distributed is not initialised; call init_process_group first.")
        self._dist, self._group, self._source, self._bucket = dist, group, source, bucket_bytes
        if device is None:
            device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else "cpu"
        self.device, self._pool, self._broken = torch.device(device), BufferPool(), False

    def send(self, message: Message, *, timeout: float = DEFAULT_TIMEOUT) -> None:
        if self._dist.get_rank() != self._source:
            raise TransportError(f"rank {self._dist.get_rank()} receives; rank {self._source} sends.")
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
        failure: LoRASyncError | None = None
        incoming: Incoming | None = None
        try:
            text = header.cpu().numpy().tobytes()
            incoming = Incoming(text, check=check, pool=self._pool, device=self.device, origin="broadcast")
            if incoming.missing != data_bytes:
                raise CorruptPayloadError(f"broadcast: header speaks of {incoming.missing} bytes, {data_bytes} follow.")
        except LoRASyncError as error:  # keep taking part: the others count on this rank
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
        self._finish(self._dist.all_reduce(votes, group=self._group, async_op=True), deadline)
        return int(votes)

    def _broadcast(self, tensor: Tensor, deadline: Deadline) -> None:
        self._finish(self._start(tensor), deadline)

    def _start(self, tensor: Tensor) -> Any:
        if self._broken:
            raise TransportError(
                "an earlier broadcast did not finish, so this group is in an unknown state; make a new one."
            )
        return self._dist.broadcast(tensor, self._source, group=self._group, async_op=True)

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
