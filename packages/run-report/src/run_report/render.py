"""The page's templates, and how they write numbers."""

from __future__ import annotations

import math
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup


def number(value: float) -> str:
    """Three significant digits, exponents only where they help: 0.652, 12.4, 1340, 8.4e-05."""
    if not math.isfinite(value):
        return "–"
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        digits = 3 if abs(value) < 10 else 1 if abs(value) < 100 else 0
        return f"{value:.{digits}f}"
    return f"{value:.1e}"


def duration(seconds: float) -> str:
    """ "45s", "3m 20s", "2h 05m"."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"


def _fixed(value: float) -> str:
    """Two decimals, so that columns line up."""
    return f"{value:.2f}" if math.isfinite(value) else "–"


def _compact(value: float) -> str:
    short = math.isfinite(value) and abs(value) < 100
    return f"{value:.2f}".rstrip("0").rstrip(".") if short else number(value)


def _tick(value: float) -> str:
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:g}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


_TEMPLATES = Environment(
    loader=PackageLoader("run_report", "templates"),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=StrictUndefined,
)
_TEMPLATES.filters |= {"number": number, "fixed": _fixed, "compact": _compact, "tick": _tick}
_TEMPLATES.tests["finite"] = math.isfinite


def render(template: str, /, **values: Any) -> Markup:
    """A template of this package as HTML; every value is escaped."""
    return Markup(_TEMPLATES.get_template(template).render(**values))
