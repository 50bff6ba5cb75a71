"""`ImageRewardManager`: one reward, and what happens when it breaks on a batch; batches and samples as verl-omni has them."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

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

    async def run_single(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Score one sample beside whatever else the event loop does.

        Args:
            data: `responses` uint8 [C,H,W] or [T,C,H,W], and where there are any `prompt`, `metadata`, `uid` and `index`.

        Returns:
            `reward_score` (NaN on failure) and `reward_extra_info`: the components, and on failure `error`.
        """
        batch = {key: [value] for key, value in data.items()}
        result = (await asyncio.to_thread(self.score, samples_of(batch)))[0]
        extra = result.components if result.error is None else {**result.components, "error": result.error}
        return {"reward_score": result.score, "reward_extra_info": extra}


def samples_of(data: Mapping[str, Any]) -> list[RewardSample]:
    """The rows of a batch (a dict or a TensorDict): `responses` uint8 [B,C,H,W] or [B,T,C,H,W], and where there are any `prompt`,
    `metadata`, `uid` and `index`, one for each row."""
    names = [key for key in ("prompt", "metadata", "uid", "index") if key in data.keys()]
    rows = zip(*(data[key] for key in ("responses", *names)), strict=True)
    return [RewardSample(np.asarray(picture), **dict(zip(names, row, strict=True))) for picture, *row in rows]


def default_compute_score_image(
    data_source: str,
    solution_image: np.ndarray,
    ground_truth: Mapping[str, Any] | None = None,
    extra_info: Mapping[str, Any] | None = None,
) -> float:
    """The score of one picture under the reward that its data source is called after.

    Args:
        data_source: a reward's name, "owner/name" too.
        solution_image: uint8 [3,H,W].
        ground_truth: the metadata that the reward reads.
        extra_info: may hold `prompt`.

    Raises:
        UnknownRewardError: no reward has that name.
        RewardError: a picture or metadata that it cannot score.
    """
    prompt = str((extra_info or {}).get("prompt", ""))
    return load(data_source.rpartition("/")[2])(RewardSample(solution_image, prompt, ground_truth or {})).unwrap()
