"""The one error of the report."""

from __future__ import annotations


class ReportError(ValueError):
    """A metric, a picture or a run folder that the report cannot use; the message says what to change."""
