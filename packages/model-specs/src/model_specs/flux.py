"""FLUX.1 (dev and schnell): double-stream then single-stream blocks over packed 2x2 latent patches.

Follows `FluxPipeline` of diffusers 0.40. Latents are packed: [B, S, 64] with S = (H/16) * (W/16) image tokens. The
distilled guidance of FLUX.1-dev is the setting `guidance_scale`; `true_cfg_scale` is classifier-free guidance on top.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from . import flops
from .base import JOINT_MLP, ModelSpec, Sampling
from .common import check_length, dynamic_shift, linear_sigmas, timestep_of
from .text_encoders import clip_output, t5_hidden

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from .embeddings import PromptEmbeds


class FluxSpec(ModelSpec):
    """FLUX.1 (text to image)."""

    name = "flux"
    transformer_class = "FluxTransformer2DModel"
    pipeline_class = "FluxPipeline"
    pads_text = 0
    text_parts = ("tokenizer", "text_encoder", "tokenizer_2", "text_encoder_2")
    packed = True
    lora_names = "flux"
    engine_pipeline = "omni_rollout.vllm_omni.pipelines.flux:FluxRolloutPipeline"

    @property
    def mlp_targets(self) -> tuple[str, ...]:  # type: ignore[override]
        # The single blocks' `proj_out` shares its name with the network's last layer, which is not meant: spell it out.
        singles = range(self.transformer_config.get("num_single_layers", 38))
        return (*JOINT_MLP, "proj_mlp", *(f"single_transformer_blocks.{i}.proj_out" for i in singles))

    def check_prompt(self, tokenizers: Mapping[str, Any], prompt: str, max_sequence_length: int) -> None:
        check_length(prompt, len(tokenizers["tokenizer_2"](prompt).input_ids), max_sequence_length, "T5")

    def encode_prompt(self, parts: Mapping[str, Any], prompt: str, max_sequence_length: int) -> tuple[Tensor, Tensor]:
        """T5's hidden states with padding up to `max_sequence_length`, and CLIP's pooled vector."""
        hidden = t5_hidden(parts["tokenizer_2"], parts["text_encoder_2"], prompt, max_sequence_length)
        return hidden, clip_output(parts["tokenizer"], parts["text_encoder"], prompt).pooler_output[0]

    def schedule_kwargs(
        self, scheduler: Any, num_steps: int, height: int, width: int, num_frames: int = 1
    ) -> dict[str, Any]:
        sigmas = None if scheduler.config.get("use_flow_sigmas", False) else linear_sigmas(num_steps)
        return {"mu": dynamic_shift(scheduler, self.patches(height, width)), "sigmas": sigmas}

    def predict(
        self, transformer: nn.Module, x: Tensor, sigma: Tensor, prompts: PromptEmbeds, settings: Sampling
    ) -> Tensor:
        places = grid_ids(settings.height // self.size_multiple, settings.width // self.size_multiple, x.device)
        return transformer(
            hidden_states=x,
            timestep=timestep_of(sigma) / 1000,
            guidance=self.embedded_guidance(transformer, sigma, settings),
            pooled_projections=self.pooled_of(prompts).to(x.dtype),
            encoder_hidden_states=self.unpadded(prompts).embeds.to(x.dtype),
            txt_ids=places.new_zeros(prompts.embeds.shape[1], 3),
            img_ids=places,
            return_dict=False,
        )[0].float()

    def stock_guidance(self, settings: Sampling) -> float | None:
        return settings.guidance_scale

    def flops(self, config: Mapping[str, Any], batch: int, settings: Sampling, text_tokens: int) -> float:
        S, _ = self.latent_shape(settings.height, settings.width, settings.num_frames)
        D = config.get("num_attention_heads", 24) * config.get("attention_head_dim", 128)
        both, channels = batch * (S + text_tokens), config.get("in_channels", 64)
        double = flops.joint_block(batch, S, text_tokens, D)
        single = flops.linear(batch, D, 3 * D) + flops.linear(both, D, 7 * D) + flops.linear(both, 5 * D, D)
        single += flops.attention(batch, S + text_tokens, S + text_tokens, D)
        embedders = 3 if config.get("guidance_embeds", True) else 2
        ends = flops.linear(batch, 256 * (embedders - 1) + config.get("pooled_projection_dim", 768), D)
        ends += embedders * flops.linear(batch, D, D) + flops.linear(batch, D, 2 * D)
        ends += flops.linear(batch * text_tokens, config.get("joint_attention_dim", 4096), D)
        ends += flops.linear(batch * S, channels, D)
        ends += flops.linear(batch * S, D, config.get("patch_size", 1) ** 2 * (config.get("out_channels") or channels))
        return config.get("num_layers", 19) * double + config.get("num_single_layers", 38) * single + ends


def grid_ids(rows: int, columns: int, device: torch.device) -> Tensor:
    """Position ids [rows * columns, 3] of the image tokens: (0, row, column)."""
    import torch

    ids = torch.zeros(rows, columns, 3, device=device)
    ids[..., 1] = torch.arange(rows, device=device)[:, None]
    ids[..., 2] = torch.arange(columns, device=device)[None, :]
    return ids.view(-1, 3)
