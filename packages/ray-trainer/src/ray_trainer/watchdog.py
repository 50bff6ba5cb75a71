"""The watchdog: rules over the metrics of a run that tell when training collapses or games its reward.

It computes nothing of its own: every rule reads metrics that the row has. `trainer.watchdog.RULE` says from which value on a
rule is broken, for how many steps in a row, and what is then done: a warning, an end, or the weights of the last checkpoint from
before the rule was broken. `docs/metrics.md` says what each rule means for a person.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from statistics import fmean, median

from .config import WatchdogConfig, WatchRule
from .errors import TrainerError

Row = Mapping[str, float]
FIRST = 3
"""Steps at the beginning of a run whose pictures the later ones are measured against."""
LAST = 20
"""Steps before this one whose median gradient norm is what is usual."""
MOST_RETURNS = 3
"""How often a run goes back before it ends: a rule that is broken again and again needs other settings."""


@dataclass
class Values:
    """Of one metric, in the rows before: its first values, the last ones, and how many there were."""

    first: list[float] = field(default_factory=list)
    last: deque[float] = field(default_factory=lambda: deque(maxlen=LAST))
    count: int = 0

    def add(self, value: float) -> None:
        """The next."""
        if self.count < FIRST:
            self.first.append(value)
        self.last.append(value)
        self.count += 1


History = Mapping[str, Values]
"""Of each metric; a run of any length has the same size here."""


@dataclass(frozen=True)
class Broken:
    """A rule that is broken now, since a step, and why."""

    name: str
    rule: WatchRule
    value: float
    since: int
    reason: str


class Watchdog:
    """Looks at the metrics of every step.

    Args:
        config: the rules.
        rows: of the steps before, when a run goes on: what was broken then counts.
    """

    def __init__(self, config: WatchdogConfig, rows: Iterable[Row] = ()):
        self.config, self.returns = config, 0
        self._before = defaultdict[str, Values](Values)
        self._broken: dict[str, int] = {}  # steps in a row
        for row in rows:
            self.look(int(row["step"]), row)
            if "watchdog/went_back_to" in row:
                self.went_back()
            self.remember(row)

    def remember(self, row: Row) -> None:
        """A row that is done, with its validation: later ones are measured against it."""
        for name, value in row.items():
            self._before[name].add(value)

    def look(self, step: int, metrics: Row) -> list[Broken]:
        """The rules that have been broken for as many steps as they allow, once for each time that it happens.

        Args:
            step: done.
            metrics: of this step, without its validation; the caller then gives the whole row to `remember`.
        """
        found = []
        for name, (measure, above, words) in RULES.items():
            rule: WatchRule = getattr(self.config, name)
            value = None if rule.action == "off" else measure(metrics, self._before, self.config)
            bad = value is not None and not (value <= rule.bound if above else value >= rule.bound)  # NaN is bad
            self._broken[name] = self._broken.get(name, 0) + 1 if bad else 0
            if value is not None and self._broken[name] == rule.steps:
                reason = f"{words.format(value=value)} (trainer.watchdog.{name}.bound={rule.bound:g}"
                reason += f", {rule.steps} steps in a row)" if rule.steps > 1 else ")"
                found.append(Broken(name, rule, value, step - rule.steps + 1, reason))
        return found

    def went_back(self) -> None:
        """Older weights train on: counting begins anew."""
        self.returns += 1
        self._broken.clear()


def check_held_out(config: WatchdogConfig, validation: Row) -> None:
    """Raise `TrainerError` where the first validation lacks a measure that `trainer.watchdog.held_out` names."""
    known = [key[4:-5] for key in validation if key.startswith("val/") and key.endswith("_mean")]
    for name in config.held_out:
        if name not in known:
            raise TrainerError(f"trainer.watchdog.held_out names {name!r}, and validation has {', '.join(known)}")


def _flat(now: Row, _: History, __: WatchdogConfig) -> float | None:
    if now.get("advantages/groups"):
        return now["advantages/equal_groups"] / now["advantages/groups"]
    return float(now["pairs/pairs"] == 0) if "pairs/pairs" in now else None


def _ratio(now: Row, _: History, __: WatchdogConfig) -> float | None:
    if "actor/ratio_max" not in now:
        return None
    low = now.get("actor/ratio_min", 1.0)
    return max(now["actor/ratio_max"], 1 / low if low > 0 else math.inf)


def _gradient(now: Row, before: History, _: WatchdogConfig) -> float | None:
    usual = [norm for norm in before["actor/grad_norm"].last if norm > 0] if "actor/grad_norm" in before else []
    return now["actor/grad_norm"] / median(usual) if "actor/grad_norm" in now and len(usual) >= FIRST else None


def _against_first(key: str, compare: Callable[[float, float], float]) -> Callable[..., float | None]:
    def measure(now: Row, before: History, _: WatchdogConfig) -> float | None:
        first = before[key].first if key in before else []
        if key not in now or len(first) < FIRST or fmean(first) <= 0:
            return None
        return compare(now[key], fmean(first))

    return measure


def _hacking(_: Row, before: History, config: WatchdogConfig) -> float | None:
    """How many standard errors the worst held-out measure has fallen since the first validation, while the reward rose."""
    rewards, validations = before.get("reward/mean"), before.get("val/reward_mean")
    if rewards is None or rewards.count < 2 * FIRST or validations is None or validations.count < 2:
        return None
    if fmean([*rewards.last][-FIRST:]) <= fmean(rewards.first):
        return None
    held = [(before.get(f"val/{name}_mean"), before.get(f"val/{name}_stderr")) for name in config.held_out]
    falls = [
        (mean.first[0] - mean.last[-1]) / max(math.hypot(error.first[0], error.last[-1]), 1e-9)
        for mean, error in held
        if mean and error
    ]
    return max((fall for fall in falls if math.isfinite(fall)), default=None)


RULES: dict[str, tuple[Callable[[Row, History, WatchdogConfig], float | None], bool, str]] = {
    "flat_groups": (_flat, True, "{value:.0%} of the prompts have samples of one reward, which teach nothing"),
    "ratio": (_ratio, True, "a policy ratio is {value:.3g} away from 1"),
    "kl": (lambda now, _, __: now.get("actor/kl_loss"), True, "the KL to the base model is {value:.3g}"),
    "grad_norm": (_gradient, True, "the gradient norm is {value:.3g} times that of the steps before"),
    "saturation": (
        _against_first("rollout/saturation", lambda now, first: now - first), True,
        "the pictures' saturation has risen by {value:.2f} of 1",
    ),
    "sharpness": (
        _against_first("rollout/sharpness", lambda now, first: now / first), False,
        "the pictures' sharpness is {value:.0%} of what it was",
    ),
    "diversity": (
        _against_first("rollout/diversity", lambda now, first: now / first), False,
        "the pictures of a prompt differ by {value:.0%} of what they did",
    ),
    "hacking": (_hacking, True, "the training reward rises and a held-out measure has fallen by {value:.1f} standard errors"),
}  # fmt: skip
"""Of each rule of `WatchdogConfig`: its measure (None where there is none), whether larger is worse, and its words."""
assert list(RULES) == [f.name for f in fields(WatchdogConfig) if f.name != "held_out"]
