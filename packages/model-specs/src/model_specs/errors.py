"""The one error family of this package."""

from __future__ import annotations


class SpecError(ValueError):
    """A model folder, a prompt, a size or a tensor that an architecture cannot work with.

    The message says what was given, why it fails and what to change. It survives pickling, so it may cross processes.
    """


class UnknownArchitectureError(SpecError):
    """No spec is registered under that name; the message lists the known ones and the nearest."""


class PromptTooLongError(SpecError):
    """A prompt has more tokens than `max_sequence_length`. Prompts are never cropped in silence."""
