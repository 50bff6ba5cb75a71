"""A tiny random Qwen-Image (built once a session), engines over it, and batches as a rollout would hand them over."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusion_losses import DiffusionLossConfig
from fsdp_diffusers_engine import (
    CheckpointConfig,
    DiffusionModelConfig,
    ForwardProcess,
    FSDPDiffusionActorConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    PPODiffusersFSDPEngine,
    TrainingWorker,
    TrainingWorkerConfig,
)
from lora_sync.layers import copy_into, full
from sde_samplers.settings import SamplerSettings
from tensordict import TensorDict

DEVICE = os.environ.get("ENGINE_TEST_DEVICE", "cpu")
"""Where the ranks of `test_engine_ranks.py` compute: `cpu` or `cuda`."""
SIGMAS = (1.0, 0.8, 0.5, 0.0)
SETTINGS = SamplerSettings(height=32, width=32, num_inference_steps=3, kind="flow_sde", noise_level=0.7, window=(0, 1))


def write_pipeline(folder: Path, index: dict[str, Any], **transformers: Any) -> Path:
    """A pipeline folder with what training reads of one: the index and the transformers. (Saving a whole pipeline would
    import transformers for its text encoder, which takes longer than all tests here.)"""
    folder.mkdir(parents=True)
    (folder / "model_index.json").write_text(json.dumps(index))
    draw = torch.Generator().manual_seed(0)
    for name, transformer in transformers.items():
        with torch.no_grad():
            for key, parameter in sorted(transformer.named_parameters()):
                if parameter.ndim > 1:
                    parameter.copy_(torch.randn(parameter.shape, generator=draw) / parameter[0].numel() ** 0.5)
                elif key.endswith("bias"):
                    parameter.copy_(0.1 * torch.randn(parameter.shape, generator=draw))
        transformer.save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="session")
def tiny_qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-block Qwen-Image: 64 channels of text, 32 x 32 pixels are 4 tokens of 64."""
    from diffusers import QwenImageTransformer2DModel

    model = QwenImageTransformer2DModel(
        num_layers=2, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=64, axes_dims_rope=(4, 6, 6)
    )
    index = {"_class_name": "QwenImagePipeline"}
    return write_pipeline(tmp_path_factory.mktemp("tiny") / "qwen_image", index, transformer=model)


@pytest.fixture(scope="session")
def tiny_wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Wan2.2 with two experts, divided at sigma = 0.875; text of 64 channels."""
    from diffusers import WanTransformer3DModel

    def expert() -> Any:
        return WanTransformer3DModel(
            num_attention_heads=2, attention_head_dim=24, text_dim=64, freq_dim=32, ffn_dim=64, num_layers=1
        )

    part = ["diffusers", "WanTransformer3DModel"]
    index = {"_class_name": "WanPipeline", "boundary_ratio": 0.875, "transformer": part, "transformer_2": part}
    folder = tmp_path_factory.mktemp("tiny") / "wan"
    return write_pipeline(folder, index, transformer=expert(), transformer_2=expert())


def build_engine(path: Path, kind: str = "ppo", full: bool = False, **options: Any) -> Any:
    """An initialised engine (on the CPU); `model`, `engine`, `optim`, `checkpoint` override config fields."""
    model = {"lora_rank": 0 if full else 4, "lora_alpha": 8, **options.get("model", {})}
    objective = None if kind == "ppo" else ForwardProcess(options.get("forward"))
    engine = PPODiffusersFSDPEngine(
        DiffusionModelConfig(path=str(path), **model),
        FSDPEngineConfig(**{"device": DEVICE, **options.get("engine", {})}),
        FSDPOptimizerConfig(**{"lr": 1e-3, **options.get("optim", {})}),
        CheckpointConfig(**options.get("checkpoint", {})),
        objective,
    )
    engine.initialize()
    return engine


def build_batch(shape: tuple[int, ...], count: int = 5, window: int = 2, seed: int = 0, tokens: int = 7) -> TensorDict:
    """`count` samples with random transitions and prompts of different lengths (64 channels)."""
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
    data.set_non_tensor("settings", SETTINGS)
    data.set_non_tensor("micro_batch_size", 2)
    return data


@pytest.fixture
def make_engine(tiny_qwen: Path) -> Callable[..., Any]:
    """`make_engine(kind, full, model={…})`: an engine over the tiny Qwen-Image, with weights that are not the start's."""

    def make(kind: str = "ppo", full: bool = False, **options: Any) -> Any:
        return build_engine(options.pop("path", tiny_qwen), kind, full, **options)

    return make


@pytest.fixture
def make_batch() -> Callable[..., TensorDict]:
    """`make_batch(count=…, window=…, seed=…)` for the tiny Qwen-Image at 32 x 32 pixels (4 tokens of 64)."""

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
                pushed = full(parameter).cpu() + 0.05 * torch.randn(parameter.shape, generator=draw)
                copy_into(parameter, pushed)

    return push


@pytest.fixture
def make_worker(tiny_qwen: Path) -> Callable[..., TrainingWorker]:
    """`make_worker(loss, states=[…], …)`: a ready worker over the tiny Qwen-Image; keywords go to the actor's config."""

    def make(
        loss: DiffusionLossConfig | None = None, states: tuple[str, ...] = ("default", "old"), **actor: Any
    ) -> TrainingWorker:
        config = FSDPDiffusionActorConfig(
            diffusion_loss=loss or DiffusionLossConfig(clip_ratio=1.0),
            optim=FSDPOptimizerConfig(lr=1e-3),
            model_config=DiffusionModelConfig(
                path=str(tiny_qwen), lora_rank=4, lora_alpha=8, policy_state_adapters=list(states)
            ),
            fsdp_config=FSDPEngineConfig(device="cpu", peak_tflops=1.0),
            **{"ppo_mini_batch_size": 4, "ppo_micro_batch_size_per_gpu": 2, **actor},
        )
        worker = TrainingWorker(pickle.loads(pickle.dumps(TrainingWorkerConfig(actor=config))))
        worker.reset()
        return worker

    return make


@pytest.fixture
def default_kernels() -> Iterator[None]:
    """Undoes what `full_determinism` turned on for the whole process."""
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
