"""Rewards for pictures, on videos: a named rule makes one score of the frames' scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .base import Reward, RewardResult, RewardSample
from .errors import require

AGGREGATES: dict[str, Callable[[np.ndarray], float]] = {
    "mean": lambda x: float(x.mean()),
    "min": lambda x: float(x.min()),
    "max": lambda x: float(x.max()),
    "median": lambda x: float(np.median(x)),
    "first": lambda x: float(x[0]),
    "last": lambda x: float(x[-1]),
}


class VideoReward(Reward):
    """Scores frames with `inner` and joins them with `aggregate`; a picture counts as a video of one frame.

    A frame that fails makes the video fail, with the frame's number in the error.
    """

    video = True

    def __init__(self, inner: Reward, aggregate: str = "mean") -> None:
        known = ", ".join(AGGREGATES)
        require(
            inner.inputs == "pixels", f"reward {inner.name!r} reads latents, which have no frames to score one by one"
        )
        require(aggregate in AGGREGATES, f"aggregate={aggregate!r} is unknown. Choose one of {known}.")
        self.inner, self.aggregate, self.batch_size = inner, aggregate, inner.batch_size
        self.name = f"{inner.name}:{aggregate}"  # type: ignore[misc]

    def check_target(self, prompt: str, metadata: Mapping[str, Any]) -> None:
        self.inner.check_target(prompt, metadata)

    def target_of(self, prompt: str, metadata: Mapping[str, Any]) -> Any:
        return self.inner.target_of(prompt, metadata)

    def sleep(self) -> None:
        self.inner.sleep()

    def close(self) -> None:
        self.inner.close()

    def frame_numbers(self, total: int) -> list[int]:
        """Which of `total` frames are scored."""
        return {"first": [0], "last": [total - 1]}.get(self.aggregate, list(range(total)))

    def score_valid(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        frames: list[RewardSample] = []
        owners: list[list[int]] = []  # frame numbers of each sample
        for sample in samples:
            stack = sample.image if sample.image.ndim == 4 else sample.image[None]
            owners.append(self.frame_numbers(len(stack)))
            frames.extend(replace(sample, image=stack[number]) for number in owners[-1])
        scored = iter(self.inner.score(frames))
        return [self._join([next(scored) for _ in numbers], numbers) for numbers in owners]

    def _join(self, results: list[RewardResult], numbers: list[int]) -> RewardResult:
        for result, number in zip(results, numbers, strict=True):
            if result.error is not None:
                return replace(result, error=f"frame {number}: {result.error}")
        join = AGGREGATES[self.aggregate]
        keys = {key for result in results for key in result.components}
        components = {k: join(np.array([r.components[k] for r in results if k in r.components])) for k in sorted(keys)}
        components["frames"] = float(len(results))
        return RewardResult(join(np.array([r.score for r in results], dtype=np.float64)), components)
