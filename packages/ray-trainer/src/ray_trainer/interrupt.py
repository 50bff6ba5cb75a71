"""A polite stop: the first Ctrl-C or SIGTERM asks, the second one insists."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """While entered, SIGTERM raises KeyboardInterrupt as Ctrl-C does; for what comes before the steps, and after them.

    Ray installs a handler of its own when it starts, so this is entered again after that.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


class StopRequest:
    """While entered, SIGINT and SIGTERM set `requested` instead of raising; a second signal raises KeyboardInterrupt.

    Outside the main thread Python allows no signal handlers; there, nothing is changed.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        print("\nstopping after this step; press Ctrl-C again to stop at once", file=sys.stderr, flush=True)
