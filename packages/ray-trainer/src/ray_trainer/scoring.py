"""Every reward of a run: its pool of workers and where that lies, the scores of a sample together, and the advantages of a batch.

One reward, or several by name (`reward.several`). A prompt of a source that names rewards is scored by those alone.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from diffusion_losses import AdvantageOutput, combined_advantages, group_advantages
from image_rewards import RewardResult, RewardSample
from image_rewards.loop import RewardLoopManager
from omni_rollout.loop_base import Score
from omni_rollout.types import GenerationRequest
from tensordict import TensorDict

from .config import NamedReward, RunConfig


class Scoring:
    """The rewards of a run.

    Args:
        config: of the run.
    """

    def __init__(self, config: RunConfig):
        self.config, self.rewards = config, config.reward.each
        self.pools = {name: self._pool(reward) for name, reward in self.rewards.items()}

    def _pool(self, reward: NamedReward) -> RewardLoopManager:
        frames = self.config.rollout.pipeline.num_frames
        return RewardLoopManager(
            reward.name,
            reward.options,
            num_workers=reward.num_workers,
            policy=reward.policy,
            value=reward.failure_value,
            max_retries=reward.max_retries,
            timeout_s=reward.timeout_s + reward.frame_timeout_s * frames,
            num_cpus=reward.num_cpus,
            concurrency=reward.concurrency,
            batch_size=max(reward.batch_size // frames, 1),
        )

    # ---- scores ----------------------------------------------------------------------------------------------------------

    def source_of(self, uid: str) -> str:
        """The name in `data.sources` of a request's prompt; empty without sources."""
        return uid.rpartition("/")[2].partition("-")[0] if self.config.data.sources else ""

    async def score(self, requests: Sequence[GenerationRequest], pictures: Sequence[Any]) -> list[Score]:
        """Score, components and error of each sample.

        Of several rewards the score is the weighted sum, the components are each one's own score by its name and its own
        components as NAME_component, and `source_NAME` is the score again where there are sources.
        """
        samples = [
            RewardSample(picture, one.prompt, dict(one.metadata), uid=one.uid, index=one.index)
            for one, picture in zip(requests, pictures, strict=True)
        ]
        sources = [self.source_of(request.uid) for request in requests]
        asked = {
            name: [i for i, one in enumerate(sources) if name in self.config.rewards_of(one)] for name in self.rewards
        }
        answers = await asyncio.gather(
            *(self.pools[name].score_all([samples[i] for i in which]) for name, which in asked.items() if which)
        )
        found: list[dict[str, RewardResult]] = [{} for _ in samples]
        for (name, which), results in zip(((n, w) for n, w in asked.items() if w), answers, strict=True):
            for i, result in zip(which, results, strict=True):
                found[i][name] = result
        return [self._together(results, source) for results, source in zip(found, sources, strict=True)]

    def _together(self, results: Mapping[str, RewardResult], source: str) -> Score:
        if "" in results:
            total, components = results[""].score, dict(results[""].components)
        else:
            total = sum(self.rewards[name].weight * result.score for name, result in results.items())
            components = {name: result.score for name, result in results.items() if math.isfinite(result.score)}
            for name, result in results.items():
                components |= {f"{name}_{part}": value for part, value in result.components.items()}
        if source and math.isfinite(total):
            components[f"source_{source}"] = total
        errors = [f"{name}: {one.error}" if name else one.error for name, one in results.items() if one.error]
        return total, components, errors[0] if errors else None

    # ---- advantages ------------------------------------------------------------------------------------------------------

    def advantages(self, batch: TensorDict) -> AdvantageOutput:
        """Of every sample against its own prompt's group, as `reward.combine` says."""
        algorithm, scores, groups = self.config.algorithm, batch["rm_scores"][:, 0], list(batch["uid"])
        how: dict[str, Any] = {
            "std": algorithm.advantage_std,
            "ddof": algorithm.advantage_ddof,
            "eps": algorithm.advantage_eps,
        }
        if self.config.reward.combine == "weighted_sum":
            return group_advantages(scores, groups, **how)
        own = {name: [self._score_of(name, *row) for row in self._rows(batch)] for name in self.rewards}
        parts = {name or "reward": torch.tensor(values, dtype=torch.float64) for name, values in own.items()}
        weights = {name or "reward": reward.weight for name, reward in self.rewards.items()}
        return combined_advantages(parts, groups, weights=weights, method="gdpo", **how)

    @staticmethod
    def _rows(batch: TensorDict) -> list[tuple[float, Mapping[str, float], str]]:
        scores = batch["rm_scores"][:, 0].tolist()
        return list(zip(scores, list(batch["reward_components"]), list(batch["uid"]), strict=True))

    def _score_of(self, name: str, total: float, components: Mapping[str, float], uid: str) -> float:
        """A sample's own score by one reward. One that its source does not use is the same for its whole group, and so says
        nothing there."""
        if not math.isfinite(total) or not name:
            return total
        return components[name] if name in self.config.rewards_of(self.source_of(uid)) else 0.0

    def close(self) -> None:
        """End the workers."""
        for pool in self.pools.values():
            pool.shutdown()
