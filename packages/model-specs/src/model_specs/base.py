"""`ModelSpec`: everything that training and sampling must know about one diffusers architecture.

Training and the rollout call the same `velocity`, so on-policy log-probs agree to the bit; a test per architecture
holds it to what the stock diffusers pipeline computes.

Shapes: B samples, S tokens, C channels, T frames, H W. Notation: sigma in [0, 1], x = (1 - sigma) * clean + sigma *
noise, and the velocity points from clean to noise, so a step is x + (sigma_next - sigma) * velocity.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from model_specs.embeddings import PromptEmbeds, PromptEncoder
from model_specs.errors import SpecError


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
    attention_targets: ClassVar[tuple[str, ...]]
    """Suffixes of the attention Linear modules, as peft's `target_modules` takes them."""
    mlp_targets: ClassVar[tuple[str, ...]]
    """Suffixes of the MLP Linear modules."""
    default_max_sequence_length: ClassVar[int]
    """Prompt tokens, when the caller gives no number (the stock pipeline's default)."""
    size_multiple: int = 16
    """Height and width must be multiples of this many pixels."""

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = None if folder is None else Path(folder)
        self.transformer_config: Mapping[str, Any] = self._read("transformer/config.json")
        self.vae_config: Mapping[str, Any] = self._read("vae/config.json")
        self.pipeline_config: Mapping[str, Any] = self._read("model_index.json")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'' if self.folder is None else str(self.folder)!r})"

    def _read(self, name: str) -> Mapping[str, Any]:
        file = None if self.folder is None else self.folder / name
        return json.loads(file.read_text()) if file is not None and file.is_file() else {}

    @property
    def lora_targets(self) -> tuple[str, ...]:
        """All attention and MLP Linear modules: the default of a LoRA here."""
        return self.attention_targets + self.mlp_targets

    # ------------------------------------------------------------------ loading

    def load_transformer(
        self, path: str | Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> nn.Module:
        """The transformer of a pipeline folder, in eval mode, with gradients on (freezing is the caller's choice)."""
        return self._load(self.transformer_class, path, "transformer", dtype, device)

    def load_vae(
        self, path: str | Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> nn.Module:
        """The autoencoder of a pipeline folder, in eval mode and frozen."""
        return self._load(self.vae_class, path, "vae", dtype, device).requires_grad_(False)

    def load_scheduler(self, path: str | Path) -> Any:
        """The scheduler of a pipeline folder, of the class that its config names."""
        import diffusers

        folder = component(path, "scheduler", "scheduler_config.json")
        name = json.loads((folder / "scheduler_config.json").read_text()).get("_class_name", "")
        if not hasattr(diffusers, name):
            raise SpecError(f"{str(folder)!r} names the scheduler {name!r}, which diffusers does not have.")
        return getattr(diffusers, name).from_pretrained(folder)

    @abstractmethod
    def load_encoder(
        self, path: str | Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> PromptEncoder:
        """The text encoder(s) and tokenizer(s) of a pipeline folder, frozen, behind a cache."""

    @staticmethod
    def _load(class_name: str, path: str | Path, part: str, dtype: torch.dtype, device: torch.device | str) -> Any:
        import diffusers

        folder = component(path, part, "config.json")
        try:
            model = getattr(diffusers, class_name).from_pretrained(folder, torch_dtype=dtype)
        except OSError as error:
            raise SpecError(f"Cannot load {class_name} from {str(folder)!r}: {error}") from error
        return model.to(device).eval()

    # ------------------------------------------------------------------ shapes and schedule

    @property
    @abstractmethod
    def vae_factor(self) -> int:
        """Pixels per latent cell, along height and width."""

    @property
    @abstractmethod
    def latent_channels(self) -> int:
        """Channels of the latent before packing."""

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
        *,
        negative: PromptEmbeds | None = None,
        true_cfg_scale: float = 1.0,
        guidance_scale: float | None = None,
        height: int,
        width: int,
        num_frames: int = 1,
    ) -> Tensor:
        """Velocity at `sigma`, with gradient.

        Args:
            transformer: the network, perhaps with peft adapters, perhaps sharded by FSDP2.
            latents: [B, ...] fp32, the shape of `latent_shape`. Cast to the transformer's dtype inside.
            sigma: [B] fp32 in [0, 1].
            cond: the prompts, one row per sample or one for all.
            negative: the negative prompts; used when `true_cfg_scale` asks for guidance.
            true_cfg_scale: weight w of classifier-free guidance, negative + w * (positive - negative); 1 is off, and
                costs one forward instead of two.
            guidance_scale: the number fed into networks that were distilled with guidance (FLUX.1-dev), else None.
            height, width: pixels; num_frames: frames of the video, 1 for images.

        Returns:
            [B, ...] fp32.

        Raises:
            SpecError: shapes that do not fit, or guidance without what it needs.
        """

    @abstractmethod
    def decode(self, vae: nn.Module, latents: Tensor, *, height: int, width: int, num_frames: int = 1) -> Tensor:
        """Clean latents [B, ...] to pixels: uint8 [B, 3, H, W], or [B, T, 3, H, W] for video. No gradient."""

    # ------------------------------------------------------------------ helpers for subclasses

    def guiding_prompts(self, negative: PromptEmbeds | None, true_cfg_scale: float) -> PromptEmbeds | None:
        """The negative prompts if the scale asks for guidance, else None; SpecError when it asks and there are none."""
        if true_cfg_scale <= 1:
            return None
        if negative is None:
            raise SpecError(
                f"true_cfg_scale={true_cfg_scale!r} needs negative prompts and got none: encode a negative prompt "
                "(an empty one will do) or set true_cfg_scale=1."
            )
        return negative


def component(path: str | Path, part: str, config: str) -> Path:
    """The subfolder `part` of a pipeline folder; SpecError when the folder, its index or the part is missing."""
    folder = Path(path)
    if not folder.is_dir():
        raise SpecError(f"There is no folder {str(path)!r}: give the path of a diffusers pipeline folder.")
    if not (folder / "model_index.json").is_file():
        raise SpecError(
            f"{str(path)!r} has no model_index.json, so it is no diffusers pipeline folder: save one with "
            "`pipeline.save_pretrained(folder)` and give that folder, not one of its parts."
        )
    if not (folder / part / config).is_file():
        parts = sorted(child.name for child in folder.iterdir() if child.is_dir())
        raise SpecError(f"{str(path)!r} has no {part}/{config}; its parts are {parts}.")
    return folder / part


def compute_dtype(transformer: nn.Module) -> torch.dtype:
    """Dtype of the base weights. Adapters (often kept in fp32 beside a bf16 base) do not count."""
    for name, parameter in transformer.named_parameters():
        if "lora_" not in name and parameter.is_floating_point():
            return parameter.dtype
    return torch.float32


def dynamic_shift(scheduler: Any, tokens: int) -> float:
    """The `mu` of resolution-dependent shifting: linear in the number of image tokens between two anchor points.

    Defaults are those of the FLUX and Qwen-Image pipelines in diffusers 0.40 (256 tokens: 0.5, 4096 tokens: 1.15).
    """
    config = scheduler.config
    low, high = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    base, top = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
    slope = (top - base) / (high - low)
    return tokens * slope + (base - slope * low)


def linear_sigmas(num_steps: int) -> list[float]:
    """1, ..., 1/K: the grid before shifting that the Qwen-Image and FLUX pipelines hand to their scheduler."""
    if num_steps < 1:
        raise SpecError(f"num_steps={num_steps!r} must be at least 1.")
    last = 1.0 / num_steps
    if num_steps == 1:
        return [1.0]
    step = (last - 1.0) / (num_steps - 1)
    return [1.0 + i * step for i in range(num_steps - 1)] + [last]


def timestep_of(sigma: Tensor) -> Tensor:
    """sigma through the stock pipelines' detour over 0..1000, so that the rounding is theirs."""
    return sigma.float() * 1000.0 / 1000.0


def split_batch(latents: Tensor, pixels_per_sample: int) -> Sequence[Tensor]:
    """Cut a batch for decoding, so that memory stays flat: by 4 million pixels, on a CPU by what its caches like."""
    budget = 32 * 1024 if latents.device.type == "cpu" else 4 * 1024 * 1024
    return latents.split(max(1, budget // max(1, pixels_per_sample)))
