"""The one error of this package, and its words for an unknown name."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable


class LossError(ValueError):
    """A loss or an advantage was asked for with input that has no defined answer.

    The message says what was given, why it cannot work and what to change. It is a `ValueError`, and it carries its
    message as its only argument, so it survives pickling between processes.
    """


def unknown_name(argument: str, value: object, known: Iterable[str], more: str = "") -> LossError:
    """Word the error for a name outside `known`: lists the known names, `more` choices, and the nearest name."""
    names = sorted(known)
    nearest = difflib.get_close_matches(str(value), names, n=1, cutoff=0.4)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    choices = ", ".join([*names, more] if more else names)
    return LossError(f"{argument}={value!r} is unknown; choose one of {choices}{hint}")


def check_name(argument: str, value: object, known: Collection[str]) -> None:
    """Raise that error unless `value` is one of `known`."""
    if value not in known:
        raise unknown_name(argument, value, known)
