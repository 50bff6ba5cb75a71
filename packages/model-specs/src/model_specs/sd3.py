"""Stable Diffusion 3 and 3.5: a joint transformer over image and text tokens, text from two CLIPs and a T5.

Follows `StableDiffusion3Pipeline` of diffusers 0.40. Latents [B, 16, H/8, W/8]. What that pipeline calls
`guidance_scale` is classifier-free guidance, here `true_cfg_scale`; both predictions go through one forward, as there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from . import flops
from .base import ModelSpec, Sampling
from .common import check_length, dynamic_shift, timestep_of
from .errors import SpecError
from .text_encoders import clip_output, t5_hidden

if TYPE_CHECKING:
    from torch import Tensor, nn

    from .embeddings import PromptEmbeds


class SD3Spec(ModelSpec):
    """Stable Diffusion 3 and 3.5 (text to image)."""

    name = "sd3"
    transformer_class = "SD3Transformer2DModel"
    pipeline_class = "StableDiffusion3Pipeline"
    pads_text = 77
    text_parts = ("tokenizer", "text_encoder", "tokenizer_2", "text_encoder_2")
    optional_text_parts = ("tokenizer_3", "text_encoder_3")
    default_max_sequence_length = 256
    guides_in_one_forward = True
    lora_names = "sd3"
    engine_pipeline = "omni_rollout.vllm_omni.pipelines.sd3:SD3RolloutPipeline"

    def latent_shape(self, height: int, width: int, num_frames: int = 1) -> tuple[int, ...]:
        largest = self.transformer_config.get("pos_embed_max_size", 192) * self.size_multiple
        if max(height, width) > largest:
            raise SpecError(f"{height}x{width} pixels exceed the position table of this model: {largest} a side.")
        return super().latent_shape(height, width, num_frames)

    def check_prompt(self, tokenizers: Mapping[str, Any], prompt: str, max_sequence_length: int) -> None:
        if "tokenizer_3" in tokenizers:
            check_length(prompt, len(tokenizers["tokenizer_3"](prompt).input_ids), max_sequence_length, "T5")
        else:  # CLIP alone reads the prompt
            for part in ("tokenizer", "tokenizer_2"):
                limit = tokenizers[part].model_max_length
                check_length(prompt, len(tokenizers[part](prompt).input_ids), limit, "CLIP")

    def encode_prompt(self, parts: Mapping[str, Any], prompt: str, max_sequence_length: int) -> tuple[Tensor, Tensor]:
        """Two CLIPs side by side (77 tokens), then T5 (`max_sequence_length` tokens); the two CLIP vectors pooled.

        A pipeline saved without its T5 gets zeros in its place, as stock.
        """
        import torch

        first, second = (clip_output(parts[f"tokenizer{n}"], parts[f"text_encoder{n}"], prompt) for n in ("", "_2"))
        clip = torch.cat([first.hidden_states[-2][0], second.hidden_states[-2][0]], dim=-1)
        if "text_encoder_3" in parts:
            t5 = t5_hidden(parts["tokenizer_3"], parts["text_encoder_3"], prompt, max_sequence_length)
        else:
            t5 = clip.new_zeros(max_sequence_length, self.transformer_config.get("joint_attention_dim", 4096))
        clip = torch.nn.functional.pad(clip, (0, t5.shape[-1] - clip.shape[-1]))
        return torch.cat([clip, t5]), torch.cat([first[0][0], second[0][0]])

    def schedule_kwargs(
        self, scheduler: Any, num_steps: int, height: int, width: int, num_frames: int = 1
    ) -> dict[str, Any]:
        dynamic = scheduler.config.get("use_dynamic_shifting", False)
        return {"mu": dynamic_shift(scheduler, self.patches(height, width))} if dynamic else {}

    def predict(
        self, transformer: nn.Module, x: Tensor, sigma: Tensor, prompts: PromptEmbeds, settings: Sampling
    ) -> Tensor:
        return transformer(
            hidden_states=x,
            timestep=timestep_of(sigma),
            encoder_hidden_states=self.unpadded(prompts).embeds.to(x.dtype),
            pooled_projections=self.pooled_of(prompts).to(x.dtype),
            return_dict=False,
        )[0].float()

    def flops(self, config: Mapping[str, Any], batch: int, settings: Sampling, text_tokens: int) -> float:
        # Defaults: SD3.5 Medium (text tokens: 77 of CLIP plus those of T5).
        channels, rows, columns = self.latent_shape(settings.height, settings.width, settings.num_frames)
        patch = config.get("patch_size", 2) ** 2
        S, N = rows * columns // patch, text_tokens
        D = config.get("num_attention_heads", 24) * config.get("attention_head_dim", 64)
        dual = len(config.get("dual_attention_layers", range(13)))
        # The last block only reads the text: no output projection or MLP for it, and 2 modulations instead of 6.
        saved = flops.linear(batch * N, D, D) + 2 * flops.linear(batch * N, D, 4 * D) + flops.linear(batch, D, 4 * D)
        extra = flops.linear(batch * S, D, 4 * D) + flops.attention(batch, S, S, D) + flops.linear(batch, D, 3 * D)
        ends = flops.linear(batch * S, patch * channels, D) + flops.linear(batch, D, 2 * D)
        ends += flops.linear(batch * S, D, patch * config.get("out_channels", 16))
        ends += flops.linear(batch, 256 + config.get("pooled_projection_dim", 2048), D) + 2 * flops.linear(batch, D, D)
        ends += flops.linear(
            batch * N, config.get("joint_attention_dim", 4096), config.get("caption_projection_dim", D)
        )
        return config.get("num_layers", 24) * flops.joint_block(batch, S, N, D) - saved + dual * extra + ends
