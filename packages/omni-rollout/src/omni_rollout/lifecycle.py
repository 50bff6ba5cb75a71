"""What a backend may do in which state. A backend asks here before it acts; illegal moves are refused, never guessed.

    cold → loading → ready ⇄ asleep, and ready ⇄ syncing, with nothing in flight

Two rules beside the arrows, each a fault that people met: no generation before the first full sync (an engine that starts from
dummy weights draws noise and calls it a rollout), and no touching of weights asleep (an illegal memory access on a GPU).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum

from .errors import LifecycleError


class State(StrEnum):
    """Where a backend stands."""

    COLD = "cold"
    LOADING = "loading"
    READY = "ready"
    ASLEEP = "asleep"
    SYNCING = "syncing"
    FAILED = "failed"


class Lifecycle:
    """State machine of one backend; thread-safe, because health checks come from other threads than generation.

    Args:
        needs_sync: True for a backend whose weights are not the policy's until the first sync.
    """

    def __init__(self, *, needs_sync: bool = False) -> None:
        self._lock = threading.RLock()
        self.state = State.COLD
        self.synced = not needs_sync
        self.in_flight = 0
        self.policy_version = 0
        self.reason = ""

    def _move(self, action: str, needed: State, to: State) -> None:
        with self._lock:
            if self.state is not needed:
                why = f" ({self.reason})" if self.reason else ""
                raise LifecycleError(f"{action} is refused: the backend is {self.state}{why}, it must be {needed}.")
            self.state = to

    def load(self) -> None:
        """cold → loading."""
        self._move("load", State.COLD, State.LOADING)

    def loaded(self) -> None:
        """loading → ready."""
        self._move("loaded", State.LOADING, State.READY)

    def fail(self, reason: str) -> None:
        """Any state → failed; only a new backend gets out of it."""
        with self._lock:
            self.state, self.reason = State.FAILED, reason

    def sleep(self) -> None:
        """ready → asleep, with nothing in flight."""
        with self._lock:
            self._idle("sleep")
            self._move("sleep", State.READY, State.ASLEEP)

    def wake_up(self) -> None:
        """asleep → ready."""
        self._move("wake_up", State.ASLEEP, State.READY)

    @contextmanager
    def generating(self, count: int = 1) -> Iterator[None]:
        """Hold `count` samples in flight."""
        with self._lock:
            self._move("generate", State.READY, State.READY)
            if not self.synced:
                raise LifecycleError(
                    "generate is refused: no weights were synced yet, the engine holds its start-up weights."
                )
            self.in_flight += count
        try:
            yield
        finally:
            with self._lock:
                self.in_flight -= count

    @contextmanager
    def syncing(self, version: int, *, full: bool = False) -> Iterator[None]:
        """Change weights to `version`; `full` counts as a full sync.

        The version counts from the moment the block ends without an error; a failed sync leaves the old one, and a
        failed full sync forbids generation until one succeeds.
        """
        with self._lock:
            self._idle("a weight update")
            if version < self.policy_version:
                raise LifecycleError(
                    f"version {version!r} is older than {self.policy_version!r}, which the backend holds already."
                )
            self._move("a weight update", State.READY, State.SYNCING)
        done = False
        try:
            yield
            done = True
        finally:
            with self._lock:
                if self.state is State.SYNCING:
                    self.state = State.READY
                if done:
                    self.policy_version = version
                if full:  # of a failed one some tensors are new and some old: nothing may sample until one succeeds
                    self.synced = done

    def _idle(self, action: str) -> None:
        if self.in_flight:
            raise LifecycleError(
                f"{action} is refused: {self.in_flight} samples are in flight, half of them would see other weights. "
                "Wait for them first."
            )
