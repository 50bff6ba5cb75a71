"""One host, several processes: a small ring in POSIX shared memory, filled and emptied at the same time.

The sender copies pieces into free slots, every receiver copies them out and hashes them on its way; with two cores the
two halves overlap. The ring is a few megabytes whatever the adapter's size, so it fits a container's default /dev/shm,
and the adapter exists only where it is used. ``send`` returns when every receiver has checked the whole message.

The ring's file is unlinked as soon as all receivers have attached: a crash leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..codec import as_buffer
from ..errors import CorruptPayloadError, TransportError
from ..message import BufferPool, Incoming, Message, Outgoing
from .base import DEFAULT_TIMEOUT, Deadline, Transport

_MAGIC = 0x4C53_5259_4E47_0001
_SLOT_BYTES, _SLOTS, _MAX_READERS = 512 << 10, 16, 64  # a slot fits a core's cache, the ring the shared one
_HEADER_BYTES = 4096
# int64 places in the header page
_READY, _NREADERS, _WRITER_PID, _WRITTEN, _BROKEN, _LENGTHS, _READERS = 0, 1, 2, 3, 4, 8, 32
_PID, _CURSOR, _ACK, _NACK, _STRIDE = 0, 1, 2, 3, 4


class SharedMemoryTransport(Transport):
    """A named ring on this host.

    Args:
        name: the same word on both sides.
        role: ``"sender"`` makes the ring, ``"receiver"`` waits for it and attaches.
        readers: how many receivers there are (sender). Each gets every message.
        reader: this receiver's number, from 0.
        device: where a receiver's tensors go. On ``"cuda"`` they are copied from the ring straight to the card.
        timeout: seconds a receiver waits for the ring to appear.
    """

    def __init__(
        self,
        name: str,
        role: str,
        *,
        readers: int = 1,
        reader: int = 0,
        device: str | torch.device = "cpu",
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        if role not in ("sender", "receiver") or not 1 <= readers <= _MAX_READERS or not name or "/" in name:
            raise TransportError(
                f"name={name!r}, role={role!r}, readers={readers!r}: need a name without '/', role 'sender' or 'receiver', and "
                f"1 to {_MAX_READERS} readers."
            )
        folder = Path("/dev/shm") if os.path.isdir("/dev/shm") else Path(tempfile.gettempdir())
        self._path, self._role, self._reader = folder / f"lora_sync.{name}", role, reader
        self._pool, self._sent, self._read, self._message = BufferPool(), 0, 0, 0
        self.device, self._pinned = torch.empty(0, device=device).device, False  # a card that is not there raises here
        if role == "sender":
            self._create(readers)
        else:
            self._attach(timeout)
            if self.device.type == "cuda":
                with torch.cuda.device(self.device):
                    self._pin()

    # Both sides --------------------------------------------------------------------------------------------------

    def _map(self, handle: int) -> None:
        self._mmap = mmap.mmap(handle, _HEADER_BYTES + _SLOTS * _SLOT_BYTES)
        self._words: Any = np.frombuffer(self._mmap, dtype=np.int64, count=_HEADER_BYTES // 8)
        ring = as_buffer(np.frombuffer(self._mmap, dtype=np.uint8, offset=_HEADER_BYTES))
        self._slots = list(ring.split(_SLOT_BYTES))
        self._ring = ring

    def _wait(self, ready: Callable[[], bool], alive: Callable[[], str | None], deadline: Deadline) -> None:
        """Yield first (a slot is copied in a fraction of a millisecond), then sleep, and look after the other side."""
        turns, look = 0, time.monotonic() + 0.05
        while True:
            if self._words[_BROKEN]:
                raise TransportError(f"{self._path.name}: the channel broke at an earlier message; make a new one.")
            if ready():
                return
            time.sleep(0 if turns < 200 else min(1e-3, 1e-5 * (turns - 199)))
            turns += 1
            if time.monotonic() < look:
                continue
            look += 0.05
            if (gone := alive()) and not ready():
                self._words[_BROKEN] = 1
                raise TransportError(f"{self._path.name}: {gone} The message is dropped; make a new channel.")
            try:
                deadline.check()
            except TransportError:
                if self._role == "sender" or self._message_open:
                    self._words[_BROKEN] = 1  # half a message is in the ring: nobody could find the next one's start
                raise

    def _pin(self) -> None:
        """Page-lock the ring, so that copies from and to a GPU run at the bus's speed."""
        status = torch.cuda.cudart().cudaHostRegister(self._ring.data_ptr(), self._ring.numel(), 0)  # type: ignore[no-untyped-call]
        self._pinned = int(status) == 0

    _message_open = False

    def close(self) -> None:
        if getattr(self, "_words", None) is None:
            return
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._ring.data_ptr())  # type: ignore[no-untyped-call]
        if self._role == "sender":
            self._words[_WRITER_PID] = -1
            self._path.unlink(missing_ok=True)
        else:
            self._words[_READERS + self._reader * _STRIDE + _PID] = -1
        self._words, self._slots, self._ring = None, [], torch.empty(0)
        with contextlib.suppress(BufferError):  # a view still exists somewhere; the mapping goes with it
            self._mmap.close()

    # Sender ------------------------------------------------------------------------------------------------------

    def _create(self, readers: int) -> None:
        try:
            handle = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        except FileExistsError as error:
            raise TransportError(
                f"{self._path} exists: another sender uses this name, or one died before its receivers came. Choose "
                "another name or delete the file."
            ) from error
        try:
            os.ftruncate(handle, _HEADER_BYTES + _SLOTS * _SLOT_BYTES)
            self._map(handle)
        finally:
            os.close(handle)
        self._words[_NREADERS], self._words[_WRITER_PID] = readers, os.getpid()
        self._words[_READY] = _MAGIC

    def _readers(self, what: int) -> Any:
        count = int(self._words[_NREADERS])
        return self._words[_READERS + what : _READERS + count * _STRIDE : _STRIDE]

    def _reader_gone(self) -> str | None:
        for number, pid in enumerate(self._readers(_PID)):
            if pid < 0:
                return f"receiver {number} closed its end."
            if pid and not _alive(int(pid)):
                return f"receiver {number} (process {pid}) died."
        return None

    def send(self, message: Message, *, timeout: float = DEFAULT_TIMEOUT) -> None:
        if self._role != "sender":
            raise TransportError("this end receives; send from the process that made the ring.")
        deadline = Deadline(timeout, f"sending version {message.version} through {self._path.name}")
        self._wait(lambda: bool(self._readers(_PID).all()), self._reader_gone, deadline)
        self._path.unlink(missing_ok=True)
        outgoing = Outgoing(message)
        header = as_buffer(bytearray(len(outgoing.header).to_bytes(8, "little") + outgoing.header))
        for piece in header.split(_SLOT_BYTES):
            self._put([piece], deadline)
        for group in outgoing.fill(_SLOT_BYTES):
            self._put(group, deadline)
        self._message += 1
        settled = self._message
        self._wait(
            lambda: bool((np.maximum(self._readers(_ACK), self._readers(_NACK)) >= settled).all()),
            self._reader_gone,
            deadline,
        )
        if refused := [number for number, word in enumerate(self._readers(_NACK)) if word >= settled]:
            raise TransportError(
                f"version {message.version}: receiver {refused} got bytes that do not match the hash. Were the tensors "
                "changed while they were sent (extract with copy=True)? The channel is usable; send again."
            )

    def _put(self, group: list[Tensor], deadline: Deadline) -> None:
        number = self._sent
        self._wait(lambda: int(self._readers(_CURSOR).min()) > number - _SLOTS, self._reader_gone, deadline)
        slot, place = self._slots[number % _SLOTS], 0
        for run in group:
            if run.device.type == "cuda" and not self._pinned:
                self._pin()
            slot[place : place + run.numel()].copy_(run)
            place += run.numel()
        self._words[_LENGTHS + number % _SLOTS] = place
        self._sent += 1
        self._words[_WRITTEN] = self._sent

    # Receiver ----------------------------------------------------------------------------------------------------

    def _attach(self, timeout: float) -> None:
        deadline = Deadline(timeout, f"waiting for the ring {self._path.name}")
        while True:
            with contextlib.suppress(FileNotFoundError):
                handle = os.open(self._path, os.O_RDWR)
                try:
                    if os.fstat(handle).st_size >= _HEADER_BYTES:
                        self._map(handle)
                        if self._words[_READY] == _MAGIC:
                            break
                finally:
                    os.close(handle)
            deadline.check()
            time.sleep(0.005)
        if not 0 <= self._reader < int(self._words[_NREADERS]):
            raise TransportError(f"reader={self._reader}: this ring has {int(self._words[_NREADERS])} readers, from 0.")
        self._mine = _READERS + self._reader * _STRIDE
        if self._words[self._mine + _PID]:
            raise TransportError(
                f"receiver {self._reader} of {self._path.name} is taken; give each receiver its number."
            )
        self._words[self._mine + _PID] = os.getpid()

    def _writer_gone(self) -> str | None:
        pid = int(self._words[_WRITER_PID])
        if pid < 0:
            return "the sender closed its end."
        return None if _alive(pid) else f"the sender (process {pid}) died."

    def receive(self, *, timeout: float = DEFAULT_TIMEOUT, check: bool = True) -> Message:
        if self._role != "receiver":
            raise TransportError("this end sends; receive in a process that attached with role='receiver'.")
        deadline = Deadline(timeout, f"receiving from {self._path.name}")
        self._message_open = False
        try:
            first = self._take(deadline)
            self._message_open = True
            size = 8 + int.from_bytes(first[:8].numpy().tobytes(), "little")
            header = bytearray(first.numpy().tobytes())
            self._release()
            while len(header) < size:
                header += self._take(deadline).numpy().tobytes()
                self._release()
            incoming = Incoming(
                bytes(header[8:size]), check=check, pool=self._pool, device=self.device, origin=self._path.name
            )
            while incoming.missing:
                incoming.feed(self._take(deadline))
                self._release()
        except BaseException:  # a GPU that is out of memory raises a RuntimeError
            if self._message_open:
                self._words[_BROKEN] = 1
            raise
        self._message_open = False
        self._message += 1
        try:
            message = incoming.finish()
        except CorruptPayloadError:
            self._words[self._mine + _NACK] = self._message
            raise
        self._words[self._mine + _ACK] = self._message
        return message

    def _take(self, deadline: Deadline) -> Tensor:
        number = self._read
        self._wait(lambda: int(self._words[_WRITTEN]) > number, self._writer_gone, deadline)
        return self._slots[number % _SLOTS][: int(self._words[_LENGTHS + number % _SLOTS])]

    def _release(self) -> None:
        self._read += 1
        self._words[self._mine + _CURSOR] = self._read


def _alive(pid: int) -> bool:
    """Whether a process runs; one that died and was not waited for yet does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return not os.path.isdir("/proc/self")
