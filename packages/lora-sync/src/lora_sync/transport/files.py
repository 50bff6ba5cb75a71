"""A shared folder: every version is one safetensors file that appears whole or not at all."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from ..codec import decode, unseal
from ..errors import StaleVersionError, TransportError
from ..message import Message, encode, restore
from ..payload import write_atomically
from .base import DEFAULT_TIMEOUT, Deadline, Transport

_NAME = re.compile(r"v(\d{12})\.(\d{6})\.safetensors")


class FileTransport(Transport):
    """Publish versions as files; a receiver takes the newest that it has not seen.

    Args:
        folder: on any file system with atomic rename (local disks, NFS, Lustre).
        keep: older files beyond this many are deleted by the sender.
        poll: seconds between looks.
    """

    def __init__(self, folder: str | os.PathLike[str], *, keep: int = 2, poll: float = 0.05) -> None:
        if keep < 1:
            raise TransportError(f"keep={keep!r}: at least the newest file must stay.")
        self.folder, self._keep, self._poll = Path(folder), keep, poll
        self._sent: tuple[int, int] = (-1, -1)
        self._seen: tuple[int, int] = (-1, -1)

    def send(self, message: Message, *, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Write the file. Returns at once: files have no receiver to wait for."""
        index = int(message.metadata().get("index", 0))
        place = (message.version, index)
        newest = max((key for key, _ in self._files()), default=(-1, -1))
        if place <= max(newest, self._sent):
            raise StaleVersionError(
                f"version {message.version} is not newer than {max(newest, self._sent)[0]}, which {self.folder} already has."
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        target = self.folder / f"v{message.version:012d}.{index:06d}.safetensors"
        write_atomically(target, encode(message), message.tensors)
        self._sent = place
        versions = sorted({key[0] for key, _ in self._files()})[: -self._keep]
        for key, file in self._files():
            if key[0] in versions:
                file.unlink(missing_ok=True)

    def receive(self, *, timeout: float = DEFAULT_TIMEOUT, check: bool = True) -> Message:
        deadline = Deadline(timeout, f"waiting in {self.folder} for a version after {self._seen[0]}")
        while True:
            fresh = [(key, file) for key, file in self._files() if key > self._seen]
            if fresh:
                newest = max(key[0] for key, _ in fresh)
                key, file = min(item for item in fresh if item[0][0] == newest)
                try:
                    data = bytearray(file.read_bytes())
                except FileNotFoundError:
                    continue  # pruned between the look and the read: a newer one is there
                tensors, metadata = decode(data, str(file))
                message = restore(tensors, unseal(metadata, str(file)), check=check, origin=str(file))
                self._seen = key
                return message
            deadline.check()
            time.sleep(self._poll)

    def _files(self) -> list[tuple[tuple[int, int], Path]]:
        found = []
        for file in self.folder.glob("v*.safetensors"):
            if match := _NAME.fullmatch(file.name):
                found.append(((int(match[1]), int(match[2])), file))
        return sorted(found)
