"""Z-Image: a single-stream transformer that reads [image, text] as one sequence, text from a Qwen3.

Follows `ZImagePipeline` of diffusers 0.40. Latents [B, 16, H/8, W/8]. The network predicts clean minus noise at time
1 - sigma; the sign and the time are turned around here. That pipeline writes guidance as p + g * (p - n): its
`guidance_scale` g is `true_cfg_scale` - 1. Its optional norm cap and truncation (both off by default) are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from model_specs import flops
from model_specs.base import ModelSpec, Sampling
from model_specs.common import compute_dtype, dynamic_shift, timestep_of
from model_specs.embeddings import PromptEmbeds, PromptEncoder, check_length
from model_specs.folders import load_part
from model_specs.registry import register
from model_specs.text_encoders import decode_images, kl_vae_factor

# Image and text are each padded to a multiple of this many tokens inside the network.
TOKEN_MULTIPLE = 32


@register
class ZImageSpec(ModelSpec):
    """Z-Image (text to image)."""

    name = "z_image"
    transformer_class = "ZImageTransformer2DModel"
    pipeline_class = "ZImagePipeline"
    vae_class = "AutoencoderKL"
    attention_targets = ("to_q", "to_k", "to_v", "to_out.0")
    mlp_targets = ("feed_forward.w1", "feed_forward.w2", "feed_forward.w3")
    default_max_sequence_length = 512

    @property
    def vae_factor(self) -> int:
        return kl_vae_factor(self.vae_config)

    @property
    def latent_channels(self) -> int:
        return self.transformer_config.get("in_channels", 16)

    def latent_shape(self, height: int, width: int, num_frames: int = 1) -> tuple[int, ...]:
        self.check_size(height, width, num_frames)
        return self.latent_channels, height // self.vae_factor, width // self.vae_factor

    def check_prompt(self, tokenizers: Mapping[str, Any], prompt: str, max_sequence_length: int) -> None:
        ids = tokenizers["tokenizer"](chat_text(tokenizers["tokenizer"], prompt)).input_ids
        check_length(prompt, len(ids), max_sequence_length)

    def load_encoder(
        self, path: str | Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> PromptEncoder:
        def load() -> tuple[Any, nn.Module]:
            return load_part(path, "tokenizer", dtype, device), load_part(path, "text_encoder", dtype, device)

        return ZImageEncoder(load, device, max_sequence_length=self.default_max_sequence_length, limit=1024)

    def schedule_kwargs(
        self, scheduler: Any, num_steps: int, height: int, width: int, num_frames: int = 1
    ) -> dict[str, Any]:
        _, rows, columns = self.latent_shape(height, width, num_frames)
        sigmas = torch.linspace(1.0, 1 / num_steps, num_steps).tolist()
        return {"mu": dynamic_shift(scheduler, (rows // 2) * (columns // 2)), "sigmas": sigmas}

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
        prompts = cond.expand(batch).rows(dtype)
        x_BCTHW, time = latents.to(dtype).unsqueeze(2), (1000.0 - timestep_of(sigma)) / 1000
        if guiding is not None:
            prompts = prompts + guiding.expand(batch).rows(dtype)
            x_BCTHW, time = x_BCTHW.repeat(2, 1, 1, 1, 1), time.repeat(2)
        predicted = transformer(list(x_BCTHW.unbind(0)), time, prompts, return_dict=False)[0]
        predicted = torch.stack([one.float() for one in predicted]).squeeze(2)
        if guiding is None:
            return -predicted
        positive, other = predicted.chunk(2)
        return -(positive + (scale - 1.0) * (positive - other))

    def decode(self, vae: nn.Module, latents: Tensor, *, height: int, width: int, num_frames: int = 1) -> Tensor:
        self.check_latents(latents, latents.new_zeros(latents.shape[0]), height, width, num_frames)
        return decode_images(vae, latents, height * width)

    def flops(self, config: Mapping[str, Any], batch: int, settings: Sampling, text_tokens: int) -> float:
        channels, rows, columns = self.latent_shape(settings.height, settings.width, settings.num_frames)
        D, time = config.get("dim", 3840), min(config.get("dim", 3840), 256)
        S, N = (-(-count // TOKEN_MULTIPLE) * TOKEN_MULTIPLE for count in (rows * columns // 4, text_tokens))

        def block(tokens: int, modulated: bool = True) -> float:
            products = flops.linear(batch * tokens, D, 4 * D) + flops.attention(batch, tokens, tokens, D)
            products += 3 * flops.linear(batch * tokens, D, int(D / 3 * 8))
            return products + (flops.linear(batch, time, 4 * D) if modulated else 0)

        refiners = config.get("n_refiner_layers", 2)
        ends = flops.linear(batch * S, 4 * channels, D) + flops.linear(batch * N, config.get("cap_feat_dim", 2560), D)
        ends += flops.linear(batch, 256, 1024) + flops.linear(batch, 1024, time)
        ends += flops.linear(batch, time, D) + flops.linear(batch * (S + N), D, 4 * channels)
        return config.get("n_layers", 30) * block(S + N) + refiners * (block(S) + block(N, modulated=False)) + ends


class ZImageEncoder(PromptEncoder):
    """Qwen3's last but one hidden state over the whole chat-templated prompt."""

    def _encode_one(self, prompt: str, max_sequence_length: int) -> tuple[Tensor, None]:
        tokenizer, model = self.parts
        ids = tokenizer(chat_text(tokenizer, prompt), return_tensors="pt").input_ids.to(self.device)
        check_length(prompt, ids.shape[1], max_sequence_length)
        output = model(input_ids=ids, attention_mask=torch.ones_like(ids), output_hidden_states=True)
        return output.hidden_states[-2][0], None


def chat_text(tokenizer: Any, prompt: str) -> str:
    """The prompt in the tokenizer's chat template, as the stock pipeline puts it."""
    text: str = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True, enable_thinking=True
    )
    return text
