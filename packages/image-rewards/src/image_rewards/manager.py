"""`ImageRewardManager`: one reward, and what happens when it breaks on a batch."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .base import Reward, RewardResult, RewardSample
from .functions import as_reward
from .registry import load


class ImageRewardManager:
    """Scores with one reward. reward: name, instance, class or function; options: as for `image_rewards.load`."""

    def __init__(
        self,
        reward: str | Reward | type[Reward] | Callable[..., Any],
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.reward = load(reward, **dict(options or {})) if isinstance(reward, str) else as_reward(reward, options)

    def score(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        """Results in order. An exception becomes a failed result with its traceback; then samples are tried one by one,
        so that one bad sample does not take its batch along."""
        try:
            results = self.reward.score(samples)
        except Exception as error:
            text = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
            results = [RewardResult.failed(text, retryable=True) for _ in samples]
        if len(samples) > 1 and any(result.error is not None and result.retryable for result in results):
            return [self.score([sample])[0] for sample in samples]
        return results
