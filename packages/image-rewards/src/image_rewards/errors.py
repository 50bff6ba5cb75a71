"""Typed failures. Every error of this package is a `RewardError` and also an error of the standard library.

An error has one message and, where a worker failed, the text of its traceback in `cause`. It survives Ray's pickling.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RewardError(RuntimeError):
    """Base of all errors here. `cause` holds the traceback text of the process where the reward failed, or ""."""

    def __init__(self, message: str, cause: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.cause = cause

    def __str__(self) -> str:
        return f"{self.message}\n{self.cause}" if self.cause else self.message

    def __reduce__(self) -> tuple[type[RewardError], tuple[str, str]]:
        return type(self), (self.message, self.cause)


class RewardInputError(RewardError, ValueError):
    """A picture that no reward can read: wrong dtype or shape, no pixels, no frames, too large."""


class RewardTargetError(RewardError, ValueError):
    """A prompt or its metadata lacks the target a reward needs, or the target is malformed."""


class PromptFileError(RewardError, ValueError):
    """A prompt file that is not there or cannot be read; the message names file and line."""


class RewardConfigError(RewardError, ValueError):
    """An option that does not exist or does not fit."""


class UnknownRewardError(RewardError, LookupError):
    """No reward has this name."""


class MissingExtraError(RewardError, ImportError):
    """An optional dependency is not installed; the message has the install command."""


class RewardServiceError(RewardError, ConnectionError):
    """A scorer service or judge could not be reached, or answered with something that is not a score."""


class RewardTimeoutError(RewardServiceError, TimeoutError):
    """No answer within the deadline."""


class RewardWorkerError(RewardError):
    """A worker process died, or was stopped at its deadline, more often than the retries allow."""


def require(holds: bool, message: str, kind: type[RewardError] = RewardConfigError) -> None:
    """Raise `kind` with the message unless it holds."""
    if not holds:
        raise kind(message)


def check_counts(**counts: int) -> None:
    """Raise `RewardConfigError` for a count below 1."""
    for name, count in counts.items():
        require(count >= 1, f"{name}={count!r} must be at least 1.")


def nearest(word: str, known: Iterable[str]) -> str:
    """ " Did you mean 'this'?" for a slip of the pen, or ""."""
    known = list(known)
    names = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word, known, n=1) or [
        names[low] for low in difflib.get_close_matches(word.lower(), names, n=1)
    ]
    return f" Did you mean {near[0]!r}?" if near else ""


def missing_extra(package: str, extra: str, reward: str) -> MissingExtraError:
    """The error for an optional dependency `package`, with the line to type: in a checkout, where Ray is there anyway, or alone."""
    checkout = "" if extra == "ray" else f"uv run --extra {extra} …, or "
    return MissingExtraError(
        f"{reward} needs the package {package!r}, which is not installed: {checkout}pip install './packages/image-rewards[{extra}]'"
    )
