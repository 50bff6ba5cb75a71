"""Qwen-Image: a 20 B double-stream transformer over packed 2x2 latent patches, text from Qwen2.5-VL.

Follows `QwenImagePipeline` of diffusers 0.40, the rescaling of its classifier-free guidance included.
Latents are packed: [B, S, 64] with S = (H/16) * (W/16) image tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from model_specs import flops
from model_specs.base import ModelSpec, Sampling
from model_specs.common import (
    compute_dtype,
    config_of,
    dynamic_shift,
    linear_sigmas,
    split_batch,
    timestep_of,
    to_uint8,
    unpack,
)
from model_specs.embeddings import PromptEmbeds, PromptEncoder, check_length
from model_specs.errors import SpecError
from model_specs.folders import load_part
from model_specs.registry import register
from model_specs.single_frame import single_frame_convolutions

# The system prompt that the model was trained with; its first 34 tokens are dropped from the embeddings.
TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, "
    "spatial relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n"
    "<|im_start|>assistant\n"
)
TEMPLATE_TOKENS = 34


@register
class QwenImageSpec(ModelSpec):
    """Qwen-Image (text to image)."""

    name = "qwen_image"
    transformer_class = "QwenImageTransformer2DModel"
    pipeline_class = "QwenImagePipeline"
    vae_class = "AutoencoderKLQwenImage"
    attention_targets = (
        "to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out",
    )  # fmt: skip
    mlp_targets = ("img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2")
    default_max_sequence_length = 512

    @property
    def vae_factor(self) -> int:
        return 2 ** len(self.vae_config.get("temperal_downsample", (False, True, True)))

    @property
    def latent_channels(self) -> int:
        return self.transformer_config.get("in_channels", 64) // 4

    def latent_shape(self, height: int, width: int, num_frames: int = 1) -> tuple[int, ...]:
        self.check_size(height, width, num_frames)
        return (height // self.size_multiple) * (width // self.size_multiple), 4 * self.latent_channels

    def check_prompt(self, tokenizers: Mapping[str, Any], prompt: str, max_sequence_length: int) -> None:
        count = len(tokenizers["tokenizer"](TEMPLATE.format(prompt)).input_ids) - TEMPLATE_TOKENS
        check_length(prompt, count, max_sequence_length)

    def load_encoder(
        self, path: str | Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> PromptEncoder:
        def load() -> tuple[Any, nn.Module]:
            return load_part(path, "tokenizer", dtype, device), load_part(path, "text_encoder", dtype, device)

        return QwenImageEncoder(load, device, max_sequence_length=self.default_max_sequence_length, limit=1024)

    def schedule_kwargs(
        self, scheduler: Any, num_steps: int, height: int, width: int, num_frames: int = 1
    ) -> dict[str, Any]:
        tokens, _ = self.latent_shape(height, width, num_frames)
        return {"mu": dynamic_shift(scheduler, tokens), "sigmas": linear_sigmas(num_steps)}

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
        cells = (1, settings.height // self.size_multiple, settings.width // self.size_multiple)
        guidance = None
        if config_of(transformer).guidance_embeds:
            if settings.guidance_scale is None:
                raise SpecError("This Qwen-Image network was distilled with guidance: give guidance_scale.")
            guidance = torch.full((batch,), settings.guidance_scale, device=latents.device, dtype=torch.float32)
        x_BSC, timestep = latents.to(dtype), timestep_of(sigma) / 1000

        def predict(prompts: PromptEmbeds) -> Tensor:
            mask = None if prompts.full else prompts.expand(batch).mask
            return transformer(
                hidden_states=x_BSC,
                timestep=timestep,
                guidance=guidance,
                encoder_hidden_states=prompts.expand(batch).embeds.to(dtype),
                encoder_hidden_states_mask=mask,
                img_shapes=[[cells]] * batch,
                return_dict=False,
            )[0].float()

        guiding, scale = self.guiding_prompts(negative, settings)
        positive = predict(cond)
        if guiding is None:
            return positive
        other = predict(guiding)
        mixed = other + scale * (positive - other)
        # The stock pipeline gives the mixture the length that the positive prediction has, token by token. The floor
        # changes nothing but 0/0, which an untrained network with a zero output layer runs into.
        length = mixed.norm(dim=-1, keepdim=True).clamp_min(1e-20)
        return mixed * (positive.norm(dim=-1, keepdim=True) / length)

    @torch.no_grad()
    def decode(self, vae: nn.Module, latents: Tensor, *, height: int, width: int, num_frames: int = 1) -> Tensor:
        self.latent_shape(height, width, num_frames)
        config, dtype = config_of(vae), next(vae.parameters()).dtype
        mean = torch.tensor(config.latents_mean, device=latents.device, dtype=dtype).view(1, -1, 1, 1, 1)
        inverse = 1.0 / torch.tensor(config.latents_std, device=latents.device, dtype=dtype).view(1, -1, 1, 1, 1)
        single_frame_convolutions(vae)
        pictures = []
        for part in split_batch(latents, height * width):
            z_BCTHW = unpack(part, height // self.vae_factor, width // self.vae_factor).unsqueeze(2).to(dtype)
            pictures.append(to_uint8(decode_frame(vae, z_BCTHW / inverse + mean)))
        return torch.cat(pictures)

    def flops(self, config: Mapping[str, Any], batch: int, settings: Sampling, text_tokens: int) -> float:
        S, _ = self.latent_shape(settings.height, settings.width, settings.num_frames)
        D = config.get("num_attention_heads", 24) * config.get("attention_head_dim", 128)
        patch = config.get("patch_size", 2) ** 2 * (config.get("out_channels", 16) or config.get("in_channels", 64))
        both = batch * (S + text_tokens)
        block = 2 * flops.linear(batch, D, 6 * D)  # modulation of the two streams
        block += flops.linear(both, D, 4 * D) + flops.attention(batch, S + text_tokens, S + text_tokens, D)
        block += 2 * flops.linear(both, D, 4 * D)  # MLPs
        ends = flops.linear(batch, 256, D) + flops.linear(batch, D, D) + flops.linear(batch, D, 2 * D)
        ends += flops.linear(batch * S, config.get("in_channels", 64), D) + flops.linear(batch * S, D, patch)
        ends += flops.linear(batch * text_tokens, config.get("joint_attention_dim", 3584), D)
        return config.get("num_layers", 60) * block + ends


class QwenImageEncoder(PromptEncoder):
    """Qwen2.5-VL's last hidden state of the user's turn, the template's first 34 tokens dropped."""

    def _encode_one(self, prompt: str, max_sequence_length: int) -> tuple[Tensor, None]:
        tokenizer, model = self.parts
        ids = tokenizer(TEMPLATE.format(prompt), return_tensors="pt").input_ids.to(self.device)
        check_length(prompt, ids.shape[1] - TEMPLATE_TOKENS, max_sequence_length)
        # The inner model spares the language head, whose logits nobody reads.
        hidden = model.model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
        return hidden[0, TEMPLATE_TOKENS:], None


def decode_frame(vae: Any, z: Tensor) -> Tensor:
    """[B, C, 1, h, w] to [B, 3, H, W] in [-1, 1].

    `vae.decode` would also fill the caches that the next frame of a video would read; for a single frame the decoder
    gives the same without them.
    """
    if getattr(vae, "use_tiling", False) or getattr(vae, "use_slicing", False):
        return vae.decode(z, return_dict=False)[0][:, :, 0]
    return vae.decoder(vae.post_quant_conv(z))[:, :, 0]
