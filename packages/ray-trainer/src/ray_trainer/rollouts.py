"""The driver's side of sampling: sampler, agent loop and reward pool, put together once.

prompts → requests → agent loop → sampler (the trainers themselves, or a router over replicas) → one batch
                         └→ reward pool, the moment a chunk of samples is there
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from image_rewards import RewardSample
from image_rewards.loop import RewardLoopManager
from omni_rollout.agent_loop import DiffusionAgentLoopWorker
from omni_rollout.config import DiffusionPipelineConfig
from omni_rollout.sampling import resolve_settings
from omni_rollout.types import GenerationRequest
from tensordict import TensorDict

from ray_trainer.config import RunConfig
from ray_trainer.prompts import Prompt
from ray_trainer.samplers import Sampler

_FAULTS = tuple(
    f"rollout/{name}" for name in ("retried", "errors", "timeouts", "deaths", "restarts", "failed", "queued_s")
)


def negative_prompt(prompt: Prompt, pipeline: DiffusionPipelineConfig) -> str:
    """The prompt's own negative prompt, which may be empty, else the recipe's."""
    return pipeline.negative_prompt if prompt.negative is None else prompt.negative


def requests_of(
    config: RunConfig, rows: list[tuple[str, Prompt]], n: int, *, step: int, validate: bool
) -> list[GenerationRequest]:
    """`n` requests for each (uid, prompt), next to each other, as the config says for this training step or for validation."""
    rollout = config.rollout
    pipeline = rollout.val_kwargs.pipeline if validate else rollout.pipeline
    seed = int((rollout.val_kwargs.seed if validate else rollout.seed) or 0)
    settings = resolve_settings(rollout, training_step=step, validate=validate)
    return [
        GenerationRequest(
            request_id=f"{uid}/{index}",
            uid=uid,
            index=index,
            prompt=prompt.text,
            seed=seed,
            settings=settings,
            negative_prompt=negative_prompt(prompt, pipeline) if settings.guided else None,
            metadata=prompt.metadata,
            # Validation looks at what is trained, whatever draws the training samples.
            adapter="default" if validate else rollout.rollout_adapter,
            return_trajectory=not validate,
            return_means=not validate and config.rollout_means,
        )
        for uid, prompt in rows
        for index in range(n)
    ]


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
        self.agent_loop = DiffusionAgentLoopWorker(config.rollout, sampler, self._reward)
        self._faults: dict[str, float] = {}

    async def _reward(
        self, image: Any, prompt: str, metadata: Mapping[str, Any], uid: str, index: int
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
            TensorDict [B = len(rows)·n], the samples of a prompt next to each other: scores, names and numbers, and who keeps
            each row (`group`).
        """
        requests = requests_of(self.config, rows, n, step=step, validate=validate)
        return await self.agent_loop.generate_sequences(requests)

    def score_metrics(self, batch: TensorDict) -> dict[str, float]:
        """`reward/mean`, `reward/std`, `reward/failed` and the mean of every component, over the samples that have a score."""
        scores = batch["rm_scores"][:, 0]
        finite = scores[scores.isfinite()]
        metrics = {
            "reward/mean": float(finite.mean()) if len(finite) else math.nan,
            "reward/std": float(finite.std()) if len(finite) > 1 else 0.0,
            "reward/failed": float(sum(error is not None for error in batch["reward_errors"])),
        }
        components = list(batch["reward_components"])
        for name in sorted({name for row in components for name in row}):
            values = [row[name] for row in components if name in row]
            metrics[f"reward/{name}_mean"] = sum(values) / len(values) if values else math.nan
        return metrics

    def fault_metrics(self) -> dict[str, float]:
        """Requests that failed, were repeated or timed out, and replicas that died or came back, since the last call."""
        seen = {name: count for name, count in self.sampler.faults().items() if name in _FAULTS}
        new = {name: count - self._faults.get(name, 0.0) for name, count in seen.items()}
        self._faults = seen
        return new

    def close(self) -> None:
        """End the reward pool."""
        self.rewards.shutdown()
