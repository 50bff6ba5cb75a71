"""Rewards for generated images and videos: scored, combined, served, and never silently zero."""

from .base import PerSampleReward, Reward, RewardResult, RewardSample
from .errors import (
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
from .registry import available, load

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
