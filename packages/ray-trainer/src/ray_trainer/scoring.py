"""Every reward of a run: its pool of workers and where that lies, the scores of a sample together, and the advantages of a batch.

One reward, or several by name (`reward.several`). A prompt of a source that names rewards is scored by those alone.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from diffusion_losses import AdvantageOutput, combined_advantages, group_advantages
from image_rewards import RewardResult, RewardSample
from image_rewards.functions import inputs_of
from image_rewards.loop import RewardLoopManager
from image_rewards.model import on_gpu
from image_rewards.registry import find
from omni_rollout.loop_base import Score
from omni_rollout.types import GenerationRequest
from tensordict import TensorDict

from .config import NamedReward, RunConfig
from .errors import TrainerError
from .step_metrics import Metrics


class Scoring:
    """The rewards of a run.

    Args:
        config: of the run.
        places: Ray's placement group of each reward that has GPUs of its own.
        trainers: (Ray node, GPU) of those that trainers hold, for rewards that share them.
    """

    def __init__(self, config: RunConfig, places: Mapping[str, Any], trainers: Sequence[tuple[str, str]] = ()):
        self.config, self.rewards = config, config.reward.each
        self._places, self._trainers = places, trainers
        self.inputs = {inputs_of(find(one.name)) for one in self.rewards.values()}
        self.seen = defaultdict[str, list[Sequence[float]]](list)  # of each prompt's samples
        self.pools = {name: self._pool(name, reward) for name, reward in self.rewards.items()}

    def _pool(self, name: str, reward: NamedReward) -> RewardLoopManager:
        drawn = self.config.rollout
        frames, beside = max(drawn.pipeline.num_frames, drawn.val_kwargs.pipeline.num_frames), None
        if reward.share_trainers_gpus:
            if not self._trainers:
                raise TrainerError("reward.share_trainers_gpus=true: the trainers have no GPU; set it to false")
            beside = [self._trainers[int(i * reward.num_gpus)] for i in range(reward.num_workers)]
        return RewardLoopManager(
            reward.name,
            on_gpu(reward.name, reward.options) if reward.num_gpus else reward.options,
            num_workers=reward.num_workers,
            policy=reward.policy,
            value=reward.failure_value,
            max_retries=reward.max_retries,
            timeout_s=reward.timeout_s + reward.frame_timeout_s * frames,
            num_cpus=reward.num_cpus,
            num_gpus=0 if beside else reward.num_gpus,
            concurrency=reward.concurrency,
            batch_size=max(reward.batch_size // frames, 1),
            placement_group=self._places.get(name),
            beside=beside,
        )

    async def leave_gpu(self) -> None:
        """Rewards on the trainers' GPUs give their memory back, until they are asked again."""
        await asyncio.gather(*(self.pools[n].sleep() for n, one in self.rewards.items() if one.share_trainers_gpus))

    # ---- scores ----------------------------------------------------------------------------------------------------------

    async def score(self, requests: Sequence[GenerationRequest], pictures: Sequence[Any]) -> list[Score]:
        """Score, components and error of each sample.

        Of several rewards the score is the weighted sum, the components are each one's own score by its name and its own
        components as NAME_component, and `source_NAME` is the score again where there are sources.
        """
        samples = [
            RewardSample(picture, one.prompt, dict(one.metadata), uid=one.uid, index=one.index)
            for one, picture in zip(requests, pictures, strict=True)
        ]
        sources = [source_of(self.config, request.uid) for request in requests]
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
        for one, by_name in zip(samples, found, strict=True):
            self.seen[one.uid] += [next((result.look for result in by_name.values() if result.look), ())]
        return [self._together(results, source) for results, source in zip(found, sources, strict=True)]

    def _together(self, results: Mapping[str, RewardResult], source: str) -> Score:
        if "" in results:
            total, components = results[""].score, dict(results[""].components)
        else:
            weights = {name: self.rewards[name].weight for name in results}
            total = sum(weight * results[name].score for name, weight in weights.items() if weight)
            components = {
                f"{name}_{part}": value for name, result in results.items() for part, value in result.components.items()
            }
            components |= {name: result.score for name, result in results.items() if math.isfinite(result.score)}
        if source and math.isfinite(total):
            components[f"source_{source}"] = total
        errors = [f"{name}: {one.error}" if name else one.error for name, one in results.items() if one.error]
        return total, components, errors[0] if errors else None

    def looks(self, batch: TensorDict) -> Metrics:
        """`rollout/saturation`, `rollout/sharpness`, and `rollout/diversity`: the standard deviation of a colour in a part of the
        picture over the samples of one prompt. All of 0 to 1; none where no picture was seen."""
        groups = [sorted(map(tuple, self.seen.pop(uid, []))) for uid in dict.fromkeys(batch["uid"])]
        arrays = [np.array(group) for group in groups if group and all(group)]
        if not arrays:
            return {}
        every = np.concatenate(arrays)
        spread = [float(array[:, 2:].std(axis=0).mean()) for array in arrays if len(array) > 1]
        found = {"rollout/saturation": float(every[:, 0].mean()), "rollout/sharpness": float(every[:, 1].mean())}
        return found | ({"rollout/diversity": sum(spread) / len(spread)} if spread else {})

    def close(self) -> None:
        """End the workers."""
        for pool in self.pools.values():
            pool.shutdown()


def source_of(config: RunConfig, uid: str) -> str:
    """The name in `data.sources` of a request's prompt; empty without sources."""
    return uid.rpartition("/")[2].partition("-")[0] if config.data.sources else ""


def advantages(config: RunConfig, batch: TensorDict) -> AdvantageOutput:
    """Of every sample against its own prompt's group, as `reward.combine` says."""
    algorithm, scores, groups = config.algorithm, batch["rm_scores"][:, 0], list(batch["uid"])
    how: dict[str, Any] = {
        "std": algorithm.advantage_std,
        "ddof": algorithm.advantage_ddof,
        "eps": algorithm.advantage_eps,
    }
    if config.reward.combine == "weighted_sum":
        return group_advantages(scores, groups, **how)
    rewards = {name: reward for name, reward in config.reward.each.items() if reward.weight}
    rows = list(zip(scores.tolist(), list(batch["reward_components"]), groups, strict=True))
    parts = {
        name or "reward": torch.tensor([_own(config, name, *row) for row in rows], dtype=torch.float64)
        for name in rewards
    }
    weights = {name or "reward": reward.weight for name, reward in rewards.items()}
    return combined_advantages(parts, groups, weights=weights, method="gdpo", **how)


def _own(config: RunConfig, name: str, total: float, components: Mapping[str, float], uid: str) -> float:
    """A sample's own score by one reward. One that its source does not use is the same for its whole group, and so says nothing
    there."""
    if not math.isfinite(total) or not name:
        return total
    return components[name] if name in config.rewards_of(source_of(config, uid)) else 0.0
