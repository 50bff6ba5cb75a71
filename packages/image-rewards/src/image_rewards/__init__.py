"""Rewards for generated images and videos: scored, combined, served, and never silently zero."""

from image_rewards.base import PerSampleReward, Reward, RewardResult, RewardSample
from image_rewards.errors import (
    MissingExtraError,
    PromptFileError,
    RewardConfigError,
    RewardError,
    RewardInputError,
    RewardServiceError,
    RewardTargetError,
    RewardTimeoutError,
    RewardWorkerError,
    UnknownRewardError,
)
from image_rewards.registry import available, load

__all__ = [
    "MissingExtraError",
    "PerSampleReward",
    "PromptFileError",
    "Reward",
    "RewardConfigError",
    "RewardError",
    "RewardInputError",
    "RewardResult",
    "RewardSample",
    "RewardServiceError",
    "RewardTargetError",
    "RewardTimeoutError",
    "RewardWorkerError",
    "UnknownRewardError",
    "available",
    "load",
]
