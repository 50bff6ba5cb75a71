"""Stable Diffusion 3 and 3.5: a joint transformer over image and text tokens, text from two CLIPs and a T5.

Follows `StableDiffusion3Pipeline` of diffusers 0.40. Latents [B, 16, H/8, W/8]. What that pipeline calls
`guidance_scale` is classifier-free guidance, here `true_cfg_scale`; both predictions go through one forward, as there.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model_specs import flops
from model_specs.base import ModelSpec, Sampling
from model_specs.common import compute_dtype, dynamic_shift, timestep_of
from model_specs.embeddings import PromptEmbeds, PromptEncoder, check_length
from model_specs.errors import SpecError
from model_specs.folders import has_part, load_part
from model_specs.registry import register
from model_specs.text_encoders import clip_output, decode_images, kl_vae_factor, t5_hidden


@register
class SD3Spec(ModelSpec):
    """Stable Diffusion 3 and 3.5 (text to image)."""

    name = "sd3"
    transformer_class = "SD3Transformer2DModel"
    pipeline_class = "StableDiffusion3Pipeline"
    vae_class = "AutoencoderKL"
    attention_targets = (
        "to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out",
    )  # fmt: skip
    mlp_targets = ("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2")
    default_max_sequence_length = 256

    @property
    def vae_factor(self) -> int:
        return kl_vae_factor(self.vae_config)

    @property
    def latent_channels(self) -> int:
        return self.transformer_config.get("in_channels", 16)

    def latent_shape(self, height: int, width: int, num_frames: int = 1) -> tuple[int, ...]:
        self.check_size(height, width, num_frames)
        largest = self.transformer_config.get("pos_embed_max_size", 192) * self.size_multiple
        if max(height, width) > largest:
            raise SpecError(f"{height}x{width} pixels exceed the position table of this model: {largest} a side.")
        return self.latent_channels, height // self.vae_factor, width // self.vae_factor

    def check_prompt(self, tokenizers: Mapping[str, Any], prompt: str, max_sequence_length: int) -> None:
        if "tokenizer_3" in tokenizers:
            check_length(prompt, len(tokenizers["tokenizer_3"](prompt).input_ids), max_sequence_length, "T5")
        else:  # CLIP alone reads the prompt
            for part in ("tokenizer", "tokenizer_2"):
                limit = tokenizers[part].model_max_length
                check_length(prompt, len(tokenizers[part](prompt).input_ids), limit, "CLIP")

    def load_encoder(
        self, path: str | Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> PromptEncoder:
        parts = ["tokenizer", "text_encoder", "tokenizer_2", "text_encoder_2"]
        if has_part(path, "text_encoder_3"):
            parts += ["tokenizer_3", "text_encoder_3"]

        def load() -> dict[str, Any]:
            return {part: load_part(path, part, dtype, device) for part in parts}

        width = type(self)(path).transformer_config.get("joint_attention_dim", 4096)
        return SD3Encoder(width, load, device, max_sequence_length=self.default_max_sequence_length, limit=512)

    def schedule_kwargs(
        self, scheduler: Any, num_steps: int, height: int, width: int, num_frames: int = 1
    ) -> dict[str, Any]:
        _, rows, columns = self.latent_shape(height, width, num_frames)
        if not scheduler.config.get("use_dynamic_shifting", False):
            return {}
        return {"mu": dynamic_shift(scheduler, (rows // 2) * (columns // 2))}

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
        batch, dtype = latents.shape[0], compute_dtype(transformer)
        guiding, scale = self.guiding_prompts(negative, settings)
        prompts, x_BCHW, timestep = self.unpadded(cond).expand(batch), latents.to(dtype), timestep_of(sigma)
        if guiding is not None:
            prompts = self.unpadded(PromptEmbeds.cat([guiding.expand(batch), prompts]))
            x_BCHW, timestep = x_BCHW.repeat(2, 1, 1, 1), timestep.repeat(2)
        predicted = transformer(
            hidden_states=x_BCHW,
            timestep=timestep,
            encoder_hidden_states=prompts.embeds.to(dtype),
            pooled_projections=self.pooled_of(prompts).to(dtype),
            return_dict=False,
        )[0].float()
        if guiding is None:
            return predicted
        other, positive = predicted.chunk(2)
        return other + scale * (positive - other)

    def decode(self, vae: nn.Module, latents: Tensor, *, height: int, width: int, num_frames: int = 1) -> Tensor:
        self.check_latents(latents, latents.new_zeros(latents.shape[0]), height, width, num_frames)
        return decode_images(vae, latents, height * width)

    def flops(self, config: Mapping[str, Any], batch: int, settings: Sampling, text_tokens: int) -> float:
        # Defaults: SD3.5 Medium (text tokens: 77 of CLIP plus those of T5).
        channels, rows, columns = self.latent_shape(settings.height, settings.width, settings.num_frames)
        patch = config.get("patch_size", 2) ** 2
        S, L = rows * columns // patch, config.get("num_layers", 24)
        D = config.get("num_attention_heads", 24) * config.get("attention_head_dim", 64)
        dual = len(config.get("dual_attention_layers", range(13)))
        both = batch * (S + text_tokens)
        block = flops.linear(batch, D, 12 * D) + flops.attention(batch, S + text_tokens, S + text_tokens, D)
        block += flops.linear(both, D, 4 * D) + 2 * flops.linear(both, D, 4 * D)
        # The last block only reads the text: no output projection or MLP for it, and 2 modulations instead of 6.
        saved = flops.linear(batch * text_tokens, D, D) + 2 * flops.linear(batch * text_tokens, D, 4 * D)
        saved += flops.linear(batch, D, 4 * D)
        extra = flops.linear(batch * S, D, 4 * D) + flops.attention(batch, S, S, D) + flops.linear(batch, D, 3 * D)
        ends = flops.linear(batch * S, patch * channels, D) + flops.linear(batch, D, 2 * D)
        ends += flops.linear(batch * S, D, patch * config.get("out_channels", 16))
        ends += flops.linear(batch, 256 + config.get("pooled_projection_dim", 2048), D) + 2 * flops.linear(batch, D, D)
        ends += flops.linear(
            batch * text_tokens, config.get("joint_attention_dim", 4096), config.get("caption_projection_dim", D)
        )
        return L * block - saved + dual * extra + ends


class SD3Encoder(PromptEncoder):
    """Two CLIPs side by side (77 tokens), then T5 (`max_sequence_length` tokens); the two CLIP vectors pooled.

    A pipeline saved without its T5 gets zeros in its place, as stock; then the prompt must fit CLIP.
    """

    def __init__(self, width: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.width = width

    def _encode_one(self, prompt: str, max_sequence_length: int) -> tuple[Tensor, Tensor]:
        parts = self.parts
        has_t5 = "text_encoder_3" in parts
        first = clip_output(parts["tokenizer"], parts["text_encoder"], prompt, must_fit=not has_t5)
        second = clip_output(parts["tokenizer_2"], parts["text_encoder_2"], prompt, must_fit=not has_t5)
        clip = torch.cat([first.hidden_states[-2][0], second.hidden_states[-2][0]], dim=-1)
        if has_t5:
            t5 = t5_hidden(parts["tokenizer_3"], parts["text_encoder_3"], prompt, max_sequence_length)
        else:
            t5 = clip.new_zeros(max_sequence_length, self.width)
        clip = F.pad(clip, (0, t5.shape[-1] - clip.shape[-1]))
        return torch.cat([clip, t5]), torch.cat([first[0][0], second[0][0]])
