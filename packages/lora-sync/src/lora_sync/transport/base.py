"""What every transport promises, and the clock they share."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Self

from ..errors import TransportTimeoutError
from ..message import Message

DEFAULT_TIMEOUT = 120.0


class Transport(ABC):
    """Carries messages (`LoRAPayload`, `WeightBucket`) from one sender to one or more receivers.

    `receive` gives a whole message whose hash was checked, or raises: `TransportTimeoutError` after `timeout` seconds,
    `TransportError` when the other side is gone, `CorruptPayloadError` for wrong bytes.
    """

    @abstractmethod
    def send(self, message: Message, *, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Hand a message over; returns when every receiver has checked it."""

    @abstractmethod
    def receive(self, *, timeout: float = DEFAULT_TIMEOUT, check: bool = True) -> Message:
        """Wait for the next message. `check=False` skips the content hash, for measurements."""

    def close(self) -> None:
        """Give up what the transport holds; safe to call twice."""
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Deadline:
    """Seconds left on a timeout, and the error to raise when there are none."""

    def __init__(self, timeout: float, doing: str) -> None:
        self.timeout, self.doing = timeout, doing
        self._end = time.monotonic() + timeout

    @property
    def left(self) -> float:
        return max(0.0, self._end - time.monotonic())

    def check(self) -> None:
        """Raise `TransportTimeoutError` once the time is up."""
        if time.monotonic() > self._end:
            raise self.error()

    def error(self) -> TransportTimeoutError:
        return TransportTimeoutError(
            f"{self.doing}: nothing happened within {self.timeout:g} s. Is the other side running, and does it call its "
            "half of send/receive? Pass a longer timeout= if it is only slow."
        )
