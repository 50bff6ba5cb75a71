"""Means and standard errors of a validation, clustered by prompt, and paired differences between two of them.

The samples of one prompt are not independent, so a prompt counts as one observation: the mean over its samples. Between
two validations of the same prompts and seeds the difference is taken prompt by prompt, without the prompts' own spread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .gallery import Validation


@dataclass(frozen=True)
class Estimate:
    """A mean with its standard error; NaN where it cannot be told (no prompts, or one)."""

    mean: float
    stderr: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {self.stderr:.3f}"


@dataclass(frozen=True)
class Change:
    """One measure before and after: `difference` is paired by prompt."""

    name: str
    before: Estimate
    after: Estimate
    difference: Estimate

    @property
    def gain(self) -> str:
        """The difference as text, with its sign."""
        return f"{self.difference.mean:+.3f} ± {self.difference.stderr:.3f}"

    @property
    def z(self) -> float:
        """The difference in standard errors; NaN when the error is zero or unknown."""
        return self.difference.mean / self.difference.stderr if self.difference.stderr > 0 else math.nan


def estimate(per_prompt: Sequence[float]) -> Estimate:
    """Mean and standard error of per-prompt values; NaNs (a prompt without a value) are left out."""
    values = np.array([value for value in per_prompt if math.isfinite(value)])
    if values.size == 0:
        return Estimate(math.nan, math.nan)
    stderr = float(values.std(ddof=1) / math.sqrt(values.size)) if values.size > 1 else math.nan
    return Estimate(float(values.mean()), stderr)


def measures(validation: Validation) -> list[str]:
    """ "reward" and the components in the order in which the reward lists them."""
    names = dict.fromkeys(name for record in validation.records for name in record.components)
    return ["reward", *names]


def per_prompt(validation: Validation, name: str) -> dict[int, float]:
    """Mean of one measure over the samples of each row (prompt), failed samples (NaN) left out."""
    values: dict[int, list[float]] = {}
    for record in validation.records:
        values.setdefault(record.row, []).append(record.value(name))
    return {row: _mean(entries) for row, entries in values.items()}


def summarize(validation: Validation) -> dict[str, Estimate]:
    """Every measure of a validation with its standard error over prompts."""
    return {name: estimate(list(per_prompt(validation, name).values())) for name in measures(validation)}


def paired_rows(before: Validation, after: Validation) -> dict[int, int]:
    """Rows of `before` → rows of `after` that hold the same prompt with the same seeds, whatever their uids are."""

    def keys(validation: Validation) -> dict[tuple[str, tuple[int, ...], int], int]:
        seeds: dict[int, list[int]] = {}
        prompts: dict[int, str] = {}
        for record in validation.records:
            seeds.setdefault(record.row, []).append(record.seed)
            prompts[record.row] = record.prompt
        found: dict[tuple[str, tuple[int, ...], int], int] = {}
        for row in sorted(prompts):
            repeat = 0
            while (key := (prompts[row], tuple(seeds[row]), repeat)) in found:
                repeat += 1  # the same prompt and seeds twice: matched in order
            found[key] = row
        return found

    target = keys(after)
    return {row: target[key] for key, row in keys(before).items() if key in target}


def compare(before: Validation, after: Validation) -> list[Change]:
    """Each measure of both validations, with the paired difference over the prompts that both hold."""
    pairs = paired_rows(before, after)
    changes = []
    for name in [name for name in measures(before) if name in measures(after)]:
        old, new = per_prompt(before, name), per_prompt(after, name)
        difference = [new[b] - old[a] for a, b in pairs.items()]
        changes.append(Change(name, estimate(list(old.values())), estimate(list(new.values())), estimate(difference)))
    return changes


def _mean(values: list[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan
