"""Rollout of diffusion policies: backends, replicas, router, agent loop.

The package itself imports nothing heavy; `omni_rollout.config` is free of torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_EXPORTS = {
    "DiffusionRolloutConfig": "config",
    "DiffusionRolloutAlgoConfig": "config",
    "DiffusionPipelineConfig": "config",
    "DiffusionSamplingConfig": "config",
    "GenerationRequest": "types",
    "RolloutBackend": "backend",
    "DiffusersBackend": "diffusers_backend",
    "Lifecycle": "lifecycle",
    "Fleet": "fleet",
    "DiffusersReplica": "replica",
    "vLLMOmniReplica": "vllm_omni.replica",
    "BackendClient": "backend",
    "Remote": "remote",
    "Router": "router",
    "DiffusionAgentLoopWorker": "agent_loop",
    "DiffusionSingleTurnAgentLoop": "agent_loop",
    "DiffusionAgentLoop": "loop_base",
    "RolloutError": "errors",
}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_EXPORTS[name]}", __name__), name)
