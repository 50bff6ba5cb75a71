"""Tiny real transformers of every architecture, and a stock pipeline around each that makes a picture in milliseconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    WanPipeline,
    WanTransformer3DModel,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from peft import LoraConfig
from torch import nn

ASSETS = Path(__file__).parents[2] / "ray-trainer/src/ray_trainer/assets/tiny_qwen_image"
QWEN_TARGETS = (
    *("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
    *("img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2"),
)
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
JOINT = (*ATTENTION, "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")


@dataclass(frozen=True)
class Tiny:
    """One architecture: its transformer, a stock pipeline for it, and the LoRA targets of the tests."""

    name: str
    build: Callable[[], nn.Module]
    pipeline: Callable[[nn.Module], Any]
    call: Callable[[], dict[str, Any]]
    targets: tuple[str, ...]

    def picture(self, pipe: Any) -> torch.Tensor:
        """Pixels in [0, 1] from a fixed seed, as stock diffusers makes them."""
        generator = torch.Generator().manual_seed(5)
        out = pipe(**self.call(), num_inference_steps=2, generator=generator, output_type="pt")
        frames = out.frames if hasattr(out, "frames") else out.images
        return torch.as_tensor(frames)


def embeds(tokens: int, width: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(1, tokens, width, generator=torch.Generator().manual_seed(seed))


def _vae(channels: int, **extra: Any) -> AutoencoderKL:
    torch.manual_seed(2)
    kinds = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    sizes = {"latent_channels": channels, "block_out_channels": (8, 8), "norm_num_groups": 4, "layers_per_block": 1}
    settings = {"use_quant_conv": False, "use_post_quant_conv": False, "shift_factor": 0.1, **kinds, **sizes, **extra}
    return AutoencoderKL(**settings).eval()


def _scheduler(**extra: Any) -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler(**{"shift": 3.0, **extra})


def _qwen_pipeline(transformer: nn.Module) -> QwenImagePipeline:
    from diffusers import AutoencoderKLQwenImage

    vae = AutoencoderKLQwenImage.from_pretrained(ASSETS / "vae")
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(ASSETS / "scheduler")
    return QwenImagePipeline(scheduler, vae, None, None, transformer)


def _sd3() -> nn.Module:
    return SD3Transformer2DModel(
        **{"sample_size": 16, "in_channels": 4, "out_channels": 4, "num_layers": 2, "attention_head_dim": 8},
        **{"num_attention_heads": 4, "joint_attention_dim": 32, "caption_projection_dim": 32},
        **{"pooled_projection_dim": 16, "pos_embed_max_size": 16, "dual_attention_layers": (0,), "qk_norm": "rms_norm"},
    )


def _sd3_pipeline(transformer: nn.Module) -> StableDiffusion3Pipeline:
    return StableDiffusion3Pipeline(transformer, _scheduler(), _vae(4), None, None, None, None, None, None)


def _z() -> nn.Module:
    sizes = {"dim": 64, "n_layers": 1, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2, "cap_feat_dim": 32}
    return ZImageTransformer2DModel(in_channels=4, axes_dims=[8, 12, 12], axes_lens=[64, 64, 64], **sizes)


def _z_pipeline(transformer: nn.Module) -> ZImagePipeline:
    return ZImagePipeline(_scheduler(), _vae(4), None, None, transformer)


def _wan() -> nn.Module:
    sizes = {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 16, "ffn_dim": 64, "text_dim": 32}
    return WanTransformer3DModel(in_channels=16, out_channels=16, freq_dim=32, **sizes)


def _wan_pipeline(transformer: nn.Module) -> WanPipeline:
    torch.manual_seed(2)
    vae = AutoencoderKLWan(base_dim=4, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1).eval()
    return WanPipeline(None, None, vae, _scheduler(), transformer)


def _flux() -> nn.Module:
    sizes = {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2}
    more = {"joint_attention_dim": 32, "pooled_projection_dim": 16, "axes_dims_rope": (4, 6, 6)}
    return FluxTransformer2DModel(in_channels=16, **sizes, **more)


def _flux_pipeline(transformer: nn.Module) -> FluxPipeline:
    return FluxPipeline(_scheduler(), _vae(4), None, None, None, None, transformer)


TINY = {
    tiny.name: tiny
    for tiny in (
        Tiny(
            "qwen_image",
            lambda: QwenImageTransformer2DModel.from_pretrained(ASSETS / "transformer"),
            _qwen_pipeline,
            lambda: {
                **{"prompt_embeds": embeds(6, 64), "prompt_embeds_mask": torch.ones(1, 6, dtype=torch.long)},
                **{"height": 64, "width": 64, "true_cfg_scale": 1.0},
            },
            QWEN_TARGETS,
        ),
        Tiny(
            "sd3",
            _sd3,
            _sd3_pipeline,
            lambda: {
                **{"prompt_embeds": embeds(6, 32), "pooled_prompt_embeds": embeds(1, 16)[:, 0]},
                **{"height": 16, "width": 16, "guidance_scale": 1.0},
            },
            (*JOINT, "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"),
        ),
        Tiny(
            "z_image",
            _z,
            _z_pipeline,
            lambda: {"prompt_embeds": [embeds(6, 32)[0]], "height": 16, "width": 16, "guidance_scale": 0.0},
            (*ATTENTION, "feed_forward.w1", "feed_forward.w2", "feed_forward.w3"),
        ),
        Tiny(
            "wan",
            _wan,
            _wan_pipeline,
            lambda: {
                **{"prompt_embeds": embeds(6, 32), "height": 16, "width": 16, "num_frames": 5, "guidance_scale": 1.0},
            },
            (*ATTENTION, "ffn.net.0.proj", "ffn.net.2", "time_proj", "text_embedder.linear_1", "proj_out"),
        ),
        Tiny(
            "flux",
            _flux,
            _flux_pipeline,
            lambda: {
                **{"prompt_embeds": embeds(6, 32), "pooled_prompt_embeds": embeds(1, 16)[:, 0]},
                **{"height": 16, "width": 16, "guidance_scale": 1.0},
            },
            (*JOINT, "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2", "proj_mlp", "proj_out"),
        ),
    )
}


class Helpers:
    """What tests share, reached through the `tools` fixture."""

    tiny = TINY
    assets = ASSETS
    qwen_targets = QWEN_TARGETS

    @staticmethod
    def base(name: str = "qwen_image", seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        module: nn.Module = TINY[name].build().eval()
        return module

    @classmethod
    def adapted(
        cls,
        name: str = "qwen_image",
        *,
        targets: tuple[str, ...] | None = None,
        adapters: tuple[str, ...] = ("default",),
        rank: int = 4,
        alpha: float = 8,
        dtype: torch.dtype = torch.float32,
        **config: Any,
    ) -> nn.Module:
        """A tiny transformer with adapters whose B is not zero."""
        module: Any = cls.base(name)
        for adapter in adapters:
            settings = {
                "target_modules": list(targets or TINY[name].targets),
                "init_lora_weights": "gaussian",
                **config,
            }
            module.add_adapter(LoraConfig(r=rank, lora_alpha=alpha, **settings), adapter)
        module.set_adapter(adapters[0])
        cls.randomise(module)
        for key, parameter in module.named_parameters():
            if "lora_" in key:
                parameter.data = parameter.data.to(dtype)
        return module  # type: ignore[no-any-return]

    @staticmethod
    def randomise(module: nn.Module, seed: int = 11, scale: float = 0.05) -> None:
        generator = torch.Generator().manual_seed(seed)
        for key, parameter in module.named_parameters():
            if "lora_" in key:
                parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * scale)


@pytest.fixture(scope="session")
def tools() -> type[Helpers]:
    return Helpers
