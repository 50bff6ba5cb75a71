"""What a run leaves for people to look at: metrics.jsonl, the pictures of each validation, report.html, one live line.

Pure functions over files; needs numpy and Pillow, imports neither torch nor Ray.
"""

from .alarms import Alarm, load_alarms, save_alarms
from .changes import comparable, load_changes, save_changes
from .environment import save_environment
from .errors import ReportError
from .gallery import load_validations, save_validation, truncate_validations
from .live import LiveLine, working
from .metrics import MetricsWriter, read_metrics
from .page import write_report
from .stats import compare, estimate, summarize

__all__ = [
    "Alarm",
    "LiveLine",
    "MetricsWriter",
    "ReportError",
    "comparable",
    "compare",
    "estimate",
    "load_alarms",
    "load_changes",
    "load_validations",
    "read_metrics",
    "save_alarms",
    "save_changes",
    "save_environment",
    "save_validation",
    "summarize",
    "truncate_validations",
    "working",
    "write_report",
]
