"""`ImageRewardManager`: scores one finished sample, and the batch forms around it.

run_single(data) -> {"reward_score", "reward_extra_info"}      one sample, from an agent loop
default_compute_score_image(data_source, picture, target)      which reward a data source means
samples_from_tensordict / results_to_tensordict                the trainer's batches
"""

from __future__ import annotations

import asyncio
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from image_rewards.base import Reward, RewardResult, RewardSample
from image_rewards.errors import RewardInputError, UnknownRewardError, missing_extra
from image_rewards.functions import as_reward
from image_rewards.registry import available, load

DATA_SOURCES = {
    "tiny_shapes": "shapes",
    "jpeg_compressibility": "jpeg_compressibility",
    "jpeg_incompressibility": "jpeg_incompressibility",
}


class ImageRewardManager:
    """Holds one reward and scores with it. reward: name, instance, class or function; options: as for `image_rewards.load`.

    Without a reward, each sample's `data_source` picks one (`default_compute_score_image`).
    """

    def __init__(
        self,
        reward: str | Reward | type[Reward] | Callable[..., Any] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.reward: Reward | None = None
        if isinstance(reward, str):
            self.reward = load(reward, **dict(options or {}))
        elif reward is not None or options:
            self.reward = as_reward(reward, options)

    def score(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        """Results in order. An exception becomes a failed result with its traceback; then samples are tried one by one,
        so that one bad sample does not take its batch along."""
        if self.reward is None:
            return [self._guard([sample])[0] for sample in samples]
        results = self._guard(samples)
        if len(samples) > 1 and any(result.error is not None and result.retryable for result in results):
            return [self._guard([sample])[0] for sample in samples]
        return results

    async def run_single(self, data: RewardSample | Mapping[str, Any]) -> dict[str, Any]:
        """Score one sample without blocking the event loop.

        data: a `RewardSample` or a mapping with its fields (`image` may also be called `responses`).
        Returns reward_score (float, NaN on failure) and reward_extra_info (the components, and "error" on failure).
        """
        sample = data if isinstance(data, RewardSample) else sample_from_mapping(data)
        result = (await asyncio.to_thread(self.score, [sample]))[0]
        extra: dict[str, Any] = dict(result.components)
        if result.error is not None:
            extra["error"] = result.error
        return {"reward_score": result.score, "reward_extra_info": extra}

    def _guard(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        try:
            if self.reward is None:
                return [
                    default_compute_score_image(s.data_source, s.image, s.metadata, {"prompt": s.prompt})
                    for s in samples
                ]
            return self.reward.score(samples)
        except Exception as error:
            text = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
            return [RewardResult.failed(text, retryable=True) for _ in samples]


@lru_cache(maxsize=16)
def _cached(name: str) -> Reward:
    return load(name)


def default_compute_score_image(
    data_source: str,
    solution_image: np.ndarray,
    ground_truth: Mapping[str, Any] | None = None,
    extra_info: Mapping[str, Any] | None = None,
) -> RewardResult:
    """Score a picture with the reward that its data source means.

    data_source     "tiny_shapes" or a reward's name; of "owner/name" the last part counts
    solution_image  uint8 [3,H,W]
    ground_truth    the sample's metadata
    extra_info      may hold "prompt"
    """
    short = data_source.rsplit("/", 1)[-1]
    name = DATA_SOURCES.get(short, short)
    if name not in available():
        raise UnknownRewardError(
            f"data_source={data_source!r} means no reward. Known: {', '.join(sorted({*DATA_SOURCES, *available()}))}. "
            "Name the reward in the config instead."
        )
    prompt = str((extra_info or {}).get("prompt", ""))
    return _cached(name)(RewardSample(solution_image, prompt, dict(ground_truth or {}), data_source=data_source))


def sample_from_mapping(data: Mapping[str, Any]) -> RewardSample:
    """A sample from a mapping with keys image (or responses), prompt, metadata, uid, index, data_source."""
    image = data.get("image", data.get("responses"))
    if image is None:
        raise RewardInputError(f"no picture: neither 'image' nor 'responses' is among {', '.join(map(str, data))}.")
    return RewardSample(
        image=image if isinstance(image, np.ndarray) else np.asarray(image),
        prompt=str(data.get("prompt", "")),
        metadata=dict(data.get("metadata") or {}),
        uid=str(data.get("uid", "")),
        index=int(data.get("index", 0)),
        data_source=str(data.get("data_source", "")),
    )


def samples_from_tensordict(data: Any) -> list[RewardSample]:
    """One sample per row: `responses` uint8 [B,3,H,W] or [B,T,3,H,W]; other keys as in `sample_from_mapping`."""
    pictures = data["responses"].detach().cpu().numpy()

    def column(key: str, default: Any) -> list[Any]:
        if key not in data.keys():  # noqa: SIM118  (a TensorDict is no dict)
            return [default] * len(pictures)
        values = data[key]
        return values.tolist() if hasattr(values, "tolist") else list(values)

    columns = {"prompt": "", "metadata": {}, "uid": "", "index": 0, "data_source": ""}
    rows = zip(*(column(key, default) for key, default in columns.items()), strict=True)
    return [
        sample_from_mapping({"image": picture, **dict(zip(columns, row, strict=True))})
        for picture, row in zip(pictures, rows, strict=True)
    ]


def results_to_tensordict(results: Sequence[RewardResult]) -> Any:
    """rm_scores fp32 [B,1], and per row reward_components (dict) and reward_error (text)."""
    try:
        import torch
        from tensordict import NonTensorData, NonTensorStack, TensorDict
    except ImportError as error:
        raise missing_extra("tensordict", "tensordict", "compute_rm_score") from error
    scores = torch.tensor([[result.score] for result in results], dtype=torch.float32).reshape(len(results), 1)
    out = TensorDict({"rm_scores": scores}, batch_size=[len(results)])
    out["reward_components"] = NonTensorStack(*[NonTensorData(dict(r.components)) for r in results])
    out["reward_error"] = NonTensorStack(*[NonTensorData(r.error or "") for r in results])
    return out


def mean_components(results: Sequence[RewardResult]) -> dict[str, float]:
    """Mean of every component over the results that have it, failures left out; plus `failed`, their share."""
    names = sorted({name for result in results for name in result.components})
    means = {
        name: math.fsum(values) / len(values)
        for name in names
        if (values := [r.components[name] for r in results if r.ok and name in r.components])
    }
    means["failed"] = sum(not result.ok for result in results) / len(results) if results else 0.0
    return means
