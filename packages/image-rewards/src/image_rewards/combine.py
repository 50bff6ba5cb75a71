"""`combine`: a weighted sum of rewards, each brought to a common scale first.

    load("combine", parts=[
        {"reward": "ocr", "weight": 1.0},
        {"reward": "jpeg_compressibility", "weight": 0.2, "low": -8.0, "high": 0.0},
        {"reward": "sharpness", "component": "blank", "weight": 0.0, "at_most": 0.5},
    ])

Scales are fixed numbers. With a batch's mean, a picture's score would depend on the other pictures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from .base import Reward, RewardResult, RewardSample
from .errors import require
from .functions import as_reward
from .registry import load


@dataclass(frozen=True)
class Part:
    """One reward in the sum.

    Args:
        reward, options: name and options, as for `load`; or a ready `Reward`
        component: use this component instead of the reward's score
        weight: 0 logs the part without optimising it
        low, high: map [low, high] to [0, 1] (both or neither)
        mean, std: map to (x - mean) / std (both or neither)
        clip: after scaling, keep within (lowest, highest)
        at_least, at_most: thresholds on the raw value: a sample outside gets the sum's `gated_score`
        required: True: when this part fails the sample fails. False: `missing` stands in for the scaled value
    """

    reward: str | Reward
    options: Mapping[str, Any] = field(default_factory=dict)
    component: str | None = None
    weight: float = 1.0
    low: float | None = None
    high: float | None = None
    mean: float | None = None
    std: float | None = None
    clip: tuple[float, float] | None = None
    at_least: float | None = None
    at_most: float | None = None
    required: bool = True
    missing: float | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        low, high, mean, std, clip = self.low, self.high, self.mean, self.std, self.clip
        faults = {
            f"weight={self.weight!r} is not a finite number.": not math.isfinite(self.weight),
            "low and high go together, and so do mean and std.": (low is None) != (high is None)
            or (mean is None) != (std is None),
            "choose low and high, or mean and std, not both.": low is not None and mean is not None,
            f"low={low!r} must be less than high={high!r}.": low is not None and high is not None and not low < high,
            f"std={std!r} must be positive.": std is not None and not std > 0,
            f"clip={clip!r} must be (lowest, highest).": clip is not None
            and not (len(clip) == 2 and clip[0] <= clip[1]),
            "it is optional but has no value for when it fails. Give missing=NUMBER (on the scaled range), so that a failure "
            "cannot pass as a score that nobody chose.": not self.required and self.missing is None,
        }
        for fault, found in faults.items():
            require(not found, f"part {self.label!r}: {fault}")

    @property
    def label(self) -> str:
        if self.name:
            return self.name
        base = self.reward if isinstance(self.reward, str) else self.reward.name
        return f"{base}.{self.component}" if self.component else base

    def scale(self, value: float) -> float:
        """Raw value to the common scale."""
        if self.low is not None and self.high is not None:
            value = (value - self.low) / (self.high - self.low)
        elif self.mean is not None and self.std is not None:
            value = (value - self.mean) / self.std
        return min(max(value, self.clip[0]), self.clip[1]) if self.clip is not None else value

    def passes(self, value: float) -> bool:
        """Whether the raw value is inside the thresholds."""
        return (self.at_least is None or value >= self.at_least) and (self.at_most is None or value <= self.at_most)


class CombinedReward(Reward):
    """score = sum of weight * scaled value, then `clip`.

    Args:
        parts: dictionaries or `Part`s. The same reward with the same options runs once, however many parts read it
        clip: (lowest, highest) of the sum
        gated_score: score of a sample that misses a threshold of some part (it keeps its components, and `gated` is 1)

    Components: "<part>" scaled, "<part>.raw", the parts' own components as "<reward>/<component>", gated,
    missing_parts.
    """

    name = "combine"
    video = True  # pictures and videos pass through; each part decides

    def __init__(
        self,
        parts: Sequence[Mapping[str, Any] | Part],
        clip: tuple[float, float] | None = None,
        gated_score: float = 0.0,
    ) -> None:
        require(len(parts) > 0, "combine needs at least one part.")
        self.parts = [part if isinstance(part, Part) else _part(part) for part in parts]
        labels = [part.label for part in self.parts]
        for label in labels:
            require(labels.count(label) == 1, f"parts share the name {label!r}. Give each its own name=.")
        require(any(part.weight for part in self.parts), "every part has weight 0, so every score would be 0.")
        self.clip, self.gated_score = clip, gated_score
        self.rewards: dict[str, Reward] = {}
        self.sources: list[str] = []  # for each part, the key in `rewards`
        for part in self.parts:
            named = isinstance(part.reward, str)
            key = f"{part.reward}{sorted(part.options.items())}" if named else str(id(part.reward))
            if key not in self.rewards:
                self.rewards[key] = load(part.reward, **part.options) if isinstance(part.reward, str) else part.reward
            self.sources.append(key)
        latent = [reward.name for reward in self.rewards.values() if reward.inputs == "latents"]
        require(
            not latent,
            f"{latent} read latents, and these parts share a picture; put them beside it, in reward.several.",
        )

    def check_target(self, prompt: str, metadata: Mapping[str, Any]) -> None:
        for part, key in zip(self.parts, self.sources, strict=True):
            if part.required:
                self.rewards[key].check_target(prompt, metadata)

    def target_of(self, prompt: str, metadata: Mapping[str, Any]) -> Any:
        found = {
            part.label: self.rewards[key].target_of(prompt, metadata)
            for part, key in zip(self.parts, self.sources, strict=True)
            if part.required
        }
        return {label: target for label, target in found.items() if target is not None} or None

    def sleep(self) -> None:
        for reward in self.rewards.values():
            reward.sleep()

    def close(self) -> None:
        for reward in self.rewards.values():
            reward.close()

    def score_valid(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        scored = {key: reward.score(samples) for key, reward in self.rewards.items()}
        return [self._sum({key: results[i] for key, results in scored.items()}) for i in range(len(samples))]

    def _sum(self, results: Mapping[str, RewardResult]) -> RewardResult:
        total, gated, missing = 0.0, False, 0
        components: dict[str, float] = {}
        for part, key in zip(self.parts, self.sources, strict=True):
            result = results[key]
            for name, value in result.components.items():
                components[f"{self.rewards[key].name}/{name}"] = value
            error = result.error
            raw = result.score if part.component is None else result.components.get(part.component)
            if error is None and raw is None:
                error = f"no component {part.component!r}; there are {', '.join(result.components) or 'none'}"
            if error is not None or raw is None:
                if part.required:
                    return RewardResult(math.nan, components, f"part {part.label!r}: {error}", result.retryable)
                missing += 1
                scaled = float(part.missing or 0.0)
            else:
                scaled = part.scale(raw)
                gated |= not part.passes(raw)
                components[f"{part.label}.raw"] = raw
            components[part.label] = scaled
            total += part.weight * scaled
        if self.clip is not None:
            total = min(max(total, self.clip[0]), self.clip[1])
        components["gated"], components["missing_parts"] = float(gated), float(missing)
        return RewardResult(self.gated_score if gated else total, components)


def _part(given: Mapping[str, Any]) -> Part:
    known = [f.name for f in fields(Part)]
    for key in given:
        require(key in known, f"part {dict(given)!r} has the unknown key {key!r}. Keys: {', '.join(known)}.")
    require("reward" in given, f"part {dict(given)!r} names no reward. Keys: {', '.join(known)}.")
    values = dict(given)
    if values.get("clip") is not None:
        values["clip"] = tuple(values["clip"])
    if not isinstance(values["reward"], str):  # a class or a function
        values["reward"] = as_reward(values["reward"], values.pop("options", None))
    return Part(**values)
