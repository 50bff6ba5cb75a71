"""The driver's side of sampling: replicas, router, agent loop and reward pool, put together once.

rows → agent loop (one task a sample) → router → replica → backend in a worker or an engine
                   └→ reward pool, the moment a sample is finished
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from image_rewards import RewardSample
from image_rewards.loop import RewardLoopManager
from omni_rollout import DiffusionAgentLoopWorker
from omni_rollout.config import DiffusionPipelineConfig
from tensordict import NonTensorStack, TensorDict

from ray_trainer.config import RunConfig
from ray_trainer.prompts import Prompt
from ray_trainer.samplers import Sampler

_FAULTS = ("retried", "errors", "timeouts", "deaths", "restarts", "failed")


def negative_prompt(prompt: Prompt, pipeline: DiffusionPipelineConfig) -> str:
    """The prompt's own negative prompt, which may be empty, else the recipe's."""
    return pipeline.negative_prompt if prompt.negative is None else prompt.negative


class Rollouts:
    """Samples and scores batches of prompts.

    Args:
        config: of the run.
        sampler: draws.
    """

    def __init__(self, config: RunConfig, sampler: Sampler):
        self.config, self.sampler = config, sampler
        reward = config.reward
        self.rewards = RewardLoopManager(
            reward.name,
            reward.options,
            num_workers=reward.num_workers,
            policy=reward.policy,  # type: ignore[arg-type]
            value=reward.failure_value,
            max_retries=reward.max_retries,
            timeout_s=reward.timeout_s or None,
            num_cpus=reward.num_cpus,
            concurrency=reward.concurrency,
            batch_size=reward.batch_size,
        )
        self.agent_loop = DiffusionAgentLoopWorker(config.rollout, sampler.router, self._reward)
        self._faults: dict[str, float] = {}

    async def _reward(
        self, image: np.ndarray, prompt: str, metadata: Mapping[str, Any], uid: str, index: int
    ) -> tuple[float, dict[str, float], str | None]:
        sample = RewardSample(image=image, prompt=prompt, metadata=dict(metadata), uid=uid, index=index)
        result = await self.rewards.score(sample)
        return result.score, result.components, result.error

    async def sample(
        self,
        rows: list[tuple[str, Prompt]],
        n: int,
        *,
        step: int,
        validate: bool,
    ) -> TensorDict:
        """Draw and score `n` samples of each (uid, prompt).

        Returns:
            TensorDict [B = len(rows)·n] as `schema` describes it, the samples of a prompt next to each other.
        """
        repeated = [(uid, prompt, i) for uid, prompt in rows for i in range(n)]
        rollout = self.config.rollout
        seed = rollout.val_kwargs.seed if validate else rollout.seed
        pipeline = rollout.val_kwargs.pipeline if validate else rollout.pipeline
        batch = TensorDict({"index": torch.tensor([i for _, _, i in repeated])}, batch_size=[len(repeated)])
        columns: dict[str, list[Any]] = {
            "uid": [uid for uid, _, _ in repeated],
            "prompt": [prompt.text for _, prompt, _ in repeated],
            "negative_prompt": [negative_prompt(prompt, pipeline) for _, prompt, _ in repeated],
            "metadata": [prompt.metadata for _, prompt, _ in repeated],
        }
        for key, values in columns.items():
            batch[key] = NonTensorStack(*values)
        batch["seed"] = torch.full((len(repeated),), int(seed or 0))
        if not validate and self.config.rollout_means:
            batch.set_non_tensor("sampling", {"return_means": True})
        batch.set_non_tensor("training_step", step)
        batch.set_non_tensor("validate", validate)
        return await self.agent_loop.generate_sequences(batch)

    def score_metrics(self, batch: TensorDict) -> dict[str, float]:
        """`reward/mean`, `reward/std`, `reward/failed` and the mean of every component, over the samples that have a score."""
        scores = batch["rm_scores"][:, 0]
        finite = scores[scores.isfinite()]
        metrics = {
            "reward/mean": float(finite.mean()) if len(finite) else math.nan,
            "reward/std": float(finite.std()) if len(finite) > 1 else 0.0,
            "reward/failed": float(sum(error is not None for error in batch["reward_errors"])),
        }
        for name in batch.get_non_tensor("reward_extra_keys"):
            values = [row[name] for row in batch["reward_components"] if name in row]
            metrics[f"reward/{name}_mean"] = sum(values) / len(values) if values else math.nan
        return metrics

    def fault_metrics(self) -> dict[str, float]:
        """Requests that failed, were repeated or timed out, and replicas that died or came back, since the last call."""
        seen = {name: self.sampler.router.metrics()[f"rollout/{name}"] for name in _FAULTS}
        new = {f"rollout/{name}": count - self._faults.get(name, 0.0) for name, count in seen.items()}
        self._faults = seen
        return new

    def close(self) -> None:
        """End the reward pool."""
        self.rewards.shutdown()
