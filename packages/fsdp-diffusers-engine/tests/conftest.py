"""A tiny random Qwen-Image (built once a session), engines over it, and batches as a rollout would hand them over."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_diffusers_engine import (
    CheckpointConfig,
    DiffusionModelConfig,
    ForwardProcessDiffusersFSDPEngine,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    PPODiffusersFSDPEngine,
)
from tensordict import TensorDict

SIGMAS = (1.0, 0.8, 0.5, 0.0)
META = {"height": 32, "width": 32, "kind": "flow_sde", "noise_level": 0.7, "micro_batch_size": 2}


@pytest.fixture(scope="session")
def tiny_qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random two-block Qwen-Image pipeline."""
    from model_specs import tiny

    return tiny.build("qwen_image", tmp_path_factory.mktemp("tiny") / "qwen_image")


@pytest.fixture(scope="session")
def tiny_wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random Wan2.2 with two experts."""
    from model_specs import tiny

    return tiny.build("wan", tmp_path_factory.mktemp("tiny") / "wan")


def build_engine(path: Path, kind: str = "ppo", full: bool = False, **options: Any) -> Any:
    """An initialised CPU engine; ``model``, ``engine``, ``optim``, ``checkpoint`` override config fields."""
    model = {"lora_rank": 0 if full else 4, "lora_alpha": 8, **options.get("model", {})}
    chosen = PPODiffusersFSDPEngine if kind == "ppo" else ForwardProcessDiffusersFSDPEngine
    extra = {"forward_config": options["forward"]} if "forward" in options else {}
    engine = chosen(
        DiffusionModelConfig(path=str(path), **model),
        FSDPEngineConfig(**{"device": "cpu", **options.get("engine", {})}),
        FSDPOptimizerConfig(**{"lr": 1e-3, **options.get("optim", {})}),
        CheckpointConfig(**options.get("checkpoint", {})),
        **extra,
    )
    engine.initialize()
    return engine


def build_batch(shape: tuple[int, ...], count: int = 5, window: int = 2, seed: int = 0, tokens: int = 7) -> TensorDict:
    """``count`` samples with random transitions and prompts of different lengths (64 channels)."""
    draw = torch.Generator().manual_seed(seed)
    latents = torch.randn(count, window, *shape, generator=draw)
    mask = torch.arange(tokens) < torch.randint(3, tokens + 1, (count, 1), generator=draw)
    data = TensorDict(
        {
            "latents": latents,
            "next_latents": latents + 0.1 * torch.randn(latents.shape, generator=draw),
            "final_latents": torch.randn(count, *shape, generator=draw),
            "step_index": torch.arange(window).expand(count, -1),
            "sigmas": torch.tensor(SIGMAS).expand(count, -1),
            "advantages": torch.randn(count, generator=draw),
            "prompt_embeds": torch.randn(count, tokens, 64, generator=draw) * mask[..., None],
            "prompt_embeds_mask": mask,
        },
        batch_size=[count],
    )
    for key, value in META.items():
        data.set_non_tensor(key, value)
    return data


@pytest.fixture
def make_engine(tiny_qwen: Path) -> Callable[..., Any]:
    """``make_engine(kind, full, model={…})``: an engine over the tiny Qwen-Image, with weights that are not the start's."""

    def make(kind: str = "ppo", full: bool = False, **options: Any) -> Any:
        return build_engine(options.pop("path", tiny_qwen), kind, full, **options)

    return make


@pytest.fixture
def make_batch() -> Callable[..., TensorDict]:
    """``make_batch(count=…, window=…, seed=…)`` for the tiny Qwen-Image at 32 x 32 pixels (4 tokens of 64)."""

    def make(**options: Any) -> TensorDict:
        return build_batch((4, 64), **options)

    return make


@pytest.fixture
def stir() -> Callable[[Any], None]:
    """Give every trained weight of an engine a small seeded push, so that adapters are not the zero they start as."""

    def push(engine: Any, seed: int = 1) -> None:
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in engine.trainable.values():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=draw))

    return push
