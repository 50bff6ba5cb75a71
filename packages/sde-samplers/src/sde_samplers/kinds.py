"""The kinds of step: one `SamplerKind` each, found by name. Imports without torch.

A kind is its formula. It names the function by import path, or holds it where both are written in one file:

    MINE = SamplerKind(my_formula)          # in my_kinds.py

which `kind="my_kinds:MINE"` uses, in whatever process the step is drawn or scored. An installed package offers kinds by the
entry-point group `sde_samplers`.
"""

from __future__ import annotations

import difflib
import functools
import math
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Literal

from .errors import SamplerError

ENTRY_POINT_GROUP = "sde_samplers"

Kind = str
"""A name in `KINDS`, of an entry point, or "module:attribute"."""

LogProbForm = Literal["density", "density_no_constants", "squared_error"]
LOG_PROB_FORMS: tuple[LogProbForm, ...] = ("density", "density_no_constants", "squared_error")


@dataclass(frozen=True)
class SamplerKind:
    """One kind of step: `mean = a x + b v`, `x_u = mean + S z`.

    Args:
        formula: `f(t, u, eta, cap) -> (a, b, S)`, or its import path "module:name". The step goes from sigma t to u < t, eta is
            the noise level, cap the schedule's second entry. eta is a float; t, u, cap, a, b and S are floats, or float64
            tensors [B] where samples differ.
        stochastic: False for a step without noise, which has no log-probability.
        has_noise_level: False where the noise has one size, whatever eta is. With a level, 0 means the step of "ode".
        most_noise: the largest noise level.
        needs_cap: cap enters the formula at every step.
        log_prob_form: the form that is used when none is asked for, see `logprob`.
    """

    formula: Callable[..., Any] | str
    stochastic: bool = True
    has_noise_level: bool = True
    most_noise: float = math.inf
    needs_cap: bool = False
    log_prob_form: LogProbForm = "density"

    def load(self) -> Callable[..., Any]:
        """The formula, imported where it is needed."""
        if not isinstance(self.formula, str):
            return self.formula
        loaded: Callable[..., Any] = pkgutil.resolve_name(self.formula)
        return loaded

    def draws(self, noise_level: float) -> bool:
        """Whether a step adds noise, and so has a log-probability."""
        return self.stochastic and (not self.has_noise_level or float(noise_level) != 0.0)


KINDS: dict[str, SamplerKind] = {
    "flow_sde": SamplerKind("sde_samplers.coefficients:flow_sde"),
    "dance_sde": SamplerKind("sde_samplers.coefficients:dance_sde"),
    "flow_cps": SamplerKind("sde_samplers.coefficients:flow_cps", most_noise=1.0, log_prob_form="squared_error"),
    "ddim": SamplerKind("sde_samplers.coefficients:ddim", most_noise=1.0),
    "wan_sde": SamplerKind("sde_samplers.coefficients:wan_sde", has_noise_level=False, needs_cap=True),
    "ode": SamplerKind("sde_samplers.coefficients:ode", stochastic=False),
}


@functools.cache
def find_kind(name: Kind) -> SamplerKind:
    """The kind of that name.

    Raises:
        SamplerError: an unknown name (the nearest is given), a module that cannot be imported, or no `SamplerKind` there.
    """
    if name in KINDS:
        return KINDS[name]
    point = next(iter(entry_points(group=ENTRY_POINT_GROUP, name=name)), None)
    if point is None and ":" not in name:
        known = [*KINDS, *(one.name for one in entry_points(group=ENTRY_POINT_GROUP))]
        near = difflib.get_close_matches(name, known, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise SamplerError(
            f"kind={name!r} is unknown{hint}; use one of {', '.join(known)}, or 'module:attribute' of a SamplerKind"
        )
    try:
        found = pkgutil.resolve_name(name) if point is None else point.load()
    except (ImportError, AttributeError, ValueError) as error:
        raise SamplerError(f"kind={name!r} cannot be imported: {error}") from error
    if not isinstance(found, SamplerKind):
        raise SamplerError(f"kind={name!r} is a {type(found).__name__}; give a sde_samplers.SamplerKind")
    return found


def check_noise_level(kind: Kind, noise_level: float) -> float:
    """The noise level as a float; SamplerError when it is no number, negative, or more than the kind takes."""
    try:
        eta = float(noise_level)
    except (TypeError, ValueError):
        raise SamplerError(f"noise_level={noise_level!r} must be a number (the noise level η)") from None
    if not math.isfinite(eta) or eta < 0:
        raise SamplerError(f"noise_level={noise_level!r} must be finite and not negative")
    if eta > find_kind(kind).most_noise:
        raise SamplerError(
            f"noise_level={noise_level!r} with kind={kind!r} must lie in [0, {find_kind(kind).most_noise:g}]"
        )
    return eta
