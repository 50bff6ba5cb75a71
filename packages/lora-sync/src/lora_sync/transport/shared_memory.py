"""One host, several processes: a small ring of memory that both sides map, filled and emptied at the same time.

The sender copies pieces into free slots and says so over a Unix socket; every receiver copies them out and answers. The ring is
8 MB whatever the adapter's size, so it fits a container's default /dev/shm. Its file has no name and is handed over through the
socket, which goes once all receivers are there. A process that dies leaves nothing behind, and the other side hears of it at once.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from ..errors import CorruptPayloadError, TransportError
from ..host import as_tensor, flat_bytes
from ..message import Message, parse_header
from .base import DEFAULT_TIMEOUT, Deadline, Transport

_SLOT_BYTES, _SLOTS = 512 << 10, 16  # a slot fits a core's cache, the ring the shared one
_SLOT, _GOOD, _BAD = b".", b"+", b"-"
_GONE = "it closed its end, or its process died"


class SharedMemoryTransport(Transport):
    """A ring between the processes of this host.

    Args:
        name: the same word on both sides.
        role: `"sender"` makes the ring, `"receiver"` waits for it and attaches.
        readers: how many receivers there are (sender). Each gets every message.
        device: where a receiver's tensors go. On `"cuda"` they are copied from the ring straight to the card.
        timeout: seconds a receiver waits for the ring to appear.
    """

    def __init__(
        self,
        name: str,
        role: str,
        *,
        readers: int = 1,
        device: str | torch.device = "cpu",
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        if role not in ("sender", "receiver") or readers < 1 or not name or "/" in name:
            raise TransportError(
                f"name={name!r}, role={role!r}, readers={readers!r}: need a name without '/', role 'sender' or 'receiver', and "
                "at least 1 reader."
            )
        self._path, self._role, self._readers = Path(tempfile.gettempdir()) / f"lora_sync.{name}", role, readers
        self.device = torch.empty(0, device=device).device  # a card that is not there raises here
        self._peers: list[socket.socket] | None = []
        self._listener: socket.socket | None = None
        self._pinned = False
        if role == "sender":
            self._listen()
        else:
            self._attach(Deadline(timeout, f"waiting for the ring {self._path.name}"))

    # Both sides --------------------------------------------------------------------------------------------------

    def _map(self, file: int) -> None:
        self._mmap = mmap.mmap(file, _SLOTS * _SLOT_BYTES)
        self._ring = as_tensor(self._mmap)
        self._slots = self._ring.split(_SLOT_BYTES)

    def _pin(self) -> None:
        """Page-lock the ring, so that copies from and to a GPU run at the bus's speed."""
        if not self._pinned:
            torch.cuda.cudart().cudaHostRegister(self._ring.data_ptr(), self._ring.numel(), 0)  # type: ignore[no-untyped-call]
            self._pinned = True

    def _open(self, role: str) -> list[socket.socket]:
        if self._role != role:
            raise TransportError(f"this end is the {self._role}; {role}s are made with role={role!r}.")
        if self._peers is None:
            raise TransportError(f"{self._path.name}: the channel broke at an earlier message; make a new one.")
        return self._peers

    def _hear(self, peer: socket.socket, size: int, deadline: Deadline) -> bytes:
        """The next `size` bytes from the other side."""
        data = b""
        while len(data) < size:
            with self._wire(peer, deadline):
                if not (more := peer.recv(size - len(data))):
                    raise ConnectionError(_GONE)
            data += more
        return data

    def _say(self, peer: socket.socket, data: bytes, deadline: Deadline) -> None:
        with self._wire(peer, deadline):
            peer.sendall(data)

    @contextlib.contextmanager
    def _wire(self, peer: socket.socket, deadline: Deadline) -> Iterator[None]:
        try:
            peer.settimeout(max(deadline.left, 1e-3))
            yield
        except TimeoutError:
            raise deadline.error() from None
        except OSError as error:
            who = f"receiver {(self._peers or [peer]).index(peer)}" if self._role == "sender" else "the sender"
            raise TransportError(
                f"{self._path.name}: {who} is gone ({error}). The message is dropped; make a new channel."
            ) from error

    def close(self) -> None:
        for end in (*(self._peers or ()), *filter(None, [self._listener])):
            end.close()
        if self._listener is not None:
            self._path.unlink(missing_ok=True)
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._ring.data_ptr())  # type: ignore[no-untyped-call]
        self._peers = self._listener = None
        self._pinned, self._slots, self._ring = False, (), torch.empty(0)  # the mapping goes with its last view

    # Sender ------------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  # no name; receivers get it through the socket
        self._file.truncate(_SLOTS * _SLOT_BYTES)
        self._map(self._file.fileno())
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(str(self._path))
        except OSError as error:
            listener.close()
            raise TransportError(
                f"{self._path} exists: another sender uses this name, or one died before its receivers came. Choose "
                "another name or delete the file."
            ) from error
        self._path.chmod(0o600)
        listener.listen(self._readers)
        self._listener = listener

    def _accept(self, deadline: Deadline) -> list[socket.socket]:
        peers = self._open("sender")
        while len(peers) < self._readers:
            assert self._listener is not None
            self._listener.settimeout(max(deadline.left, 1e-3))
            try:
                peers.append(self._listener.accept()[0])
            except TimeoutError:
                raise deadline.error() from None
            with self._wire(peers[-1], deadline):
                socket.send_fds(peers[-1], [_SLOT], [self._file.fileno()])
        if self._listener is not None:
            self._listener.close()
            self._path.unlink(missing_ok=True)
            self._file.close()
            self._listener = None
        return peers

    def send(self, message: Message, *, timeout: float = DEFAULT_TIMEOUT) -> None:
        deadline = Deadline(timeout, f"sending version {message.version} through {self._path.name}")
        peers = self._accept(deadline)
        header = message.header()
        try:
            for peer in peers:
                self._say(peer, len(header).to_bytes(8, "little") + header, deadline)
            count = 0
            for pieces in _slotfuls([message.tensors[spec.name] for spec in parse_header(header)[1]]):
                if count >= _SLOTS:  # what this slot held must have been copied out
                    for peer in peers:
                        self._hear(peer, 1, deadline)
                place = 0
                for piece in pieces:
                    if piece.device.type == "cuda":
                        self._pin()
                    self._slots[count % _SLOTS][place : place + piece.numel()].copy_(piece)
                    place += piece.numel()
                for peer in peers:
                    self._say(peer, _SLOT, deadline)
                count += 1
            verdicts = [self._hear(peer, min(count, _SLOTS) + 1, deadline)[-1:] for peer in peers]
        except BaseException:  # half a message is in the ring: nobody could find the next one's start
            self.close()
            raise
        if refused := [number for number, verdict in enumerate(verdicts) if verdict == _BAD]:
            raise TransportError(
                f"version {message.version}: receiver {refused} got bytes that do not match the hash. Were the tensors "
                "changed while they were sent (extract with copy=True)? The channel is usable; send again."
            )

    # Receiver ----------------------------------------------------------------------------------------------------

    def _attach(self, deadline: Deadline) -> None:
        peer = socket.socket(socket.AF_UNIX)
        self._peers = [peer]
        while True:
            try:
                peer.settimeout(max(deadline.left, 1e-3))
                peer.connect(str(self._path))
                break
            except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):
                if not deadline.left:
                    peer.close()
                    raise deadline.error() from None
                time.sleep(0.005)

    def receive(self, *, timeout: float = DEFAULT_TIMEOUT, check: bool = True) -> Message:
        deadline = Deadline(timeout, f"receiving from {self._path.name}")
        (peer,) = self._open("receiver")
        if not hasattr(self, "_mmap"):
            with self._wire(peer, deadline):
                _, files, *_ = socket.recv_fds(peer, 1, 1)
                if not files:
                    raise ConnectionError(_GONE)
            self._map(files[0])
            os.close(files[0])
        with self._wire(peer, deadline):
            peer.recv(1, socket.MSG_PEEK)  # waiting in vain breaks nothing
        try:
            size = int.from_bytes(self._hear(peer, 8, deadline), "little")
            meta, specs = parse_header(self._hear(peer, size, deadline))
            total = sum(spec.nbytes for spec in specs)
            staging = torch.empty(total, dtype=torch.uint8, device=self.device)
            if self.device.type == "cuda":
                self._pin()
            for number, part in enumerate(staging.split(_SLOT_BYTES) if total else ()):
                self._hear(peer, 1, deadline)
                part.copy_(self._slots[number % _SLOTS][: part.numel()])
                self._say(peer, _SLOT, deadline)
        except BaseException:  # a GPU that is out of memory raises a RuntimeError
            self.close()
            raise
        parts = staging.split([spec.nbytes for spec in specs])
        tensors = {spec.name: spec.over(part) for spec, part in zip(specs, parts, strict=True)}
        try:
            message = Message.restore(tensors, meta, self._path.name, check=check)
        except CorruptPayloadError:
            self._say(peer, _BAD, deadline)
            raise
        self._say(peer, _GOOD, deadline)
        return message


def _slotfuls(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """The tensors' bytes, grouped into pieces that together fill one slot (the last may hold less)."""
    group: list[Tensor] = []
    room = _SLOT_BYTES
    for flat in map(flat_bytes, tensors):
        while flat.numel():
            group.append(flat[:room])
            flat, room = flat[room:], room - group[-1].numel()
            if room == 0:
                yield group
                group, room = [], _SLOT_BYTES
    if group:
        yield group
