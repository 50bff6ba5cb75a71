"""Z-Image: a single-stream transformer that reads [image, text] as one sequence, text from a Qwen3.

Follows `ZImagePipeline` of diffusers 0.40. Latents [B, 16, H/8, W/8]. The network predicts clean minus noise at time
1 - sigma; the sign and the time are turned around here. That pipeline writes guidance as p + g * (p - n): its
`guidance_scale` g is `true_cfg_scale` - 1. Its optional norm cap and truncation (both off by default) are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from . import flops
from .base import ModelSpec, Sampling
from .common import check_length, dynamic_shift, timestep_of
from .errors import SpecError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from .embeddings import PromptEmbeds

# Image and text are each padded to a multiple of this many tokens inside the network.
TOKEN_MULTIPLE = 32


class ZImageSpec(ModelSpec):
    """Z-Image (text to image)."""

    name = "z_image"
    transformer_class = "ZImageTransformer2DModel"
    pipeline_class = "ZImagePipeline"
    attention_targets = ("to_q", "to_k", "to_v", "to_out.0")
    mlp_targets = ("feed_forward.w1", "feed_forward.w2", "feed_forward.w3")
    limit = 1024
    guides_in_one_forward = True
    lora_names = "z_image"
    engine_pipeline = "omni_rollout.vllm_omni.pipelines.z_image:ZImageRolloutPipeline"

    def check_prompt(self, tokenizers: Mapping[str, Any], prompt: str, max_sequence_length: int) -> None:
        ids = tokenizers["tokenizer"](chat_text(tokenizers["tokenizer"], prompt)).input_ids
        check_length(prompt, len(ids), max_sequence_length)

    def encode_prompt(self, parts: Mapping[str, Any], prompt: str, max_sequence_length: int) -> tuple[Tensor, None]:
        """Qwen3's last but one hidden state over the whole chat-templated prompt."""
        tokenizer, model = parts["tokenizer"], parts["text_encoder"]
        ids = tokenizer(chat_text(tokenizer, prompt), return_tensors="pt").input_ids.to(model.device)
        output = model(input_ids=ids, attention_mask=ids.new_ones(ids.shape), output_hidden_states=True)
        return output.hidden_states[-2][0], None

    def schedule_kwargs(
        self, scheduler: Any, num_steps: int, height: int, width: int, num_frames: int = 1
    ) -> dict[str, Any]:
        import torch

        sigmas = torch.linspace(1.0, 1 / num_steps, num_steps).tolist()
        return {"mu": dynamic_shift(scheduler, self.patches(height, width)), "sigmas": sigmas}

    def predict(
        self, transformer: nn.Module, x: Tensor, sigma: Tensor, prompts: PromptEmbeds, settings: Sampling
    ) -> Tensor:
        import torch

        time = (1000.0 - timestep_of(sigma)) / 1000
        predicted = transformer(list(x.unsqueeze(2).unbind(0)), time, prompts.rows(x.dtype), return_dict=False)[0]
        return -torch.stack([one.float() for one in predicted]).squeeze(2)

    def stock_guidance(self, settings: Sampling) -> float:
        if isinstance(settings.true_cfg_scale, tuple):
            raise SpecError(f"true_cfg_scale={settings.true_cfg_scale!r}: a pair is for a folder with two experts.")
        return settings.true_cfg_scale - 1.0

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


def chat_text(tokenizer: Any, prompt: str) -> str:
    """The prompt in the tokenizer's chat template, as the stock pipeline puts it."""
    text: str = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True, enable_thinking=True
    )
    return text
