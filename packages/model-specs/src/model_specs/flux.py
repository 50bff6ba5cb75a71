"""FLUX.1 (dev and schnell): double-stream then single-stream blocks over packed 2x2 latent patches.

Follows `FluxPipeline` of diffusers 0.40. Latents are packed: [B, S, 64] with S = (H/16) * (W/16) image tokens. The
distilled guidance of FLUX.1-dev is the argument `guidance_scale`; `true_cfg_scale` is classifier-free guidance on top.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from model_specs import flops
from model_specs.base import ModelSpec, Sampling
from model_specs.common import compute_dtype, config_of, dynamic_shift, linear_sigmas, timestep_of, unpack
from model_specs.embeddings import PromptEmbeds, PromptEncoder, check_length
from model_specs.errors import SpecError
from model_specs.folders import load_part
from model_specs.registry import register
from model_specs.text_encoders import clip_output, decode_images, kl_vae_factor, t5_hidden


@register
class FluxSpec(ModelSpec):
    """FLUX.1 (text to image)."""

    name = "flux"
    transformer_class = "FluxTransformer2DModel"
    pipeline_class = "FluxPipeline"
    vae_class = "AutoencoderKL"
    attention_targets = (
        "to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out",
    )  # fmt: skip
    default_max_sequence_length = 512

    @property
    def mlp_targets(self) -> tuple[str, ...]:  # type: ignore[override]
        # The single blocks' `proj_out` shares its name with the network's last layer, which is not meant: spell it out.
        singles = range(self.transformer_config.get("num_single_layers", 38))
        return (
            "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2", "proj_mlp",
            *(f"single_transformer_blocks.{i}.proj_out" for i in singles),
        )  # fmt: skip

    @property
    def vae_factor(self) -> int:
        return kl_vae_factor(self.vae_config)

    @property
    def latent_channels(self) -> int:
        return self.transformer_config.get("in_channels", 64) // 4

    def latent_shape(self, height: int, width: int, num_frames: int = 1) -> tuple[int, ...]:
        self.check_size(height, width, num_frames)
        return (height // self.size_multiple) * (width // self.size_multiple), 4 * self.latent_channels

    def check_prompt(self, tokenizers: Mapping[str, Any], prompt: str, max_sequence_length: int) -> None:
        check_length(prompt, len(tokenizers["tokenizer_2"](prompt).input_ids), max_sequence_length, "T5")

    def load_encoder(
        self, path: str | Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> PromptEncoder:
        parts = ("tokenizer", "text_encoder", "tokenizer_2", "text_encoder_2")

        def load() -> dict[str, Any]:
            return {part: load_part(path, part, dtype, device) for part in parts}

        return FluxEncoder(load, device, max_sequence_length=self.default_max_sequence_length, limit=512)

    def schedule_kwargs(
        self, scheduler: Any, num_steps: int, height: int, width: int, num_frames: int = 1
    ) -> dict[str, Any]:
        tokens, _ = self.latent_shape(height, width, num_frames)
        sigmas = None if scheduler.config.get("use_flow_sigmas", False) else linear_sigmas(num_steps)
        return {"mu": dynamic_shift(scheduler, tokens), "sigmas": sigmas}

    def velocity(
        self,
        transformer: nn.Module,
        latents: Tensor,
        sigma: Tensor,
        cond: PromptEmbeds,
        settings: Sampling,
        negative: PromptEmbeds | None = None,
    ) -> Tensor:
        self.check_latents(latents, sigma, settings.height, settings.width, settings.num_frames)
        batch, dtype, device = latents.shape[0], compute_dtype(transformer), latents.device
        guidance = None
        if config_of(transformer).guidance_embeds:
            if settings.guidance_scale is None:
                raise SpecError(
                    "This FLUX.1 network was distilled with guidance and got guidance_scale=None: give a number "
                    "(the published default is 3.5)."
                )
            guidance = torch.full((batch,), settings.guidance_scale, device=device, dtype=torch.float32)
        x_BSC, timestep = latents.to(dtype), timestep_of(sigma) / 1000
        image_ids = grid_ids(settings.height // self.size_multiple, settings.width // self.size_multiple, device)

        def predict(prompts: PromptEmbeds) -> Tensor:
            prompts = self.unpadded(prompts).expand(batch)
            return transformer(
                hidden_states=x_BSC,
                timestep=timestep,
                guidance=guidance,
                pooled_projections=self.pooled_of(prompts).to(dtype),
                encoder_hidden_states=prompts.embeds.to(dtype),
                txt_ids=torch.zeros(prompts.embeds.shape[1], 3, device=device),
                img_ids=image_ids,
                return_dict=False,
            )[0].float()

        guiding, scale = self.guiding_prompts(negative, settings)
        positive = predict(cond)
        if guiding is None:
            return positive
        other = predict(guiding)
        return other + scale * (positive - other)

    def decode(self, vae: nn.Module, latents: Tensor, *, height: int, width: int, num_frames: int = 1) -> Tensor:
        self.check_latents(latents, latents.new_zeros(latents.shape[0]), height, width, num_frames)
        return decode_images(vae, unpack(latents, height // self.vae_factor, width // self.vae_factor), height * width)

    def flops(self, config: Mapping[str, Any], batch: int, settings: Sampling, text_tokens: int) -> float:
        S, _ = self.latent_shape(settings.height, settings.width, settings.num_frames)
        D = config.get("num_attention_heads", 24) * config.get("attention_head_dim", 128)
        both, channels = batch * (S + text_tokens), config.get("in_channels", 64)
        joint = flops.attention(batch, S + text_tokens, S + text_tokens, D)
        double = flops.linear(batch, D, 12 * D) + flops.linear(both, D, 4 * D) + joint
        double += 2 * flops.linear(both, D, 4 * D)
        single = flops.linear(batch, D, 3 * D) + flops.linear(both, D, 3 * D) + joint
        single += flops.linear(both, D, 4 * D) + flops.linear(both, 5 * D, D)
        embedders = 3 if config.get("guidance_embeds", True) else 2
        ends = flops.linear(batch, 256 * (embedders - 1) + config.get("pooled_projection_dim", 768), D)
        ends += embedders * flops.linear(batch, D, D) + flops.linear(batch, D, 2 * D)
        ends += flops.linear(batch * text_tokens, config.get("joint_attention_dim", 4096), D)
        ends += flops.linear(batch * S, channels, D)
        ends += flops.linear(batch * S, D, config.get("patch_size", 1) ** 2 * (config.get("out_channels") or channels))
        return config.get("num_layers", 19) * double + config.get("num_single_layers", 38) * single + ends


class FluxEncoder(PromptEncoder):
    """T5's hidden states with padding up to `max_sequence_length`, and CLIP's pooled vector."""

    def _encode_one(self, prompt: str, max_sequence_length: int) -> tuple[Tensor, Tensor]:
        parts = self.parts
        hidden = t5_hidden(parts["tokenizer_2"], parts["text_encoder_2"], prompt, max_sequence_length)
        pooled = clip_output(parts["tokenizer"], parts["text_encoder"], prompt, must_fit=False).pooler_output
        return hidden, pooled[0]


def grid_ids(rows: int, columns: int, device: torch.device) -> Tensor:
    """Position ids [rows * columns, 3] of the image tokens: (0, row, column)."""
    ids = torch.zeros(rows, columns, 3, device=device)
    ids[..., 1] = torch.arange(rows, device=device)[:, None]
    ids[..., 2] = torch.arange(columns, device=device)[None, :]
    return ids.view(-1, 3)
