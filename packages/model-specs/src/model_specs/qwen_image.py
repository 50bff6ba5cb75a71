"""Qwen-Image: a 20 B double-stream transformer over packed 2x2 latent patches, text from Qwen2.5-VL.

Follows `QwenImagePipeline` of diffusers 0.40, the rescaling of its classifier-free guidance included.
Latents are packed: [B, S, 64] with S = (H/16) * (W/16) image tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from . import flops
from .base import ModelSpec, Sampling
from .common import check_length, dynamic_shift, linear_sigmas, timestep_of, with_statistics, without_statistics

if TYPE_CHECKING:
    from torch import Tensor, nn

    from .embeddings import PromptEmbeds

# The system prompt that the model was trained with; its first 34 tokens are dropped from the embeddings.
TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, "
    "spatial relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n"
    "<|im_start|>assistant\n"
)
TEMPLATE_TOKENS = 34


class QwenImageSpec(ModelSpec):
    """Qwen-Image (text to image)."""

    name = "qwen_image"
    transformer_class = "QwenImageTransformer2DModel"
    pipeline_class = "QwenImagePipeline"
    vae_class = "AutoencoderKLQwenImage"
    mlp_targets = ("img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2")
    limit = 1024
    packed = True
    lora_names = "qwen_image"
    engine_pipeline = "omni_rollout.vllm_omni.pipelines.qwen_image:QwenImageRolloutPipeline"
    engine_stepwise_pipeline = "omni_rollout.vllm_omni.pipelines.qwen_image:QwenImageStepwisePipeline"

    @property
    def vae_factor(self) -> int:
        return int(2 ** len(self.vae_config.get("temperal_downsample", (False, True, True))))

    def check_prompt(self, tokenizers: Mapping[str, Any], prompt: str, max_sequence_length: int) -> None:
        count = len(tokenizers["tokenizer"](TEMPLATE.format(prompt)).input_ids) - TEMPLATE_TOKENS
        check_length(prompt, count, max_sequence_length)

    def encode_prompt(self, parts: Mapping[str, Any], prompt: str, max_sequence_length: int) -> tuple[Tensor, None]:
        """Qwen2.5-VL's last hidden state of the user's turn."""
        model = parts["text_encoder"]
        ids = parts["tokenizer"](TEMPLATE.format(prompt), return_tensors="pt").input_ids.to(model.device)
        # The inner model spares the language head, whose logits nobody reads.
        hidden = model.model(input_ids=ids, attention_mask=ids.new_ones(ids.shape)).last_hidden_state
        return hidden[0, TEMPLATE_TOKENS:], None

    def schedule_kwargs(
        self, scheduler: Any, num_steps: int, height: int, width: int, num_frames: int = 1
    ) -> dict[str, Any]:
        return {"mu": dynamic_shift(scheduler, self.patches(height, width)), "sigmas": linear_sigmas(num_steps)}

    def predict(
        self, transformer: nn.Module, x: Tensor, sigma: Tensor, prompts: PromptEmbeds, settings: Sampling
    ) -> Tensor:
        cells = (1, settings.height // self.size_multiple, settings.width // self.size_multiple)
        return transformer(
            hidden_states=x,
            timestep=timestep_of(sigma) / 1000,
            guidance=self.embedded_guidance(transformer, sigma, settings),
            encoder_hidden_states=prompts.embeds.to(x.dtype),
            encoder_hidden_states_mask=None if prompts.full else prompts.mask,
            img_shapes=[[cells]] * len(x),
            return_dict=False,
        )[0].float()

    def guide(self, positive: Tensor, other: Tensor, scale: float | Tensor) -> Tensor:
        mixed = super().guide(positive, other, scale)
        # The stock pipeline gives the mixture the length that the positive prediction has, token by token. The floor
        # changes nothing but 0/0, which an untrained network with a zero output layer runs into.
        length = mixed.norm(dim=-1, keepdim=True).clamp_min(1e-20)
        return mixed * (positive.norm(dim=-1, keepdim=True) / length)

    def stock_guidance(self, settings: Sampling) -> float | None:
        return settings.guidance_scale

    def pixels(self, vae: Any, latents: Tensor) -> Tensor:
        from .single_frame import single_frame_convolutions

        z_BCTHW = with_statistics(vae, latents.unsqueeze(2))
        single_frame_convolutions(vae)
        if getattr(vae, "use_tiling", False) or getattr(vae, "use_slicing", False):
            picture: Tensor = vae.decode(z_BCTHW, return_dict=False)[0]
        else:  # `vae.decode` would also fill the caches that the next frame of a video would read
            picture = vae.decoder(vae.post_quant_conv(z_BCTHW))
        return picture[:, :, 0]

    def cells(self, vae: Any, pixels: Tensor) -> Tensor:
        from .single_frame import single_frame_convolutions

        encoder: Any = single_frame_convolutions(vae)
        return without_statistics(vae, encoder.encode(pixels.unsqueeze(2)).latent_dist.mode().float())[:, :, 0]

    def flops(self, config: Mapping[str, Any], batch: int, settings: Sampling, text_tokens: int) -> float:
        S, _ = self.latent_shape(settings.height, settings.width, settings.num_frames)
        D = config.get("num_attention_heads", 24) * config.get("attention_head_dim", 128)
        patch = config.get("patch_size", 2) ** 2 * (config.get("out_channels", 16) or config.get("in_channels", 64))
        ends = flops.linear(batch, 256, D) + flops.linear(batch, D, D) + flops.linear(batch, D, 2 * D)
        ends += flops.linear(batch * S, config.get("in_channels", 64), D) + flops.linear(batch * S, D, patch)
        ends += flops.linear(batch * text_tokens, config.get("joint_attention_dim", 3584), D)
        return config.get("num_layers", 60) * flops.joint_block(batch, S, text_tokens, D) + ends
