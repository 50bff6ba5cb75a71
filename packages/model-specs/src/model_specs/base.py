"""`ModelSpec`: everything that training and sampling must know about one diffusers architecture.

Training and the rollout call the same `velocity`, so on-policy log-probs agree to the bit; a test per architecture
holds it to what the stock diffusers pipeline computes.

Shapes: B samples, S tokens, C channels, T frames, H W. Notation: sigma in [0, 1], x = (1 - sigma) * clean + sigma *
noise, and the velocity points from clean to noise, so a step is x + (sigma_next - sigma) * velocity.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from model_specs.embeddings import PromptEmbeds, PromptEncoder
from model_specs.errors import SpecError
from model_specs.folders import component, has_part, load_diffusers, load_part, read_json


class Sampling(Protocol):
    """What a network must know of how its samples are drawn. `sde_samplers.SamplerSettings` is one; so is any object with these."""

    @property
    def height(self) -> int:
        """Pixels."""

    @property
    def width(self) -> int:
        """Pixels."""

    @property
    def num_frames(self) -> int:
        """Frames of the video, 1 for images."""

    @property
    def true_cfg_scale(self) -> float | tuple[float, float]:
        """Weight w of classifier-free guidance, negative + w * (positive - negative); 1 is off, and costs one prediction instead
        of two. A pair is for networks with two experts."""

    @property
    def guidance_scale(self) -> float | None:
        """The number fed into networks that were distilled with guidance (FLUX.1-dev), else None."""


class ModelSpec(ABC):
    """One architecture. Subclass it, set the class attributes, and register it (`registry.register` or entry point).

    Args:
        folder: a pipeline folder whose configs replace the defaults of the published full-size model (sizes, number of
            latent channels, VAE factors). `get_spec_for(folder)` passes it, `get_spec(name)` does not.
    """

    name: ClassVar[str]
    """Short name, e.g. "qwen_image"."""
    transformer_class: ClassVar[str]
    """Class name in diffusers."""
    pipeline_class: ClassVar[str]
    """Class name of the stock text-to-image (or video) pipeline."""
    vae_class: ClassVar[str]
    """Class name of the autoencoder."""
    attention_targets: tuple[str, ...]
    """Suffixes of the attention Linear modules, as peft's `target_modules` takes them."""
    mlp_targets: tuple[str, ...]
    """Suffixes of the MLP Linear modules."""
    default_max_sequence_length: ClassVar[int]
    """Prompt tokens, when the caller gives no number (the stock pipeline's default)."""

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = None if folder is None else Path(folder)
        self.transformer_config: Mapping[str, Any] = self._read("transformer/config.json")
        self.vae_config: Mapping[str, Any] = self._read("vae/config.json")
        self.scheduler_config: Mapping[str, Any] = self._read("scheduler/scheduler_config.json")
        self.pipeline_config: Mapping[str, Any] = self._read("model_index.json")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'' if self.folder is None else str(self.folder)!r})"

    def _read(self, name: str) -> Mapping[str, Any]:
        file = None if self.folder is None else self.folder / name
        return read_json(file) if file is not None and file.is_file() else {}

    @property
    def lora_targets(self) -> tuple[str, ...]:
        """All attention and MLP Linear modules of the blocks: the default of a LoRA here."""
        return self.attention_targets + self.mlp_targets

    # ------------------------------------------------------------------ loading

    def load_transformer(
        self, path: str | Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> nn.Module:
        """The transformer of a pipeline folder, in eval mode, with gradients on (freezing is the caller's choice)."""
        folder = component(path, "transformer", "config.json")
        return load_diffusers(self.transformer_class, folder, dtype, device)

    def empty_transformer(self, path: str | Path, dtype: torch.dtype = torch.float32) -> nn.Module:
        """The transformer with its parameters on the meta device and its tables (buffers, rotary angles) real.

        For loading shard by shard, from the files in `transformer_folders`.
        """
        import accelerate
        import diffusers

        folder = component(path, "transformer", "config.json")
        kind = getattr(diffusers, self.transformer_class)
        with accelerate.init_empty_weights(include_buffers=False):
            model = kind.from_config(kind.load_config(folder))
        kept = tuple(getattr(model, "_keep_in_fp32_modules", None) or ())
        for name, parameter in model.named_parameters():
            if not any(part in name for part in kept):
                parameter.data = parameter.data.to(dtype)
        return model.eval()

    def transformer_folders(self, path: str | Path) -> dict[str, Path]:
        """Where the weights of `load_transformer`'s module lie: parameter-name prefix to folder of safetensors."""
        return {"": component(path, "transformer", "config.json")}

    def load_vae(
        self, path: str | Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> nn.Module:
        """The autoencoder of a pipeline folder, in eval mode and frozen."""
        return load_diffusers(self.vae_class, component(path, "vae", "config.json"), dtype, device).requires_grad_(
            False
        )

    def load_scheduler(self, path: str | Path) -> Any:
        """The scheduler of a pipeline folder, of the class that its config names."""
        import diffusers

        folder = component(path, "scheduler", "scheduler_config.json")
        name = str(read_json(folder / "scheduler_config.json").get("_class_name"))
        if not hasattr(diffusers, name):
            raise SpecError(f"{str(folder)!r} names the scheduler {name!r}, which diffusers does not have.")
        return getattr(diffusers, name).from_pretrained(folder)

    @abstractmethod
    def load_encoder(
        self, path: str | Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> PromptEncoder:
        """The text encoder(s) and tokenizer(s) of a pipeline folder, frozen, behind a cache."""

    def prompt_check(self, path: str | Path) -> Callable[[str, int], None]:
        """A function (prompt, max_sequence_length) that raises PromptTooLongError where the encoder would, with the tokenizers of a
        pipeline folder alone: no weights are read."""
        parts = [p for p in ("tokenizer", "tokenizer_2", "tokenizer_3") if has_part(path, p)]
        tokenizers = {part: load_part(path, part, torch.float32, "cpu") for part in parts}
        return lambda prompt, length: self.check_prompt(tokenizers, prompt, length)

    def check_prompt(self, tokenizers: Mapping[str, Any], prompt: str, max_sequence_length: int) -> None:  # noqa: B027  (third parties need not say)
        """Raise PromptTooLongError for a prompt that the encoder refuses; a spec that does not say which counts none.

        Args:
            tokenizers: of the pipeline, by the name of their part.
            prompt: the text.
            max_sequence_length: tokens at most.
        """

    # ------------------------------------------------------------------ shapes and schedule

    @property
    @abstractmethod
    def vae_factor(self) -> int:
        """Pixels per latent cell, along height and width."""

    @property
    @abstractmethod
    def latent_channels(self) -> int:
        """Channels of the latent before packing."""

    @property
    def size_multiple(self) -> int:
        """Height and width must be multiples of this many pixels: two latent cells, one patch."""
        return 2 * self.vae_factor

    @abstractmethod
    def latent_shape(self, height: int, width: int, num_frames: int = 1) -> tuple[int, ...]:
        """Shape of one sample's latent, as `velocity` and trajectories hold it (no batch axis).

        Raises:
            SpecError: a size that is not a multiple of `size_multiple`, or a number of frames that does not fit.
        """

    def check_size(self, height: int, width: int, num_frames: int = 1) -> None:
        """Raise SpecError for a size that the stock pipeline would round."""
        multiple = self.size_multiple
        if height < multiple or width < multiple or height % multiple or width % multiple:
            near = [max(multiple, round(side / multiple) * multiple) for side in (height, width)]
            raise SpecError(
                f"{height}x{width} pixels do not fit {self.name}: height and width must be multiples of {multiple}. "
                f"The nearest size is {near[0]}x{near[1]}."
            )
        if num_frames != 1:
            raise SpecError(f"{self.name} makes single images, num_frames={num_frames!r} must be 1.")

    def check_latents(self, latents: Tensor, sigma: Tensor, height: int, width: int, num_frames: int = 1) -> None:
        """Raise SpecError when the latents do not have `latent_shape`, or sigma is not [B]."""
        expected = self.latent_shape(height, width, num_frames)
        if tuple(latents.shape[1:]) != expected:
            raise SpecError(
                f"Latents {tuple(latents.shape)} do not fit {height}x{width} pixels and {num_frames} frame(s): "
                f"{self.name} needs [B, {', '.join(map(str, expected))}]."
            )
        if sigma.shape != latents.shape[:1]:
            raise SpecError(f"sigma {tuple(sigma.shape)} must be [{latents.shape[0]}], one number per sample.")

    def schedule_kwargs(
        self, scheduler: Any, num_steps: int, height: int, width: int, num_frames: int = 1
    ) -> dict[str, Any]:
        """What the stock pipeline passes to `scheduler.set_timesteps` beside the number of steps (`mu`, `sigmas`)."""
        return {}

    # ------------------------------------------------------------------ the network

    @abstractmethod
    def velocity(
        self,
        transformer: nn.Module,
        latents: Tensor,
        sigma: Tensor,
        cond: PromptEmbeds,
        settings: Sampling,
        negative: PromptEmbeds | None = None,
    ) -> Tensor:
        """Velocity at `sigma`, with gradient.

        Args:
            transformer: the network, perhaps with peft adapters, perhaps sharded by FSDP2.
            latents: [B, ...] fp32, the shape of `latent_shape`. Cast to the transformer's dtype inside.
            sigma: [B] fp32 in [0, 1].
            cond: the prompts, one row per sample or one for all.
            settings: size and guidance.
            negative: the negative prompts; used when `settings.true_cfg_scale` asks for guidance.

        Returns:
            [B, ...] fp32.

        Raises:
            SpecError: shapes that do not fit, or guidance without what it needs.
        """

    @abstractmethod
    def decode(self, vae: nn.Module, latents: Tensor, *, height: int, width: int, num_frames: int = 1) -> Tensor:
        """Clean latents [B, ...] to pixels, no gradient: uint8 [B, 3, H, W], or [B, T, 3, H, W] for T > 1 frames."""

    def flops(self, config: Mapping[str, Any], batch: int, settings: Sampling, text_tokens: int) -> float:
        """Operations of one forward of the transformer (one prediction: double it under true guidance).

        Args:
            config: the transformer's config, `transformer.config` or the content of its config.json. Fields that are
                missing take the published full-size model's value.
            batch: samples; settings: size; text_tokens: prompt tokens with padding.
        """
        raise SpecError(f"{self.name} has no count of operations: implement `flops` in {type(self).__name__}.")

    # ------------------------------------------------------------------ helpers for subclasses

    def guiding_prompts(self, negative: PromptEmbeds | None, settings: Sampling) -> tuple[PromptEmbeds | None, float]:
        """The negative prompts if the settings ask for guidance, else None, and its scale, one number.

        Raises:
            SpecError: guidance without negative prompts, or a scale for each of two experts, which this network has not.
        """
        scale = settings.true_cfg_scale
        if isinstance(scale, tuple):
            raise SpecError(f"true_cfg_scale={scale!r}: a pair is for a folder with two experts.")
        return self.negative_for(negative, scale), scale

    @staticmethod
    def negative_for(negative: PromptEmbeds | None, scale: float) -> PromptEmbeds | None:
        """The negative prompts if the scale asks for guidance, else None; SpecError when it asks and there are none."""
        if scale <= 1:
            return None
        if negative is None:
            raise SpecError(
                f"true_cfg_scale={scale!r} needs negative prompts and got none: encode a negative prompt "
                "(an empty one will do) or set true_cfg_scale=1."
            )
        return negative

    def unpadded(self, prompts: PromptEmbeds) -> PromptEmbeds:
        """The prompts, or SpecError if a row has padding: for networks without a text mask, which would attend to it."""
        if not prompts.full:
            raise SpecError(
                f"{self.name} has no text mask and got prompt rows with padding, {prompts.mask.sum(1).tolist()} of "
                f"{prompts.mask.shape[1]} tokens: encode all of a batch with one max_sequence_length."
            )
        return prompts

    def pooled_of(self, prompts: PromptEmbeds) -> Tensor:
        """The pooled vectors [B, C], or SpecError for an architecture that cannot do without."""
        if prompts.pooled is None:
            raise SpecError(f"{self.name} needs pooled prompt vectors: encode the prompts with spec.load_encoder(...).")
        return prompts.pooled
