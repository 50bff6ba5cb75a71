"""Wan2.2 text to video (and Wan2.1, its predecessor): the A14B with two experts, and the 5B.

Follows `WanPipeline` of diffusers 0.40. Latents [B, C, T', H/f, W/f] with T' = (T - 1) / 4 + 1, C = 16 and f = 8 for
the 14B models, C = 48 and f = 16 for the 5B. What that pipeline calls `guidance_scale` is classifier-free guidance,
here `true_cfg_scale`; a pair gives the two experts a scale each (`guidance_scale`, `guidance_scale_2` there).

The published folders name a UniPC scheduler, which cuts timesteps to whole numbers before the network sees them and
starts just below sigma = 1, hence at 999. With such a folder the network is asked at those times here too; with a
flow-match Euler scheduler it sees sigma itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import flops
from .base import ModelSpec, Sampling
from .common import check_length, timestep_of, whole_timestep_of, with_statistics, without_statistics
from .errors import SpecError
from .folders import component, has_part

if TYPE_CHECKING:
    from torch import Tensor, nn

    from .embeddings import PromptEmbeds


class WanSpec(ModelSpec):
    """Wan (text to video)."""

    name = "wan"
    transformer_class = "WanTransformer3DModel"
    pipeline_class = "WanPipeline"
    pads_text = 0
    vae_class = "AutoencoderKLWan"
    solvers = ("UniPCMultistepScheduler", "DPMSolverMultistepScheduler")
    attention_targets = ("to_q", "to_k", "to_v", "to_out.0")
    mlp_targets = ("ffn.net.0.proj", "ffn.net.2")
    lora_names = "wan"
    engine_pipeline = "omni_rollout.vllm_omni.pipelines.wan:WanRolloutPipeline"

    # ------------------------------------------------------------------ experts

    def transformer_folders(self, path: str | Path) -> dict[str, Path]:
        if self._boundary(path) is None:
            return super().transformer_folders(path)
        parts = ("transformer", "transformer_2")
        return {f"{part}.": component(path, part, "config.json") for part in parts}

    def joined(self, path: str | Path, parts: list[nn.Module]) -> nn.Module:
        """The transformer, or both experts as one `WanExperts` where the folder has two."""
        boundary = self._boundary(path)
        if boundary is None:
            return super().joined(path, parts)
        from .wan_experts import WanExperts

        high, low = parts
        return WanExperts(high, low, boundary).eval()

    @staticmethod
    def _boundary(path: str | Path) -> float | None:
        """The timestep that divides the experts, None for a folder with one transformer."""
        component(path, "transformer", "config.json")
        ratio = WanSpec(path).pipeline_config.get("boundary_ratio")
        if ratio is None:
            return None
        if not has_part(path, "transformer_2"):
            raise SpecError(f"{str(path)!r} has boundary_ratio={ratio!r} but no transformer_2: it needs both experts.")
        return ratio * 1000.0

    # ------------------------------------------------------------------ schedule

    def load_scheduler(self, path: str | Path) -> Any:
        """As for every architecture; SpecError for a solver whose config does not make flow-matching sigmas."""
        scheduler = super().load_scheduler(path)
        if type(scheduler).__name__ in self.solvers and not scheduler.config.get("use_flow_sigmas", False):
            raise SpecError(
                f"{str(path)!r}: its {type(scheduler).__name__} has use_flow_sigmas=False, a schedule of noise-prediction "
                "models. Wan is a flow-matching model: set use_flow_sigmas=true and prediction_type='flow_prediction', "
                "or put a FlowMatchEulerDiscreteScheduler there."
            )
        return scheduler

    @property
    def whole_timesteps(self) -> bool:
        """Whether the folder's scheduler hands whole numbers to the network."""
        return self.scheduler_config.get("_class_name") in self.solvers

    # ------------------------------------------------------------------ shapes

    @property
    def vae_factor(self) -> int:
        return self.vae_config.get("scale_factor_spatial", 8)

    @property
    def frame_factor(self) -> int:
        """Frames per latent frame, after the first."""
        return self.vae_config.get("scale_factor_temporal", 4)

    def check_size(self, height: int, width: int, num_frames: int = 1) -> None:
        super().check_size(height, width)
        if num_frames < 1 or (num_frames - 1) % self.frame_factor:
            near = max(0, round((num_frames - 1) / self.frame_factor)) * self.frame_factor + 1
            raise SpecError(
                f"num_frames={num_frames!r} does not fit {self.name}: it must be 1 more than a multiple of "
                f"{self.frame_factor}, e.g. {near}."
            )

    def latent_shape(self, height: int, width: int, num_frames: int = 1) -> tuple[int, ...]:
        self.check_size(height, width, num_frames)
        frames = (num_frames - 1) // self.frame_factor + 1
        return self.latent_channels, frames, height // self.vae_factor, width // self.vae_factor

    def check_prompt(self, tokenizers: Mapping[str, Any], prompt: str, max_sequence_length: int) -> None:
        from diffusers.pipelines.wan.pipeline_wan import prompt_clean

        check_length(prompt, len(tokenizers["tokenizer"](prompt_clean(prompt)).input_ids), max_sequence_length, "T5")

    def encode_prompt(self, parts: Mapping[str, Any], prompt: str, max_sequence_length: int) -> tuple[Tensor, None]:
        """UMT5's hidden states, then zeros up to `max_sequence_length`, which the network attends to as well."""
        from diffusers.pipelines.wan.pipeline_wan import prompt_clean
        from torch.nn.functional import pad

        model = parts["text_encoder"]
        ids = parts["tokenizer"](prompt_clean(prompt), return_tensors="pt").input_ids.to(model.device)
        hidden = model(ids, ids.new_ones(ids.shape)).last_hidden_state[0]
        return pad(hidden, (0, 0, 0, max_sequence_length - ids.shape[1])), None

    # ------------------------------------------------------------------ network

    def timesteps_at(self, sigma: Tensor) -> Tensor:
        """What the network is told at these noise levels, [B] fp32, on a scale of 1000."""
        return whole_timestep_of(sigma) if self.whole_timesteps else timestep_of(sigma)

    def predict(
        self, transformer: nn.Module, x: Tensor, sigma: Tensor, prompts: PromptEmbeds, settings: Sampling
    ) -> Tensor:
        # The 5B's pipeline gives each token a timestep (so that images can be clean frames). Here all are equal: one for each
        # sample computes the same, without a modulation for every token.
        embeds = self.unpadded(prompts).embeds.to(x.dtype)
        return transformer(x, self.timesteps_at(sigma), embeds, return_dict=False)[0].float()

    def guidance_weight(
        self, transformer: nn.Module, sigma: Tensor, scale: float | tuple[float, float]
    ) -> float | Tensor:
        """A pair gives each expert its weight, [B, 1, 1, 1, 1]."""
        is_high: Any = getattr(transformer, "is_high", None)
        if not isinstance(scale, tuple) or is_high is None:
            return super().guidance_weight(transformer, sigma, scale)
        import torch

        return torch.where(is_high(self.timesteps_at(sigma)), *scale).view(-1, 1, 1, 1, 1)

    def pixels(self, vae: Any, latents: Tensor) -> Tensor:
        from .single_frame import single_frame_convolutions

        one_frame = latents.shape[2] == 1
        decoder: Any = single_frame_convolutions(vae) if one_frame else vae
        video = decoder.decode(with_statistics(vae, latents), return_dict=False)[0]
        return video[:, :, 0] if one_frame else video.transpose(1, 2)

    def cells(self, vae: Any, pixels: Tensor) -> Tensor:
        from .single_frame import single_frame_convolutions

        one_frame = pixels.ndim == 4
        encoder: Any = single_frame_convolutions(vae) if one_frame else vae
        video = pixels.unsqueeze(2) if one_frame else pixels.transpose(1, 2)
        return without_statistics(vae, encoder.encode(video).latent_dist.mode().float())

    def flops(self, config: Mapping[str, Any], batch: int, settings: Sampling, text_tokens: int) -> float:
        channels, frames, rows, columns = self.latent_shape(settings.height, settings.width, settings.num_frames)
        per_patch = config.get("patch_size", (1, 2, 2))[1] * config.get("patch_size", (1, 2, 2))[2]
        S, N = frames * rows * columns // per_patch, text_tokens
        D = config.get("num_attention_heads", 40) * config.get("attention_head_dim", 128)
        block = flops.linear(batch * S, D, 4 * D) + flops.attention(batch, S, S, D)  # self-attention
        block += flops.linear(batch * S, D, 2 * D) + flops.linear(batch * N, D, 2 * D)  # cross-attention
        block += flops.attention(batch, S, N, D) + 2 * flops.linear(batch * S, D, config.get("ffn_dim", 13824))
        ends = flops.linear(batch, config.get("freq_dim", 256) + D, D) + flops.linear(batch, D, 6 * D)
        ends += flops.linear(batch * N, config.get("text_dim", 4096) + D, D)
        ends += flops.linear(batch * S, channels * per_patch, D)
        ends += flops.linear(batch * S, D, config.get("out_channels", channels) * per_patch)
        return config.get("num_layers", 40) * block + ends
