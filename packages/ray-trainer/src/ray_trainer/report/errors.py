"""The one error of the report."""

from __future__ import annotations

from ray_trainer.errors import TrainerError


class ReportError(TrainerError):
    """A metric, a picture or a run folder that the report cannot use; the message says what to change."""
