"""A polite stop: the first Ctrl-C or SIGTERM asks, the second one insists."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType
from typing import Any


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
