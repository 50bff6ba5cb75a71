"""Trainer and sampler in one process: the payload is handed over by reference, one at a time."""

from __future__ import annotations

import contextlib
import queue

from ..errors import TransportError
from ..message import Message, restore
from .base import DEFAULT_TIMEOUT, Deadline, Transport


class InProcessTransport(Transport):
    """A slot for one message, shared by threads. The hash check finds tensors that went on training meanwhile."""

    def __init__(self) -> None:
        self._slot: queue.Queue[Message | None] = queue.Queue(maxsize=1)
        self._closed = False

    def send(self, message: Message, *, timeout: float = DEFAULT_TIMEOUT) -> None:
        if self._closed:
            raise TransportError("this channel is closed; make a new one.")
        try:
            self._slot.put(message, timeout=timeout)
        except queue.Full:
            raise Deadline(timeout, f"sending version {message.version} in process").error() from None

    def receive(self, *, timeout: float = DEFAULT_TIMEOUT, check: bool = True) -> Message:
        if self._closed and self._slot.empty():
            raise TransportError("the channel was closed and holds no message.")
        try:
            message = self._slot.get(timeout=timeout)
        except queue.Empty:
            raise Deadline(timeout, "receiving in process").error() from None
        if message is None:
            raise TransportError("the channel was closed while waiting.")
        return restore(message.tensors, message.metadata(), check=check, origin="in process")

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            with contextlib.suppress(queue.Full):
                self._slot.put_nowait(None)  # wakes a waiting receiver
