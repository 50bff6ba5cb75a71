"""What a backend may do in which state. A backend asks here before it acts; illegal moves are refused, never guessed.

    cold ──► loading ──► ready ◄──► paused
                           │ ▲         │ ▲
                           ▼ │         ▼ │
                          asleep     asleep        wake_up returns to where sleep came from
    syncing: from ready or paused with nothing in flight, and back

Three rules beside the arrows, each a fault that people met: no generation before the first full sync (an engine that
starts from dummy weights draws noise and calls it a rollout), no touching of weights asleep (an illegal memory access
on a GPU), and no sleep at level 2 (it discards weights that nobody can restore).
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
    PAUSED = "paused"
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
        self._back = State.READY
        self.state = State.COLD
        self.synced = not needs_sync
        self.lora_layers = False
        self.in_flight = 0
        self.policy_version = 0
        self.reason = ""

    def _move(self, action: str, allowed: tuple[State, ...], to: State) -> None:
        if self.state not in allowed:
            names = " or ".join(state.value for state in allowed)
            why = f" ({self.reason})" if self.reason else ""
            raise LifecycleError(f"{action} is refused: the backend is {self.state.value}{why}, it must be {names}.")
        self.state = to

    def load(self) -> None:
        """cold → loading."""
        with self._lock:
            self._move("load", (State.COLD,), State.LOADING)

    def loaded(self) -> None:
        """loading → ready."""
        with self._lock:
            self._move("loaded", (State.LOADING,), State.READY)

    def fail(self, reason: str) -> None:
        """Any state → failed; only a new backend gets out of it."""
        with self._lock:
            self.state, self.reason = State.FAILED, reason

    def pause(self) -> None:
        """ready → paused. Samples in flight finish; new ones are refused until `resume`."""
        with self._lock:
            self._move("pause", (State.READY, State.PAUSED), State.PAUSED)

    def resume(self) -> None:
        """paused → ready."""
        with self._lock:
            self._move("resume", (State.PAUSED, State.READY), State.READY)

    def sleep(self, level: int = 1) -> None:
        """ready or paused → asleep, with nothing in flight. Only level 1 is allowed."""
        if level != 1:
            raise LifecycleError(f"sleep(level={level!r}) is refused: it discards the weights for good. Use level=1.")
        with self._lock:
            self._idle("sleep")
            back = self.state
            self._move("sleep", (State.READY, State.PAUSED), State.ASLEEP)
            self._back = back

    def wake_up(self) -> None:
        """asleep → the state that sleep came from."""
        with self._lock:
            self._move("wake_up", (State.ASLEEP,), self._back)

    @contextmanager
    def generating(self, count: int = 1) -> Iterator[None]:
        """Hold `count` samples in flight."""
        with self._lock:
            self._move("generate", (State.READY,), State.READY)
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
    def syncing(self, version: int, *, full: bool = False, lora: bool = False) -> Iterator[None]:
        """Change weights to `version`. `full` counts as a full sync, `lora` notes that LoRA layers now exist.

        The version counts from the moment the block ends without an error; a failed sync leaves the old one, and a
        failed full sync forbids generation until one succeeds.
        """
        with self._lock:
            self._idle("a weight update")
            if version < self.policy_version:
                raise LifecycleError(
                    f"version {version!r} is older than {self.policy_version!r}, which the backend holds already."
                )
            back = self.state
            self._move("a weight update", (State.READY, State.PAUSED), State.SYNCING)
        try:
            yield
        except BaseException:
            with self._lock:
                if self.state is State.SYNCING:
                    self.state = back
                if full:  # some tensors are new and some old: nothing may sample until a full sync succeeds
                    self.synced = False
            raise
        with self._lock:
            self.state = back
            self.policy_version = version
            self.synced = self.synced or full
            self.lora_layers = self.lora_layers or lora

    def _idle(self, action: str) -> None:
        if self.in_flight:
            raise LifecycleError(
                f"{action} is refused: {self.in_flight} samples are in flight, half of them would see other weights. "
                "Pause the backend and wait for them first."
            )
