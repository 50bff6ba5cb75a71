"""Printing that never ends a run: on a terminal without arrows, into a closed pipe, onto a full disk, without any output at all."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


class _Forgiving:
    """A text stream whose writes may fail. After the first failure nothing more is written."""

    def __init__(self, stream: Any):
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except (OSError, ValueError):  # a pipe that nobody reads any more, a full disk, a closed stream
            self._give_up()
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError):
            self._give_up()

    def _give_up(self) -> None:
        """Python flushes what is left at its end, and that must not fail either: the rest goes nowhere."""
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def safe_output() -> Iterator[None]:
    """`sys.stdout` and `sys.stderr` that take any text and never raise; what they cannot show becomes a question mark."""
    before = sys.stdout, sys.stderr
    nowhere = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - a process may be started without any output
    for stream in before:
        if hasattr(stream, "reconfigure"):
            with suppress(OSError, ValueError):
                stream.reconfigure(errors="replace")
    sys.stdout, sys.stderr = (_Forgiving(stream or nowhere) for stream in before)  # type: ignore[assignment]
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr = before
        nowhere.close()


def quiet_libraries() -> None:
    """No bars and no notes of diffusers and transformers while they load what is on the disk; call it after a download."""
    from diffusers.utils import logging as of_diffusers
    from transformers.utils import logging as of_transformers

    for library in (of_diffusers, of_transformers):
        library.set_verbosity_error()
        library.disable_progress_bar()
