"""Errors of ray_trainer: what was given, why it fails, what to change."""

from __future__ import annotations


class TrainerError(ValueError):
    """Something that a person can mend before training starts: a config value, a file, a folder."""


class TrainingFailed(RuntimeError):
    """A step failed after training had started. The message names the step, the cause and where its state lies."""


class Interrupted(RuntimeError):
    """Training was stopped by a signal and left a checkpoint behind; the message says how to go on."""
