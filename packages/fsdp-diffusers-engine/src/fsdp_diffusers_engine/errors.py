"""Errors of this package: what was given, why it cannot work, what to change.

All of them are `EngineError`, hence `ValueError`; all of them survive pickling, so that a Ray actor can raise
them in the driver (each takes one string, and the class sits at module level).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class EngineError(ValueError):
    """Base of every error that this package raises for a user's input."""


class EngineStateError(EngineError, RuntimeError):
    """A call came in the wrong order: for example a step before `initialize`."""


class CheckpointError(EngineError):
    """A checkpoint is missing, unfinished, or does not fit the engine that loads it."""


class RankError(EngineStateError):
    """Another rank failed; the message carries that rank's own error."""


def nearest(name: str, known: Iterable[str], count: int = 5) -> list[str]:
    """The known names most like `name`, best first; falls back to the first ones when nothing is alike."""
    names = list(known)
    return difflib.get_close_matches(name, names, n=count, cutoff=0.4) or names[:count]
