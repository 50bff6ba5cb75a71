"""Train any diffusers transformer with LoRA or in full under FSDP2, in one process or many.

The config classes import without torch; everything else loads when it is first used. Nothing here needs a GPU or Ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .config import (
    CheckpointConfig,
    DiffusionModelConfig,
    ForwardProcessConfig,
    FSDPDiffusionActorConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    LoRAOptions,
    MixedPrecisionConfig,
    TrainingWorkerConfig,
)
from .errors import CheckpointError, EngineError, EngineStateError, RankError

if TYPE_CHECKING:
    from .engine import DiffusersFSDPEngine
    from .forward_process import ForwardProcess
    from .losses import DiffusionLoss
    from .metrics import reduce_metrics
    from .objective import gather_outputs
    from .padding import embeds_padding_2_no_padding
    from .ppo import PPODiffusersFSDPEngine
    from .worker import TrainingWorker, remote_workers

_HOMES = "metrics padding losses objective engine ppo forward_process worker"

__all__ = [
    "CheckpointConfig",
    "CheckpointError",
    "DiffusersFSDPEngine",
    "DiffusionLoss",
    "DiffusionModelConfig",
    "EngineError",
    "EngineStateError",
    "FSDPDiffusionActorConfig",
    "FSDPEngineConfig",
    "FSDPOptimizerConfig",
    "ForwardProcess",
    "ForwardProcessConfig",
    "LoRAOptions",
    "MixedPrecisionConfig",
    "PPODiffusersFSDPEngine",
    "RankError",
    "TrainingWorker",
    "TrainingWorkerConfig",
    "embeds_padding_2_no_padding",
    "gather_outputs",
    "reduce_metrics",
    "remote_workers",
]


def __getattr__(name: str) -> Any:
    for home in _HOMES.split() if name in __all__ else ():
        module = importlib.import_module(f"{__name__}.{home}")
        if hasattr(module, name):
            globals()[name] = getattr(module, name)
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
